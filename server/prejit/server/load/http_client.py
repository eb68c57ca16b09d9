"""An HTTP/1.1 client: it opens as many connections as requests are under way, so an open loop never waits.

Times are those of `time.monotonic`, taken when the bytes arrive.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final
from urllib.parse import quote, unquote, urlsplit

import httptools

from prejit.runtime.errors import UsageError
from prejit.server.load.workload import LoadRequest


@dataclass(slots=True)
class Exchange:
    """A request, and what came back.

    Attributes:
        due: when it was to be sent.
        begun: when the client began to send it.
        status: of the response; 0: there was none.
        parts: the body in parts, each with the time when it came.
        ended: when the response was complete.
        failed: why it is not complete; empty: it is.
    """

    due: float
    begun: float = 0.0
    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    failed: str = ""

    @property
    def body(self) -> bytes:
        """The body of the response."""
        return b"".join(part for _, part in self.parts)


def without_credentials(url: str) -> str:
    """Return a URL without the user and the password that may stand before its host."""
    return re.sub("//[^/?#]*@", "//", url)


@final
class HttpClient:
    """Connections to one server. All calls are made in one event loop.

    Attributes:
        url: where the server is, without credentials.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        """Connect to nothing yet.

        Args:
            url: where the server is, `http://`, `https://` or `unix:PATH`; the path of a URL stands before
                those of requests, and a user with a password is sent in its Authorization header.
            headers: headers of each request.

        Raises:
            UsageError: it is no URL of a server.
        """
        self.url = without_credentials(url).rstrip("/")
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        try:
            parts = urlsplit(url if self._socket is None else "http://localhost")
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
            host = None if parts.query or parts.fragment else parts.hostname
        except ValueError:
            host = None
        if not host:
            shown = re.sub("//.*@", "//", url)  # a password may hold anything
            raise UsageError(
                f"expected a URL such as http://127.0.0.1:8000, found {shown!r:.80}"
            ) from None
        user, at, place = parts.netloc.rpartition("@")
        basic = f"Basic {b64encode(unquote(user).encode()).decode()}"
        self._host = host
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        lines = {"Host": place, **({"Authorization": basic} if at else {}), **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def exchange(self, request: LoadRequest, due: float, method: str = "POST") -> Exchange:
        """Send a request now and return what came back; a failure is part of it.

        A connection that the server closed while it was idle is replaced once.
        """
        found = Exchange(due, time.monotonic())
        lines = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        head = f"{method} {self._base}{quote(request.path)} HTTP/1.1\r\n{self._head}{lines}"
        content = f"{head}Content-Length: {len(request.body)}\r\n\r\n".encode("latin-1")
        content += request.body
        was_idle = bool(self._idle)
        try:
            connection = self._idle.pop() if was_idle else await self._connect()
            await connection.exchange(content, found)
            if was_idle and found.failed and not found.parts and not found.status:
                found.failed = ""
                connection = await self._connect()
                await connection.exchange(content, found)
        except OSError as error:
            # The numbers of these two are not the system's.
            is_own = isinstance(error, ssl.SSLError | socket.gaierror)
            text = os.strerror(error.errno) if error.errno and not is_own else str(error)
            found.failed = f"cannot connect: {text or type(error).__name__}"
        else:
            if connection.is_open:
                self._idle.append(connection)
        return found

    async def exchange_within(
        self, request: LoadRequest, seconds: float, method: str = "POST"
    ) -> Exchange:
        """Send a request now and return what came back, or a failure if nothing came back in time."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                return await self.exchange(request, start, method)
        except TimeoutError:
            return Exchange(start, failed=f"no answer within {seconds:g} s")

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._socket is not None:
            _, connection = await loop.create_unix_connection(_Connection, self._socket)
        else:
            _, connection = await loop.create_connection(
                _Connection, self._host, self._port, ssl=self._tls
            )
        return connection

    def close(self) -> None:
        """Close the connections that no request uses."""
        for each in self._idle:
            each.close()
        self._idle.clear()


@final
class _Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self.is_open = True
        self._found: Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport: Any = transport

    async def exchange(self, content: bytes, found: Exchange) -> None:
        """Send a request and add what comes back."""
        self._found = found
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        try:
            if self.is_open:
                self._transport.write(content)
                await self._done
            else:
                self._end("the server closed the connection")
        except asyncio.CancelledError:
            self.close()  # what still comes belongs to no request
            raise

    def data_received(self, data: bytes) -> None:
        """Take a part of a response."""
        self._now = time.monotonic()
        if self._found is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close()
            self._end(f"expected a response of HTTP/1.1, found another: {error}")

    def on_headers_complete(self) -> None:
        """Take the status."""
        assert self._found is not None
        self._found.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        """Take a part of the body."""
        assert self._found is not None
        self._found.parts.append((self._now, part))

    def on_message_complete(self) -> None:
        """End the exchange."""
        assert self._found is not None
        self._found.ended = self._now
        if not self._parser.should_keep_alive():
            self.close()
        self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the exchange that is under way."""
        self.is_open = False
        self._end("the server closed the connection")

    def close(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        self._transport.abort()

    def _end(self, failed: str) -> None:
        if self._found is not None:
            self._found.failed = failed
            self._found = None
            if not self._done.done():
                self._done.set_result(None)
