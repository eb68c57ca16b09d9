"""Server-sent events: the response of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prejit.runtime.errors import PrejitError
from prejit.server.gate.http_errors import as_api_error, error_json
from prejit.server.gate.request_clients import disconnected
from prejit.server.openai.bodies import ResponseFields, encode

COMMENT_SECONDS = 15.0
"""How long a request may wait in the queue without a byte on its connection."""
_COMMENT = b": waiting\n\n"

_DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's older streams."""


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
