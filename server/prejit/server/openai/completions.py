"""POST /v1/completions: the continuation of prompts, as OpenAI's older API has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from prejit.runtime.generation.finished_text import Result, Stats
from prejit.runtime.generation.generate import Piece
from prejit.runtime.generation.sampling_arguments import Logprob
from prejit.server.gate.http_errors import field_error, json_response
from prejit.server.gate.server_settings import Settings
from prejit.server.openai import engine_calls, prompts
from prejit.server.openai.bodies import ResponseFields, check_only, encode, identity, read
from prejit.server.openai.engine_calls import (
    EventStream,
    TextCall,
    around_choices,
    ending,
    text_call,
)
from prejit.server.openai.logprobs import (
    CompletionLogprobLists,
    CompletionLogprobs,
    PromptLogprobs,
    as_vllm,
    scores_of_prompts,
    token_names,
)
from prejit.server.openai.text_request_fields import Logprobs, Sampled, TokenUsage, check_fields
from prejit.server.openai.token_masks import token_masks
from prejit.server.served.served import Models, Served

_DEFAULT_TOKENS = 16
"""How many tokens OpenAI's API generates for a request that does not ask."""
_MAX_PROMPTS = 256


class CompletionRequest(Sampled, frozen=True, kw_only=True):
    """The body of POST /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of either.
        max_tokens: generate at most this many tokens for each prompt; 0 for the prompt alone.
        n: how many continuations of each prompt.
        best_of: not supported beyond 1.
        echo: begin each text with its prompt, and `logprobs` with its tokens.
        logprobs: return log-probabilities, and those of this many of the most likely tokens.
        suffix: not supported but as an empty text.
        add_special_tokens: whether the tokenizer adds its own to a prompt. Default: true. As vLLM has it.
    """

    prompt: prompts.Inputs
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class CompletionChoice(ResponseFields, frozen=True, kw_only=True):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(ResponseFields, frozen=True, kw_only=True):
    """The response of POST /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: TokenUsage | msgspec.UnsetType | None


_DECODER = msgspec.json.Decoder(CompletionRequest)


async def complete(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /v1/completions."""
    body = await read(request, _DECODER, settings)
    _check(body)
    asked = engine_calls.asked(
        models,
        settings,
        request,
        body,
        most="max_tokens",
        default=_DEFAULT_TOKENS,
        logprobs=body.logprobs,
    )
    constraint = body.constraint()
    given = prompts.as_inputs("prompt", body.prompt)
    if len(given) > _MAX_PROMPTS:
        raise field_error("prompt", f"expected at most {_MAX_PROMPTS} prompts, found {len(given)}")
    served = asked.served
    token_ids = await _read_prompts(body, served, given)
    mask = await token_masks(asked, constraint)
    wanted = [text_call(asked, each, mask, choices=body.n or 1) for each in token_ids]
    echoes = await _echoes(body, served, given, wanted)
    scores = await scores_of_prompts(asked, wanted, _scored(body))
    answer = _Answer(body, served, wanted, echoes, scores)
    if body.stream:
        return EventStream(answer.events())
    found = None if body.max_tokens == 0 else await engine_calls.results(request, wanted)
    listed = engine_calls.listed(found or (), scores)
    return await prompts.off_loop(listed, lambda: json_response(answer.completion(found)))


def _check(body: CompletionRequest) -> None:
    check_only(body, {"suffix": ""})
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise field_error(
            "best_of",
            f"expected the value of n ({body.n or 1}) or none, found {body.best_of}: this server "
            "returns all continuations that it generates",
            code="unsupported_parameter",
        )
    if body.max_tokens == 0 and (
        body.stream or not (body.echo or body.prompt_logprobs is not None)
    ):
        raise field_error(
            "max_tokens",
            "expected 1 or more, or 0 beside echo or prompt_logprobs and without stream, found 0",
        )
    check_fields(body)


def _scored(body: CompletionRequest) -> int | None:
    """Return how many of the most likely tokens are wanted at each place of the prompt; None: nothing is."""
    echoed = body.logprobs if body.echo else None
    return max((top for top in (echoed, body.prompt_logprobs) if top is not None), default=None)


