"""Requests to an engine on behalf of an HTTP request, and the event streams that answer it.

Both end when the client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prejit.runtime.errors import NumbersError, PrejitError
from prejit.runtime.generation.finished_text import Result, Stats
from prejit.runtime.generation.generate import Piece
from prejit.runtime.generation.image_prompts import read_images
from prejit.runtime.generation.sampling_arguments import Logprob
from prejit.server.engine.fair_queue import Place
from prejit.server.gate.http_errors import as_api_error, error_json, field_error
from prejit.server.gate.request_clients import check_tokens, disconnected, priority, unless_gone
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.bodies import ResponseFields, asked_model, encode
from prejit.server.openai.prompts import kept, need_text_model, reading
from prejit.server.openai.text_request_fields import (
    PromptTokensDetails,
    Sampled,
    TokenUsage,
    new_tokens,
)
from prejit.server.served.served import Models, Served

if TYPE_CHECKING:
    from prejit.runtime.generation.options import TokenMask
    from prejit.server.engine.engine import Engine
    from prejit.server.engine.stream import Stream
    from prejit.server.gate.api_keys import ApiKey

_T = TypeVar("_T")

Pieces = AsyncGenerator[tuple[int, Piece], None]
"""Pieces of several texts, each with the number of its text."""

Reason = Literal["stop", "length"]
"""Why a text ended, as OpenAI's API has it."""
_REASONS: dict[str, Reason] = {
    "stop": "stop",
    "length": "length",
    "context": "length",
    "mask": "stop",
}
"""OpenAI's finish_reason by the engine's. A mask that allows no more tokens is a grammar that is complete."""


_PLACE_CHARACTERS = 5
"""A token in a list of log-probabilities takes as long as so many characters of a prompt."""
COMMENT_SECONDS = 15.0
"""How long a request may wait in the queue without a byte on its connection."""
_COMMENT = b": waiting\n\n"

_DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's older streams."""


@dataclass(frozen=True, slots=True)
class AskedTexts:
    """A request for text, after its body was read and its model found.

    Attributes:
        request: has the key, and says when its client is gone.
        settings: the limits of the server.
        served: the model.
        body: the fields.
        options: those of the engine, `seed` included.
    """

    request: Request
    settings: Settings
    served: Served
    body: Sampled
    options: dict[str, Any]


def asked(
    models: Models,
    settings: Settings,
    request: Request,
    body: Sampled,
    *,
    most: str,
    default: int | None = None,
    logprobs: int | None,
) -> AskedTexts:
    """Return what a request asks for.

    Args:
        models: the served bundles.
        settings: the limits of the server.
        request: the request.
        body: its fields.
        most: the field with the largest number of new tokens; the value 0 is the endpoint's own.
        default: the number of new tokens for a request that does not ask.
        logprobs: how many alternatives of each token have log-probabilities; None: no token has.

    Raises:
        ModelNotFoundError, ApiError: there is no such model, it does not continue texts, or the request asks
            for more tokens than the server's limit.
        UsageError: the adapter was unloaded in this moment.
    """
    served = asked_model(models, body.model)
    need_text_model(served)
    given: int | None = getattr(body, most) or None
    options = body.options(served) | {
        "max_new_tokens": new_tokens(given, served, settings, name=most, default=default),
        "logprobs": logprobs,
    }
    if served.adapter:
        # One for all calls: it may be unloaded, and its name given to another, between them.
        options["adapter"] = served.bundle.adapters.keep(served.adapter)
    return AskedTexts(request, settings, served, body, options)


@dataclass(frozen=True, slots=True)
class TextCall:
    """One prompt for the engine, and how many continuations of it are wanted.

    Attributes:
        engine: the engine of the model.
        prompt: token ids.
        options: options of the engine, `seed` included. Each further continuation takes the next seed.
        choices: how many continuations.
        mask: returns a new token mask, one for each continuation; None: no tokens are masked.
        place: how the engine serves it beside others.
    """

    engine: Engine
    prompt: Sequence[int]
    options: dict[str, Any]
    choices: int
    mask: Callable[[], TokenMask] | None
    place: Place

    def begin(self, submit: Callable[..., _T]) -> Iterator[_T]:
        """Submit the continuations, one after the other, by `Engine.submit` or `Engine.stream`."""
        for choice in range(self.choices):
            seed = (self.options["seed"] + choice) % 2**64
            mask = None if self.mask is None else self.mask()
            options = self.options | {"seed": seed, "token_mask": mask}
            yield submit(self.prompt, **options, **self.place)


