"""POST /v1/completions: the continuation of prompts, as OpenAI's older API has it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from prejit.runtime.generation.generate import Piece, Result, Stats
from prejit.runtime.server.errors import ApiError
from prejit.runtime.server.openai import calls, prompts
from prejit.runtime.server.openai.bodies import (
    ResponseFields,
    answered,
    encode,
    fingerprint,
    read,
    served_model,
)
from prejit.runtime.server.openai.calls import TextCall, text_call
from prejit.runtime.server.openai.constraints import mask_of
from prejit.runtime.server.openai.events import DONE, EventStream
from prejit.runtime.server.openai.fields import (
    Logprobs,
    Sampled,
    StreamOptions,
    Tokens,
    TokenUsage,
    check_stream_options,
    new_tokens,
)
from prejit.runtime.server.openai.logprobs import (
    CompletionLogprobLists,
    CompletionLogprobs,
    token_names,
)
from prejit.runtime.server.served import Models, Served
from prejit.runtime.server.settings import Settings

_DEFAULT_TOKENS = 16
"""How many tokens OpenAI's API generates for a request that does not ask."""
_MAX_PROMPTS = 256

PromptField = str | list[int | str | list[int]]
"""A text, a list of token ids, or a list of either."""


class CompletionRequest(Sampled, frozen=True, kw_only=True):
    """The body of POST /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of either.
        max_tokens: generate at most this many tokens for each prompt.
        n: how many continuations of each prompt.
        best_of: not supported beyond 1.
        echo: begin each text with its prompt.
        logprobs: return log-probabilities, and those of this many of the most likely tokens.
        stream_options: options of a stream.
        suffix: not supported.
    """

    prompt: PromptField
    max_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None
    stream_options: StreamOptions | None = None
    suffix: Literal[""] | None = None


class CompletionChoice(ResponseFields, frozen=True, kw_only=True):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(ResponseFields, frozen=True, kw_only=True):
    """The response of POST /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: TokenUsage | None


_DECODER = msgspec.json.Decoder(CompletionRequest)


async def complete(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /v1/completions."""
    body = await read(request, _DECODER)
    _check(body)
    served = served_model(models, body.model)
    prompts.need_text_model(served)
    options = body.options(served)
    options["max_new_tokens"] = new_tokens(
        body.max_tokens, served, settings, name="max_tokens", default=_DEFAULT_TOKENS
    )
    options["logprobs"] = body.logprobs
    constraint = body.constraint()
    given = as_prompts(body.prompt)
    if len(given) > _MAX_PROMPTS:
        raise ApiError(
            400,
            f"prompt: expected at most {_MAX_PROMPTS} prompts, found {len(given)}",
            param="prompt",
        )
    token_ids, echoes = await _read_prompts(body, served, given)
    mask = None
    if constraint is not None:
        mask = await mask_of(request, served, constraint, options["stop_token_ids"])
    wanted = [
        text_call(
            request,
            settings,
            served,
            body,
            prompt=each,
            options=options,
            choices=body.n or 1,
            mask=mask,
        )
        for each in token_ids
    ]
    answer = _Answer(body, served, echoes)
    if body.stream:
        return EventStream(answer.events(wanted))
    return answered(answer.completion(await calls.results(request, wanted)))


def as_prompts(field: PromptField) -> list[str | list[int]]:
    """Return the prompts of a field that holds one or several.

    Raises:
        ApiError: it is empty, or mixes token ids with prompts.
    """
    if isinstance(field, str):
        return [field]
    ids = [each for each in field if isinstance(each, int)]
    if not field or (ids and len(ids) < len(field)):
        found = "an empty list" if not field else "token ids beside prompts"
        raise ApiError(
            400,
            f"prompt: expected a text, token ids, or a list of either, found {found}",
            param="prompt",
        )
    return [ids] if ids else [each for each in field if not isinstance(each, int)]


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(
            400,
            f"best_of: expected the value of n ({body.n or 1}) or none, found {body.best_of}: this server "
            "returns all continuations that it generates",
            param="best_of",
            code="unsupported_parameter",
        )
    if body.echo and body.logprobs is not None:
        raise ApiError(
            400,
            "logprobs: expected none beside echo: this server has log-probabilities of new tokens only",
            param="logprobs",
            code="unsupported_parameter",
        )
    check_stream_options(body.stream, body.stream_options)


