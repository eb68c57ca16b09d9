"""Server-sent events: the response of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prejit.runtime.errors import PrejitError
from prejit.runtime.server.disconnect import disconnected
from prejit.runtime.server.errors import as_api_error, error_json
from prejit.runtime.server.openai.bodies import encode

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's older streams."""

Events = AsyncGenerator[bytes, None]


def error_event(error: Exception) -> bytes:
    """Return the event of an error, as OpenAI's client raises it."""
    return b"data: " + encode(error_json(as_api_error(error))) + b"\n\n"


@final
class EventStream(Response):
    """A response of events. It begins with the first of them, so that an error before it has its own status.

    When the client is gone, the events are closed, which frees the slot of the request. Starlette's
    StreamingResponse cannot do the first, and takes a task group and a closure for the second.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: Events, on_error: Callable[[Exception], bytes] = error_event
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
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except PrejitError as error:
                if as_api_error(error).status == 500:  # which the gate does not see
                    scope["state"]["suspected"].set()
                last = self._on_error(error)
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