def text_call(
    asked: AskedTexts,
    prompt: Sequence[int],
    mask: Callable[[], TokenMask] | None,
    *,
    choices: int = 1,
) -> TextCall:
    """Return what a request for text asks of the engine, within the limits that it has for its tokens.

    Args:
        asked: the request.
        prompt: token ids. The request may keep only their end.
        mask: as of `TextCall`.
        choices: as of `TextCall`.

    Raises:
        ApiError: the key may not have its priority, or has no tokens left.
        ApiError, ContextError: the limits cannot be kept, or the prompt is certainly too long.
    """
    body = asked.body
    key: ApiKey = asked.request.state.key
    check_tokens(key)
    most = asked.options["max_new_tokens"]
    if most is not None and (body.min_tokens or 0) > most:
        raise field_error(
            "min_tokens", f"expected at most {most}, the most new tokens, found {body.min_tokens}"
        )
    place = Place(
        priority=priority(key, body.priority),
        client=key.name,
        limits=key.limits,
        timeout=asked.settings.timeout_seconds,
        cache_salt=body.cache_salt or "",
    )
    prompt = kept(asked.served, prompt, body.truncate_prompt_tokens)
    return TextCall(asked.served.engine, prompt, asked.options, choices, mask, place)


async def with_images(
    request: Request, asked: AskedTexts, wanted: TextCall, files: Sequence[bytes], field: str
) -> TextCall:
    """Return a call with what the model reads of the images of its prompt. Errors as `prompts.reading`."""
    if not files:
        return wanted
    read = partial(read_images, asked.served.bundle.decoder)
    images = await reading(request, asked.served, files, field, read)
    return replace(wanted, options={**wanted.options, "images": images})


@asynccontextmanager
async def pieces(calls: Sequence[TextCall]) -> AsyncGenerator[Pieces, None]:
    """Submit all continuations, and give their pieces as they come, each with its number: first call first.

    The continuations end with the context, all of them if one is refused. The iterator raises what happens
    after they were submitted.

    Raises:
        ApiError: they are more than may wait.
        UsageError, ContextError, QueueFullError, ClosedError, DeadlineError: as `Engine.stream`.
        NumbersError: the model returned no numbers.
    """
    _check_count(calls)
    streams: list[Stream] = []
    try:
        for call in calls:
            for stream in call.begin(call.engine.stream):
                streams.append(stream)
        async with aclosing(_numbered(streams)) as numbered:
            yield numbered
    finally:
        for stream in streams:
            await stream.aclose()


async def _numbered(streams: Sequence[Stream]) -> Pieces:
    if len(streams) == 1:
        async for piece in streams[0]:
            _check_numbers(piece.finish_reason)
            yield 0, piece
        return
    async with aclosing(_merged(streams)) as merged:
        async for place, piece in merged:
            _check_numbers(piece.finish_reason)
            yield place, piece


def _check_count(calls: Sequence[TextCall]) -> None:
    """Check that a request has no more continuations than may wait: it could be tried again for ever.

    Raises:
        ApiError: it has.
    """
    count = sum(call.choices for call in calls)
    sizes = [(call.engine.queue_size, "the length of the queue") for call in calls]
    for limits in (call.place["limits"] for call in calls):
        if limits.waiting is not None:
            sizes.append((limits.waiting, "how many requests of this key may wait"))
    most, limit = min(sizes, default=(0, ""))
    if count > most:
        raise field_error(
            "n",
            f"expected at most {most} continuations of all prompts together, which is {limit}, found "
            f"{count}; send several requests",
        )


async def results(request: Request, calls: Sequence[TextCall]) -> list[list[Result]]:
    """Return the continuations of each call.

    Raises:
        ApiError: they are more than may wait.
        ClientDisconnect: the client is gone. The calls are cancelled, as they are if one is refused.
        UsageError, ContextError, QueueFullError, ClosedError, DeadlineError: as `Engine.generate`.
        NumbersError: the model returned no numbers.
    """
    _check_count(calls)
    submitted: list[Future[Result]] = []
    try:
        for call in calls:
            for answer in call.begin(call.engine.submit):
                submitted.append(answer)  # so that all before one that is refused are cancelled
        finished = await unless_gone(
            request.receive, asyncio.gather(*map(asyncio.wrap_future, submitted))
        )
    finally:
        for each in submitted:
            each.cancel()  # has no effect on those that are finished
    for result in finished:
        _check_numbers(result.finish_reason)
    following = iter(finished)
    return [[next(following) for _ in range(call.choices)] for call in calls]