async def _read_prompts(
    body: CompletionRequest, served: Served, given: list[str | list[int]]
) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of the prompts, and the texts that come before their continuations."""

    def token_ids(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return prompts.encoded(served, prompt)
        prompts.check_length(served, prompt)
        return prompt

    def echo(prompt: str | list[int]) -> str:
        if not body.echo:
            return ""
        return prompt if isinstance(prompt, str) else served.bundle.tokenizer.decode(prompt)

    return await prompts.off_loop(
        sum(map(len, given)), lambda: ([*map(token_ids, given)], [*map(echo, given)])
    )


class _Answer:
    """The response to a request, whole or in events."""

    def __init__(self, body: CompletionRequest, served: Served, echoes: list[str]) -> None:
        self._body = body
        self._served = served
        self._echoes = echoes
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices = body.n or 1
        self._names = token_names(served, wanted=body.logprobs is not None)

    def completion(self, found: list[list[Result]]) -> Completion:
        """Return the whole response."""
        choices = [
            CompletionChoice(
                index=prompt * self._choices + place,
                text=self._echoes[prompt] + result.text,
                logprobs=self._lists().take([*result.logprobs])
                if result.logprobs is not None
                else None,
                finish_reason=calls.openai_reason(result.finish_reason),
            )
            for prompt, results in enumerate(found)
            for place, result in enumerate(results)
        ]
        stats = [[result.stats for result in results] for results in found]
        return self._response(choices, calls.usage(stats))

    async def events(self, wanted: list[TextCall]) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        # Everything around the text of a chunk is the same for all of them, so it is encoded once.
        marker = encode(self._response([], None))
        head, _, rest = marker.partition(b'"choices":[]')
        head = b"data: " + head + b'"choices":['
        tail = (b"]" + rest if with_usage else b"]}") + b"\n\n"
        count = len(wanted) * self._choices
        lists = [self._lists() for _ in range(count)]
        begun = [False] * count
        stats: dict[int, Stats] = {}
        async with aclosing(calls.pieces(wanted)) as pieces:
            async for index, piece in pieces:
                text = piece.text
                if not begun[index]:
                    begun[index] = True
                    text = self._echoes[index // self._choices] + text
                if piece.stats is not None:
                    stats[index] = piece.stats
                if text or piece.finish_reason is not None or piece.logprob is not None:
                    yield b"".join((head, _chunk(index, text, piece, lists[index]), tail))
        last = b""
        if with_usage:
            by_prompt = [
                [stats[i] for i in range(p, p + self._choices)]
                for p in range(0, count, self._choices)
            ]
            last = b"data: " + encode(self._response([], calls.usage(by_prompt))) + b"\n\n"
        yield last + DONE

    def _response(self, choices: list[CompletionChoice], usage: TokenUsage | None) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._served.name,
            system_fingerprint=fingerprint(self._served),
            choices=choices,
            usage=usage,
        )

    def _lists(self) -> CompletionLogprobLists:
        return CompletionLogprobLists(self._names, self._body.logprobs or 0)


def _chunk(index: int, text: str, piece: Piece, lists: CompletionLogprobLists) -> bytes:
    """Return a choice of a chunk as JSON."""
    logprobs, reason = b"null", b"null"
    if piece.logprob is not None:
        logprobs = encode(lists.take([piece.logprob]))
    if piece.finish_reason is not None:
        reason = encode(calls.openai_reason(piece.finish_reason))
    return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
        index,
        encode(text),
        logprobs,
        reason,
    )
