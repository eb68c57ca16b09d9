"""Constraints on answers: JSON, texts of grammars, calls of tools, allowed tokens; and their token masks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError
from prejit.server.gate.http_errors import ApiError, as_api_error
from prejit.server.gate.request_clients import unless_gone
from prejit.server.grammar.grammar_sources import (
    GrammarSource,
    SchemaPart,
    schema_source,
)
from prejit.server.grammar.tools import ToolForm, tools_source
from prejit.server.openai import prompts
from prejit.server.openai.chat_messages import Function, plain_tools
from prejit.server.served.served import Served

if TYPE_CHECKING:
    from prejit.runtime.generation.options import TokenMask
    from prejit.runtime.text.tokenizer import Tokenizer


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


async def mask_of(
    request: Request,
    served: Served,
    constraint: AnyConstraint,
    stop_token_ids: Sequence[int] | None,
) -> Callable[[], TokenMask]:
    """Return a function that returns a new token mask for a constraint.

    Args:
        request: nothing is compiled any more when its client is gone.
        served: the model.
        constraint: what an answer must be.
        stop_token_ids: of the request; None: those of the model.

    Raises:
        ApiError: the bundle has no tokenizer, the schema cannot be compiled, or the grammar library is not
            installed.
        ClientDisconnect: the client is gone.
    """
    try:
        return await _compiled(request, served, constraint.source, stop_token_ids)
    except UsageError as error:  # it has the name of an argument in Python
        refused = as_api_error(error)
        refused.param = constraint.field
        found = re.sub("^(regex|choice|grammar): ", "", refused.message)
        refused.message = f"{constraint.field}: {found}"
        raise refused from error


async def mask_of_calls(
    request: Request,
    served: Served,
    functions: Sequence[Function],
    *,
    only_one: bool,
    answer: Constraint | None = None,
    stop_token_ids: Sequence[int] | None,
) -> Callable[[], TokenMask] | None:
    """Return a function that returns a new token mask for answers that may have calls, with right arguments.

    None: the bundle's chat template does not teach a form of calls that a grammar can follow, and an answer
    without calls may be any text.

    Args:
        request: as of `mask_of`.
        served: the model.
        functions: the tools. Only the arguments of those that are strict follow every keyword.
        only_one: whether one call is the most.
        answer: what an answer without calls must be; None: any text.
        stop_token_ids: of the request; None: those of the model.

    Raises:
        UsageError, ClientDisconnect: as `mask_of`; the message names the tool.
    """
    form = ToolForm()
    if not _teaches(served, form.begin.strip()):
        if answer is None:
            return None
        form = _BARE
    tools = [
        {"function": {"name": each.name, "parameters": each.parameters, "strict": each.strict}}
        for each in functions
    ]

    def source() -> GrammarSource:
        part = None
        if answer is not None:
            part = SchemaPart(answer.field, answer.schema, not answer.strict)
        return tools_source(
            tools,
            form,
            required=False,
            parallel=not only_one,
            answer=part,
            special_id=served.bundle.tokenizer.special_id,
        )

    return await _compiled(request, served, source, stop_token_ids)


_BARE = ToolForm(begin="", end="", arguments_key="parameters")
"""The form of calls where a template shows no marks, as those of Llama 3."""


def _teaches(served: Served, mark: str) -> bool:
    """Return whether the chat template shows a mark of calls, which is then in the text of an answer."""
    bundle = served.bundle
    if bundle.tokenizer.special_id(mark) is not None:  # the text of an answer has no special tokens
        return False
    probe = plain_tools([Function(name="probe")])
    try:
        return mark in bundle.render_chat_template([{"role": "user", "content": ""}], tools=probe)
    except UsageError:
        return False


async def _compiled(
    request: Request,
    served: Served,
    source: Callable[[], GrammarSource],
    stop_token_ids: Sequence[int] | None,
) -> Callable[[], TokenMask]:
    """Return what makes masks of a grammar, which is compiled if it is not kept."""
    made = await prompts.off_loop(len(await request.body()), source)
    wanted = served.compiling.mask(served.bundle, made, stop_token_ids, request.state.key.name)
    return (await unless_gone(request.receive, wanted)).again


def forced_calls(tools: Sequence[Tool], *, only_one: bool) -> Constraint:
    """Return the constraint for `tool_choice` `required`: a list of at least one call.

    Raises:
        ApiError: two tools define different schemas of the same name.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.parameters)
        for keyword in ("$defs", "definitions"):
            for name, schema in parameters.pop(keyword, {}).items():
                # References are from the root of the whole schema.
                if definitions.setdefault(keyword, {}).setdefault(name, schema) != schema:
                    raise ApiError(
                        400,
                        f"tools: expected one definition of {name!r}, found two different ones",
                        param="tools",
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = {"maxItems": 1} if only_one else {}
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {"type": "array", "items": items, "minItems": 1, **most, **definitions}
    return Constraint(schema, "tool_choice", strict=all(tool.strict for tool in tools))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a request.

    Attributes:
        name: how the model calls it.
        parameters: the JSON Schema of its arguments.
        strict: whether keywords that a grammar cannot enforce are an error.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool = False


_Mask = np.ndarray[Any, np.dtype[np.bool_]]


async def limited(
    served: Served,
    token_ids: list[int] | None,
    words: Sequence[str],
    mask: Callable[[], TokenMask] | None,
    stop_token_ids: Collection[int] | None,
) -> Callable[[], TokenMask] | None:
    """Return what makes token masks that also keep limits, as vLLM means them; None: all tokens are allowed.

    Args:
        served: the model.
        token_ids: the only tokens that may come, `allowed_token_ids`; None: all may.
        words: texts that may not come, `bad_words`.
        mask: makes token masks of other limits, such as a grammar; None: there are none.
        stop_token_ids: of the request; None: those of the model.

    Raises:
        UsageError: a token is not in the vocabulary, a bad word has no tokens, or there is no tokenizer for
            them. The masks raise it, too: the limits leave no token, and the text is not at its end.
    """
    if token_ids is None and not words:
        return mask
    work = sum(map(len, words)) + len(token_ids or ())
    return await prompts.off_loop(
        work, lambda: _limited(served, token_ids, words, mask, stop_token_ids)
    )


def _limited(
    served: Served,
    token_ids: list[int] | None,
    words: Sequence[str],
    mask: Callable[[], TokenMask] | None,
    stop_token_ids: Collection[int] | None,
) -> Callable[[], TokenMask]:
    decoder = served.bundle.decoder.decoder
    size = decoder.vocab_size
    stops = decoder.eos_token_ids if stop_token_ids is None else stop_token_ids
    ends = [token_id for token_id in stops if token_id < size]
    always = np.full(size, token_ids is None)
    if token_ids is not None:
        arguments.check_vocabulary("allowed_token_ids", token_ids, size)
        always[token_ids] = True
    longer: dict[int, list[tuple[list[int], int]]] = {}  # by the token before the last
    for word in words:
        spellings = _spellings(served.bundle.tokenizer, word)
        if not spellings:
            raise UsageError(f"bad_words: expected texts that have tokens, found {word!r:.80}")
        for *before, last in spellings:
            if before:
                longer.setdefault(before[-1], []).append((before, last))
            else:
                always[last] = False

    def make() -> TokenMask:
        inner = None if mask is None else mask()

        def allowed(token_ids: Sequence[int]) -> _Mask:
            found = always.copy()
            for before, last in longer.get(token_ids[-1], ()) if token_ids else ():
                if [*token_ids[-len(before) :]] == before:
                    found[last] = False
            other = None if inner is None else inner(token_ids)
            if other is not None:
                found &= other
            is_end = other is not None and (other[ends].any() or not other.any())
            if not is_end and not found.any():
                raise UsageError(
                    f"allowed_token_ids, bad_words: expected them to leave a token that may come, found none "
                    f"after {len(token_ids)} tokens",
                    hint="allow more tokens, those of a grammar and one that ends the answer included",
                )
            return found

        return allowed

    return make


def _spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Return the token ids of a word at the beginning of a text, and after a space if those are others.

    As vLLM has it: SamplingParams.update_from_tokenizer in vllm/sampling_params.py.
    """
    bare, spaced = (
        tokenizer.encode(before + word.lstrip(), add_special_tokens=False) for before in ("", " ")
    )
    is_other = spaced and bare and spaced[0] != bare[0] and len(spaced) == len(bare)
    return [found for found in (bare, spaced if is_other else []) if found]