async def _read_prompts(
    body: CompletionRequest, served: Served, given: Sequence[str | list[int]]
) -> list[list[int]]:
    """Return the token ids of the prompts."""

    def read_prompt(prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        special = body.add_special_tokens is not False
        return prompts.encoded(served, prompt, add_special_tokens=special)

    return await prompts.off_loop(sum(map(len, given)), lambda: [*map(read_prompt, given)])


async def _echoes(
    body: CompletionRequest,
    served: Served,
    given: Sequence[str | list[int]],
    wanted: Sequence[TextCall],
) -> list[str]:
    """Return the texts that come before the continuations: of as much of each prompt as its call keeps."""
    if not body.echo:
        return [""] * len(wanted)

    def text(prompt: str | list[int], call: TextCall) -> str:
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        return served.bundle.tokenizer.decode(call.prompt)

    characters = sum(len(call.prompt) for call in wanted)
    return await prompts.off_loop(characters, lambda: [*map(text, given, wanted)])


class _Answer:
    """The response to a request, whole or in events."""

    def __init__(
        self,
        body: CompletionRequest,
        served: Served,
        wanted: list[TextCall],
        echoes: list[str],
        scores: list[list[Logprob]],
    ) -> None:
        self._body = body
        self._wanted = wanted
        self._echoes = echoes
        self._scores = scores
        self._identity = identity(served, "cmpl")
        self._choices = body.n or 1
        self._is_scored = _scored(body) is not None
        named = body.logprobs is not None or self._is_scored
        self._names = token_names(served, wanted=named)

    def completion(self, found: list[list[Result]] | None) -> Completion:
        """Return the whole response. None: nothing was generated, because no tokens are wanted."""
        choices = [
            self._choice(prompt, place, None if found is None else found[prompt][place])
            for prompt in range(len(self._wanted))
            for place in range(self._choices)
        ]
        if found is None:
            usage = engine_calls.token_usage(sum(len(each.prompt) for each in self._wanted))
        else:
            usage = self._usage([[result.stats for result in results] for results in found])
        return Completion(**self._identity, choices=choices, usage=usage)

    def _choice(self, prompt: int, place: int, result: Result | None) -> CompletionChoice:
        body, token_ids, scores = self._body, self._wanted[prompt].prompt, self._scores[prompt]
        lists: CompletionLogprobs | None = None
        likely: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
        if body.logprobs is not None:
            new = () if result is None else result.logprobs or ()
            text = self._echoes[prompt] + ("" if result is None else result.text)
            lists = self._first(prompt, self._lists(), new, text)
        if body.prompt_logprobs is not None:
            likely = as_vllm(token_ids, scores, body.prompt_logprobs, self._names)
        return CompletionChoice(
            index=prompt * self._choices + place,
            text=self._echoes[prompt] + ("" if result is None else result.text),
            logprobs=lists,
            finish_reason="length"
            if result is None
            else engine_calls.openai_reason(result.finish_reason),
            prompt_logprobs=likely,
        )

    def _first(
        self, prompt: int, lists: CompletionLogprobLists, new: Sequence[Logprob], text: str
    ) -> CompletionLogprobs:
        """Return the lists of a text, or of its first part: they begin with the prompt if it is echoed."""
        if not self._body.echo:
            return lists.take(new, text=text)
        return lists.take([*self._scores[prompt], *new], self._wanted[prompt].prompt, text)

    def _usage(self, stats: list[list[Stats]]) -> TokenUsage:
        # Its own scoring put the prompt into the cache.
        return engine_calls.usage(stats, were_cached=not self._is_scored)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        with_usage = self._body.wants_usage
        usage = None if with_usage else msgspec.UNSET
        head, tail = around_choices(Completion(**self._identity, choices=[], usage=usage))
        count = len(self._wanted) * self._choices
        lists = [self._lists() for _ in range(count)]
        begun = [False] * count
        stats: dict[int, Stats] = {}
        async with engine_calls.pieces(self._wanted) as pieces:
            yield b""  # the head of the response need not wait in the queue
            async for index, piece in pieces:
                text = piece.text
                new = () if piece.logprob is None else (piece.logprob,)
                logprobs = None
                if not begun[index]:
                    begun[index] = True
                    prompt = index // self._choices
                    text = self._echoes[prompt] + text
                    if self._body.logprobs is not None:
                        logprobs = self._first(prompt, lists[index], new, text)
                elif new:
                    logprobs = lists[index].take(new)
                if piece.stats is not None:
                    stats[index] = piece.stats
                if text or piece.finish_reason is not None or new:
                    yield b"".join((head, _chunk(index, text, piece, logprobs), tail))
        last = None
        if with_usage:
            by_prompt = [
                [stats[i] for i in range(p, p + self._choices)]
                for p in range(0, count, self._choices)
            ]
            last = Completion(**self._identity, choices=[], usage=self._usage(by_prompt))
        yield ending(last)

    def _lists(self) -> CompletionLogprobLists:
        return CompletionLogprobLists(self._names, self._body.logprobs or 0)


def _chunk(index: int, text: str, piece: Piece, logprobs: CompletionLogprobs | None) -> bytes:
    """Return a choice of a chunk as JSON."""
    reason = b"null"
    if piece.finish_reason is not None:
        reason = encode(engine_calls.openai_reason(piece.finish_reason))
    return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
        index,
        encode(text),
        encode(logprobs),
        reason,
    )
