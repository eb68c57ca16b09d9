"""The fields that requests for text have in common: constraints on answers, and options of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from prejit.runtime.base.arguments import pairs
from prejit.runtime.generation.options import MAX_LOGPROBS
from prejit.server.gate.http_errors import field_error
from prejit.server.gate.server_settings import Settings
from prejit.server.grammar.grammar_sources import (
    GrammarSource,
    any_source,
    choice_source,
    regex_source,
    schema_source,
)
from prejit.server.openai.bodies import RequestFields, ResponseFields, Unused, check_only
from prejit.server.served.served import Served

Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
"""The texts that an answer may be."""
Schema = dict[str, Any] | str
"""A JSON Schema, or its JSON as a text."""
OBJECT: dict[str, Any] = {"type": "object"}
"""The JSON Schema of any object."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """JSON that an answer must be.

    Attributes:
        schema: the JSON Schema that it must meet.
        field: the field of the request that wants it, for errors.
        strict: whether keywords that a grammar cannot enforce are an error; if not, they are ignored.
    """

    schema: dict[str, Any]
    field: str
    strict: bool

    def source(self) -> GrammarSource:
        """Return the grammar."""
        return schema_source(self.schema, lenient=not self.strict)


@dataclass(frozen=True, slots=True)
class TextConstraint:
    """Text that an answer must be.

    Attributes:
        field: the field of the request that wants it, for errors.
        source: returns the grammar.
    """

    field: str
    source: Callable[[], GrammarSource]


AnyConstraint = Constraint | TextConstraint
"""A constraint on an answer."""


class StructuredOutputs(RequestFields, frozen=True, kw_only=True):
    """A constraint on an answer: exactly one of these.

    Attributes:
        json: JSON that meets a schema.
        regex: a match of a regular expression.
        choice: one of these texts.
        grammar: a text of a grammar in Lark or GBNF.
        json_object: true: any JSON object.
        disable_fallback: accepted: there is one library of grammars and no other to fall back to.
        disable_any_whitespace: accepted: JSON has at most one space between its parts anyway.
        disable_additional_properties, whitespace_pattern, structural_tag: not supported.
    """

    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: None = None
    whitespace_pattern: None = None
    structural_tag: None = None


class Structured(Unused, frozen=True, kw_only=True):
    """Constraints on an answer. A request has at most one of these.

    Attributes:
        structured_outputs: as vLLM has it.
        guided_json, guided_regex, guided_choice, guided_grammar: older names of its members.
        json_schema, grammar: as llama.cpp has them.
    """

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    grammar: str | None = None

    def constraint(self, other: AnyConstraint | None = None) -> AnyConstraint | None:
        """Return what an answer must be; None: any text.

        Args:
            other: what a field of the endpoint wants.

        Raises:
            ApiError: several fields say what it must be, or `structured_outputs` has nothing.
        """
        found = [] if other is None else [other]
        for owner, names, before in (
            (self, _MAKE_OF_OLDER, ""),
            (self.structured_outputs, _MAKE, "structured_outputs."),
        ):
            for name, make in names.items():
                value = getattr(owner, name, None)
                if value is not None and value is not False:
                    found.append(make(before + name, value))
        if len(found) > 1:
            fields = [each.field for each in found]
            raise field_error(
                fields[1],
                f"expected one field that says what an answer must be, found "
                f"{' and '.join(fields)}",
            )
        if self.structured_outputs is not None and not found:
            raise field_error(
                "structured_outputs", f"expected one of {', '.join(_MAKE)}, found none"
            )
        return found[0] if found else None


def _json(field: str, value: Schema) -> Constraint:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise field_error(field, f"expected a JSON Schema, found {value!r:.80}") from error
    return Constraint(value, field, strict=True)


def _json_object(field: str, value: object) -> Constraint:
    return Constraint({"type": "object"}, field, strict=True)


def _text(source: Callable[[Any], GrammarSource], field: str, value: object) -> TextConstraint:
    return TextConstraint(field, partial(source, value))


_regex = partial(_text, regex_source)
_choice = partial(_text, choice_source)
_grammar = partial(_text, any_source)

_MAKE: Mapping[str, Callable[[str, Any], AnyConstraint]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
_MAKE_OF_OLDER: Mapping[str, Callable[[str, Any], AnyConstraint]] = {
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _json,
    "grammar": _grammar,
}


Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
"""A number of alternatives of a token."""
Tokens = Annotated[int, Meta(ge=1)]
"""A number of new tokens."""
Stop = Annotated[str, Meta(max_length=512)]
"""A text that ends an answer. The engine looks for each of them at every token, so they have limits. An empty
one, which some clients send in place of none, ends nothing."""
BadWord = Annotated[str, Meta(min_length=1, max_length=512)]
"""A text that an answer may not have."""
Bias = Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)]
"""Numbers to add to the logits of token ids."""
_INT32 = 2**31 - 1
_OPENAI_TEMPERATURE = 1.0
"""The temperature of OpenAI's API, where neither the request nor the bundle has one."""