def listed(found: Sequence[Sequence[Result]], scores: Sequence[Sequence[Logprob]]) -> int:
    """Return how many characters take as long as the log-probabilities of an answer, for `prompts.off_loop`.

    Args:
        found: the continuations of each prompt.
        scores: the log-probabilities of the tokens of each prompt.
    """
    lists = [*scores, *(result.logprobs or () for results in found for result in results)]
    return sum(_PLACE_CHARACTERS * (1 + len(each[0].top)) * len(each) for each in lists if each)


def _check_numbers(reason: str | None) -> None:
    """Check that a generation did not end because its logits were not numbers.

    Raises:
        NumbersError: it did.
    """
    if reason == "nan":
        raise NumbersError("the model returned logits that are not numbers")


def openai_reason(reason: str) -> Reason:
    """Return OpenAI's name of a finish reason."""
    return _REASONS[reason]


def usage(prompts: Sequence[Sequence[Stats]], *, were_cached: bool = True) -> TokenUsage:
    """Return the usage of a request.

    Args:
        prompts: for each prompt, the statistics of its continuations. A prompt counts once.
        were_cached: whether tokens that were reused were there before the request.
    """
    prompt = sum(stats[0].prompt_tokens for stats in prompts)
    new = sum(each.new_tokens for stats in prompts for each in stats)
    cached = sum(stats[0].reused_tokens for stats in prompts) if were_cached else 0
    return token_usage(prompt, new, cached)


def token_usage(prompt: int, new: int = 0, cached: int = 0) -> TokenUsage:
    """Return the usage of a request with so many tokens."""
    return TokenUsage(
        prompt_tokens=prompt,
        completion_tokens=new,
        total_tokens=prompt + new,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


async def _merged(streams: Sequence[Stream]) -> Pieces:
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def pump(place: int, stream: Stream) -> None:
        try:
            async for piece in stream:
                queue.put_nowait((place, piece))
        except Exception as error:  # whatever it is, the reader raises it
            queue.put_nowait((place, error))
        else:
            queue.put_nowait((place, None))

    tasks = [asyncio.ensure_future(pump(place, stream)) for place, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            place, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                running -= 1
            else:
                yield place, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def around_choices(empty: ResponseFields) -> tuple[bytes, bytes]:
    """Return what stands in an event before and behind its choices: the same in all, so it is encoded once.

    Args:
        empty: an event without choices.
    """
    head, _, tail = encode(empty).partition(b'"choices":[]')
    return b"data: " + head + b'"choices":[', b"]" + tail + b"\n\n"


def ending(usage: ResponseFields | None) -> bytes:
    """Return the last events: one with the usage, if there is one, and the mark."""
    return (b"" if usage is None else b"data: " + encode(usage) + b"\n\n") + _DONE


def error_event(error: Exception) -> bytes:
    """Return the event of an error, as OpenAI's client raises it."""
    return b"data: " + encode(error_json(as_api_error(error))) + b"\n\n"


@final
class EventStream(Response):
    """A response of events. It begins with the first of them, so that an error before it has its own status.

    The first one may be empty: the head of a response goes out while its request waits in the queue. Until
    the next one comes, comments keep proxies from cutting the connection.

    When the client is gone, the events are closed, which frees the slot of the request. Starlette's
    StreamingResponse cannot do the first, and takes a task group and a closure for the second.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[Exception], bytes] = error_event,
    ) -> None:
        """Make a response.

        Args:
            events: each as the bytes of one or more events.
            on_error: returns the events for an error after the first event.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # of a body that is not here yet
        self._events = events
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client is gone."""
        writer = asyncio.ensure_future(self._write(send, scope))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((writer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not writer.done():
                writer.cancel()
                await asyncio.wait((writer,))  # the slot is free when this returns
        if not writer.cancelled():
            writer.result()

    async def _write(self, send: Send, scope: Scope) -> None:
        def write(events: bytes, *, more: bool = True) -> Awaitable[None]:
            return send({"type": "http.response.body", "body": events, "more_body": more})

        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await write(first)
                waited = asyncio.ensure_future(anext(events, b""))
                try:
                    while not (await asyncio.wait((waited,), timeout=COMMENT_SECONDS))[0]:
                        await write(_COMMENT)
                finally:
                    waited.cancel()
                    await asyncio.wait((waited,))  # nothing else may use `events` before
                await write(waited.result())
                async for event in events:
                    await write(event)
            except PrejitError as error:
                if as_api_error(error).status == 500:  # which the gate does not see
                    scope["state"]["suspected"].set()
                await write(self._on_error(error))
            await write(b"", more=False)
