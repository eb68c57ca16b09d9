"""The fields that requests for text have in common, and the options of the engine that they stand for."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from msgspec import Meta

from prejit.runtime.generation.options import MAX_LOGPROBS
from prejit.runtime.server.errors import ApiError
from prejit.runtime.server.openai.bodies import RequestFields, ResponseFields
from prejit.runtime.server.openai.structured import Structured
from prejit.runtime.server.served import Served
from prejit.runtime.server.settings import Settings

Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
"""A number of alternatives of a token."""
Tokens = Annotated[int, Meta(ge=1)]
"""A number of new tokens."""
Stop = Annotated[str, Meta(min_length=1, max_length=512)]
"""A text that ends an answer. The engine looks for each of them at every token, so they have limits."""
Bias = Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)]
"""Numbers to add to the logits of token ids."""
_INT32 = 2**31 - 1
_OPENAI_TEMPERATURE = 1.0
"""The temperature of OpenAI's API, where neither the request nor the bundle has one."""


class StreamOptions(RequestFields, frozen=True, kw_only=True):
    """Options of a stream.

    Attributes:
        include_usage: send a last chunk with the usage of the request.
    """

    include_usage: bool | None = None


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    """Check that a request without a stream has no options of one.

    Raises:
        ApiError: it has.
    """
    if options is not None and not stream:
        raise ApiError(
            400, "stream_options: expected them with stream only", param="stream_options"
        )


class Sampled(Structured, frozen=True, kw_only=True):
    """What all endpoints take that generate text, beside what an answer must be.

    Attributes:
        model: the name of a served model; it may be missing if there is one.
        temperature: 0 takes the most likely token. Default: the bundle's, else 1.
        top_p: keep the smallest set of tokens with this probability.
        stream: answer with server-sent events.
        top_k: keep the most likely tokens; 0 and -1 keep all. As vLLM has it.
        min_p: keep tokens with this fraction of the best one's probability. As vLLM has it.
        repetition_penalty: 1 is no penalty. As vLLM has it.
        presence_penalty: subtracted from the logits of generated tokens.
        frequency_penalty: subtracted for each time that a token was generated.
        logit_bias: numbers to add to the logits of token ids.
        seed: the same seed gives the same tokens. Default: a random one.
        stop: the text ends before any of these.
        stop_token_ids: the text ends at these tokens too. As vLLM has it.
        ignore_eos: do not end at the model's own stop tokens. As vLLM has it.
        priority: a smaller one is served first. As vLLM has it.
    """

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
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

    def chosen_temperature(self, served: Served) -> float:
        """Return the temperature: the request's, else the bundle's, else OpenAI's default."""
        if self.temperature is not None:
            return self.temperature
        found: float = served.bundle.defaults.options().get("temperature", _OPENAI_TEMPERATURE)
        return found

    def options(self, served: Served) -> dict[str, Any]:
        """Return the options of the engine for these fields. None stands for what is not given."""
        bias = self.logit_bias
        return {
            "temperature": self.chosen_temperature(served),
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": bias or None,
            # Clients count on different answers to equal requests, unless they give a seed.
            "seed": secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            "stop": self.stop,
            "stop_token_ids": self._stop_token_ids(served),
        }

    def _stop_token_ids(self, served: Served) -> list[int] | None:
        if not self.ignore_eos and not self.stop_token_ids:
            return None
        decoder = served.bundle.decoder.decoder
        own = () if self.ignore_eos else decoder.eos_token_ids
        return [*own, *(self.stop_token_ids or ())]


def new_tokens(
    given: int | None,
    served: Served,
    settings: Settings,
    *,
    name: str,
    default: int | None = None,
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
            raise ApiError(
                400,
                f"{name}: expected at most {limit} new tokens, the limit of this server, found {given}",
                param=name,
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
