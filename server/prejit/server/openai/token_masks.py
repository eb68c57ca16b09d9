"""Token masks of answers: of their grammars, of calls of tools, and of allowed tokens and bad words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError
from prejit.server.gate.http_errors import as_api_error, field_error
from prejit.server.gate.request_clients import unless_gone
from prejit.server.grammar.grammar_sources import GrammarSource, SchemaPart, ToolForm, tools_source
from prejit.server.openai.chat_messages import Function, plain_tools
from prejit.server.openai.engine_calls import AskedTexts
from prejit.server.openai.prompts import off_loop
from prejit.server.openai.text_request_fields import AnyConstraint, TextConstraint
from prejit.server.openai.tool_calls import Tools
from prejit.server.served.served import Served

if TYPE_CHECKING:
    from prejit.runtime.generation.options import TokenMask
    from prejit.runtime.text.tokenizer import Tokenizer

_Mask = np.ndarray[Any, np.dtype[np.bool_]]
_BARE = ToolForm(begin="", end="", arguments_key="parameters")
"""The form of calls where a template shows no marks, as those of Llama 3."""
_NO_TOOLS = Tools()
_OF_CONFIG = "; a logit_bias of 0 lets one of suppress_tokens of generation_config.json come"


async def token_masks(
    asked: AskedTexts, constraint: AnyConstraint | None, tools: Tools = _NO_TOOLS
) -> Callable[[], TokenMask] | None:
    """Return what makes token masks for the answers of a request; None: they may be anything.

    Args:
        asked: the request, with its limits of tokens. Nothing is compiled any more when its client is gone.
        constraint: what an answer without calls must be.
        tools: the tools of the request. A call that is forced is forced whatever the constraint is. If one is
            strict and the template's form of calls is known, calls that the model may make are right, too.

    Raises:
        ApiError: the bundle has no tokenizer, a schema cannot be compiled, the grammar library is not
            installed, or an answer that is no JSON is wanted beside tools, which the model could not call.
        UsageError: as `_limited`; or the schema of a tool cannot be compiled, which the message names.
        ClientDisconnect: the client is gone.
    """
    constraint = tools.constraint() or constraint
    mask = None
    if tools.functions and not tools.forced:
        if isinstance(constraint, TextConstraint):
            raise field_error(
                constraint.field,
                "expected JSON or any text beside tools that the model may call, found "
                "another grammar",
                code="unsupported_parameter",
            )
        if constraint is not None or any(each.strict for each in tools.functions):
            part = None
            if constraint is not None:
                part = SchemaPart(constraint.field, constraint.schema, not constraint.strict)
            mask = await _mask_of_calls(asked, tools, part)
    elif constraint is not None:
        try:
            mask = await _compiled(asked, constraint.source)
        except UsageError as error:  # it has the name of an argument in Python
            refused = as_api_error(error)
            if tools.forced and (placed := tools.placed(refused.message)) != refused.message:
                refused.message, refused.param = placed, placed.partition(":")[0]
                raise refused from error
            refused.param = constraint.field
            found = re.sub("^(regex|choice|grammar): ", "", refused.message)
            refused.message = f"{constraint.field}: {found}"
            raise refused from error
    token_ids, words = asked.body.allowed_token_ids, asked.body.bad_words or ()
    suppressed = _suppressed(asked)
    if token_ids is None and not words and (mask is None or not any(suppressed)):
        return mask
    work = sum(map(len, words)) + len(token_ids or ())
    return await off_loop(work, lambda: _limited(asked, token_ids, words, suppressed, mask))


async def _mask_of_calls(
    asked: AskedTexts, tools: Tools, answer: SchemaPart | None
) -> Callable[[], TokenMask] | None:
    """Return what makes token masks for answers that may have calls, with right arguments.

    None: the bundle's chat template does not teach a form of calls that a grammar can follow, and an answer
    without calls may be any text, which is `answer` None.
    """
    form = ToolForm()
    if not _teaches(asked.served, form.begin.strip()):
        if answer is None:
            return None
        form = _BARE
    functions = [
        {"function": {"name": each.name, "parameters": each.parameters, "strict": each.strict}}
        for each in tools.functions
    ]

    def source() -> GrammarSource:
        return tools_source(
            functions,
            form,
            required=False,
            parallel=not tools.only_one,
            answer=answer,
            special_id=asked.served.bundle.tokenizer.special_id,
        )

    try:
        return await _compiled(asked, source)
    except UsageError as error:  # the schema of a strict function
        refused = as_api_error(error)
        refused.message = tools.placed(refused.message)
        refused.param = refused.message.partition(":")[0]
        raise refused from error


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
    asked: AskedTexts, source: Callable[[], GrammarSource]
) -> Callable[[], TokenMask]:
    """Return what makes masks of a grammar, which is compiled if it is not kept."""
    request, served = asked.request, asked.served
    made = await off_loop(len(await request.body()), source)
    stops = asked.options["stop_token_ids"]
    wanted = served.compiling.mask(served.bundle, made, stops, request.state.key.name)
    return (await unless_gone(request.receive, wanted)).again


def _suppressed(asked: AskedTexts) -> tuple[list[int], list[int]]:
    """Return the tokens that the generation config suppresses, always and at the beginning of an answer."""
    given, bundle = dict(asked.options["logit_bias"] or ()), asked.served.bundle
    known, defaults = range(bundle.decoder.decoder.vocab_size), bundle.defaults
    always = [each for each in defaults.suppress_tokens if each in known and each not in given]
    return always, [each for each in defaults.begin_suppress_tokens or () if each in known]


def _limited(
    asked: AskedTexts,
    token_ids: list[int] | None,
    words: Sequence[str],
    suppressed: tuple[list[int], list[int]],
    mask: Callable[[], TokenMask] | None,
) -> Callable[[], TokenMask]:
    """Return what makes token masks that also keep limits, as vLLM means them.

    Args:
        asked: the request.
        token_ids: the only tokens that may come, `allowed_token_ids`; None: all may.
        words: texts that may not come, `bad_words`.
        suppressed: as `_suppressed`. The engine forbids them, too, but an answer whose grammar they leave no
            token would end there as if it were complete.
        mask: makes token masks of other limits, such as a grammar; None: there are none.

    Raises:
        UsageError: a token is not in the vocabulary, a bad word has no tokens, or there is no tokenizer for
            them. The masks raise it, too: the limits leave no token, and the text is not at its end.
    """
    decoder, stops = asked.served.bundle.decoder.decoder, asked.options["stop_token_ids"]
    size = decoder.vocab_size
    stops = decoder.eos_token_ids if stops is None else stops
    ends = [token_id for token_id in stops if token_id < size]
    always = np.full(size, token_ids is None)
    if token_ids is not None:
        arguments.check_vocabulary("allowed_token_ids", token_ids, size)
        always[token_ids] = True
    always[suppressed[0]] = False
    longer: dict[int, list[tuple[list[int], int]]] = {}  # by the token before the last
    for word in words:
        spellings = _spellings(asked.served.bundle.tokenizer, word)
        if not spellings:
            raise UsageError(f"bad_words: expected texts that have tokens, found {word!r:.80}")
        for *before, last in spellings:
            if before:
                longer.setdefault(before[-1], []).append((before, last))
            else:
                always[last] = False

    names = "allowed_token_ids, bad_words"
    hint = "allow more tokens, those of a grammar and one that ends the answer included"
    if any(suppressed):
        names, hint = f"{names}, suppress_tokens", hint + _OF_CONFIG

    def make() -> TokenMask:
        inner = None if mask is None else mask()

        def allowed(token_ids: Sequence[int]) -> _Mask:
            found = always.copy()
            if not token_ids:
                found[suppressed[1]] = False
            for before, last in longer.get(token_ids[-1], ()) if token_ids else ():
                if [*token_ids[-len(before) :]] == before:
                    found[last] = False
            other = None if inner is None else inner(token_ids)
            if other is not None:
                found &= other
            is_end = other is not None and (other[ends].any() or not other.any())
            if not is_end and not found.any():
                raise UsageError(
                    f"{names}: expected them to leave a token that may come, found none after "
                    f"{len(token_ids)} tokens",
                    hint=hint,
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