class StreamOptions(RequestFields, frozen=True, kw_only=True):
    """Options of a stream.

    Attributes:
        include_usage: send a last chunk with the usage of the request.
        include_obfuscation: accepted without effect: events have no padding.
        continuous_usage_stats: not supported.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


_ONLY = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
}
"""Fields of vLLM that this server cannot do, each with the value that asks for nothing."""


class Sampled(Structured, frozen=True, kw_only=True):
    """The fields of all endpoints that generate text, with the constraints on answers.

    Attributes:
        model: the name of a served model; it may be missing if there is one.
        temperature: 0 takes the most likely token. Default: the bundle's, else 1.
        top_p: keep the smallest set of tokens with this probability.
        stream: answer with server-sent events.
        stream_options: options of a stream.
        top_k: keep the most likely tokens; 0 and -1 keep all. As vLLM has it.
        min_p: keep tokens with this fraction of the best one's probability. As vLLM has it.
        repetition_penalty: 1 is no penalty. As vLLM has it.
        presence_penalty: subtracted from the logits of generated tokens.
        frequency_penalty: subtracted for each time that a token was generated.
        logit_bias: numbers to add to the logits of token ids.
        seed: the same seed gives the same tokens. Default: a random one.
        stop: the text ends before any of these. An empty one is none.
        stop_token_ids: the text ends at these tokens too. As vLLM has it.
        ignore_eos: do not end at the model's own stop tokens. As vLLM has it.
        min_tokens: no stop token and no stop text ends the answer before this many tokens. As vLLM has it.
        allowed_token_ids: only these tokens come. As vLLM has it.
        bad_words: texts that the answer may not have. As vLLM has it.
        truncate_prompt_tokens: keep this many tokens of the end of the prompt; -1: as many as the longest
            context has. As vLLM has it.
        prompt_logprobs: return the log-probability of each token of the prompt, and of this many of the most
            likely tokens. As vLLM has it.
        priority: a smaller one is served first. As vLLM has it.
        cache_salt: only prompts of the same salt share what they have computed. As vLLM has it.
        use_beam_search, length_penalty, early_stopping: only their defaults of vLLM.
        include_stop_str_in_output, skip_special_tokens: only their defaults of vLLM.
        spaces_between_special_tokens: only its default of vLLM.
        return_token_ids, return_tokens_as_token_ids: only false.
        logits_processors, kv_transfer_params, vllm_xargs: not supported.
    """

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Bias | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=32)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-_INT32, le=_INT32)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1, max_length=1 << 18)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=128)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    prompt_logprobs: Logprobs | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logits_processors: None = None
    kv_transfer_params: None = None
    vllm_xargs: None = None

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream ends with the usage of the request."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def chosen_temperature(self, served: Served) -> float:
        """Return the temperature: the request's, else the bundle's, else OpenAI's default."""
        if self.temperature is not None:
            return self.temperature
        found: float = served.bundle.defaults.options().get("temperature", _OPENAI_TEMPERATURE)
        return found

    def options(self, served: Served) -> dict[str, Any]:
        """Return the options of the engine for these fields. None stands for what is not given."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return {
            "temperature": self.chosen_temperature(served),
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            # Checked once, and not for each prompt and choice.
            "logit_bias": pairs("logit_bias", self.logit_bias) if self.logit_bias else None,
            # Clients count on different answers to equal requests, unless they give a seed.
            "seed": secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            "stop": [stop for stop in stops if stop] or None,
            "min_new_tokens": self.min_tokens,
            "stop_token_ids": self._stop_token_ids(served),
        }

    def _stop_token_ids(self, served: Served) -> list[int] | None:
        if not self.ignore_eos and not self.stop_token_ids:
            return None
        decoder = served.bundle.decoder.decoder
        own = () if self.ignore_eos else decoder.eos_token_ids
        return [*own, *(self.stop_token_ids or ())]


def check_fields(body: Sampled) -> None:
    """Check what the types of fields do not say.

    Raises:
        ApiError: a field has a value that is not supported; or there are options of a stream without a
            stream, or log-probabilities of a prompt with one.
    """
    check_only(body, _ONLY)
    if body.stream_options is not None:
        if not body.stream:
            raise field_error("stream_options", "expected them with stream only")
        check_only(body.stream_options, {"continuous_usage_stats": False})
    if body.stream and body.prompt_logprobs is not None:
        raise field_error("prompt_logprobs", "expected none in a stream")


def new_tokens(
    given: int | None, served: Served, settings: Settings, *, name: str, default: int | None = None
) -> int | None:
    """Return how many tokens a request may generate; None: until the context is full.

    Args:
        given: what the request asks for.
        served: the model.
        settings: the limits of the server.
        name: the field of the request, for errors.
        default: of the endpoint, for a request that does not ask.

    Raises:
        ApiError: it asks for more than the server's limit.
    """
    limit = settings.max_tokens
    if given is not None:
        if limit is not None and given > limit:
            raise field_error(
                name,
                f"expected at most {limit} new tokens, the limit of this server, found {given}",
            )
        return given
    bundle: int | None = served.bundle.defaults.options().get("max_new_tokens")
    return min((each for each in (bundle or default, limit) if each is not None), default=None)


class PromptTokensDetails(ResponseFields, frozen=True, kw_only=True):
    """Tokens of prompts by where they came from.

    Attributes:
        cached_tokens: those that were in the cache already.
    """

    cached_tokens: int


class TokenUsage(ResponseFields, frozen=True, kw_only=True):
    """How many tokens a request had."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
