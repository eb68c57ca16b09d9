"""HTTP connections: uvicorn's own, with limits for clients that send a head too slowly or too long."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from prejit.runtime.server.gate import ABORT

HEAD_SECONDS = 75
"""A connection without the whole head of a request for so long is closed; idle ones too."""

MAX_HEAD_BYTES = 1 << 16
"""Maximum size of the head of a request: its URL and headers."""


class Connection(HttpToolsProtocol):
    """One connection of a client. uvicorn makes it and its signatures."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _reads_head = True
    _is_progress = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client; refuse a head without end."""
        self._is_progress = False
        super().data_received(data)
        if self._reads_head and not self._is_progress:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        """Begin to answer a request, whose scope gets the way to cut this connection."""
        self._stop_timer()
        self._reads_head = False
        extensions: Any = {ABORT: self.transport.abort}
        self.scope["extensions"] = extensions
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that what comes next is another head."""
        super().on_message_complete()
        self._reads_head, self._head_bytes, self._is_progress = True, 0, True

    def on_response_complete(self) -> None:
        """Wait for the next request of the connection."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._expect_head()

    def _expect_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._close_idle)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
