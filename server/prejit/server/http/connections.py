"""HTTP connections: uvicorn's own, with limits for clients that send too slowly or too much."""

from __future__ import annotations

import asyncio
from typing import Any, final

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from prejit.server.gate.gate import ABORT

HEAD_SECONDS = 75
"""A connection without the whole head of a request for so long is closed; idle ones too. So is one whose
request is answered while its body or trailers still come, or whose client does not read its last answer."""

MAX_WAITING = 1024
"""How many connections may wait at once without having sent the head of a request."""

MAX_HEAD_BYTES = 1 << 16
"""Maximum size of a request without its body: URL, headers, chunk extensions and trailers together."""

MAX_HEADERS = 256
"""Maximum number of headers of a request. Each takes more memory here than on the wire."""

MAX_PIPELINED = 64
"""How many requests a client may send ahead of their answers."""

MAX_UNREAD_BYTES = 16 << 20
"""Maximum size of what is read and dropped of a body after its request was answered. A client that sends
everything before it reads finds the answer then."""

MAX_SMALL_CHUNKS = 4096
"""How many chunks a body may have if they hold less than `_SMALL_BYTES` on average: each costs more here than
its bytes on the wire."""

_MAX_WAITING_BYTES = 1 << 12
"""Maximum size of an unfinished head that waits without a parser."""

_SMALL_BYTES = 32
_CHUNK_BYTES = 16
"""How many bytes of a chunk are its frame: its length and two line ends. More are extensions."""


_OF_UPGRADE = frozenset((b"upgrade", b"http2-settings"))
"""Headers that offer another protocol, which a server may ignore (RFC 9110, section 7.8)."""


@final
class WaitingConnections:
    """Makes uvicorn's connections, and keeps those that have not sent a head: the oldest first.

    A client that means to ask sends a head at once. So when too many wait, the oldest is closed, as nginx
    does with idle connections.
    """

    def __init__(self) -> None:
        self._deadlines: dict[_WaitingConnection, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        """Return the protocol of a new connection. The arguments are uvicorn's."""
        return _WaitingConnection(self, (config, server_state, app_state, _loop))

    def add(self, connection: _WaitingConnection) -> None:
        """Let a connection wait."""
        if len(self._deadlines) >= MAX_WAITING:
            self._close_oldest()
        loop = asyncio.get_running_loop()
        self._deadlines[connection] = loop.time() + HEAD_SECONDS
        if self._timer is None:
            self._timer = loop.call_later(HEAD_SECONDS, self._close_late)

    def remove(self, connection: _WaitingConnection) -> None:
        """Forget a connection that has sent a head or is lost."""
        self._deadlines.pop(connection, None)

    def _close_oldest(self) -> None:
        oldest = next(iter(self._deadlines))
        del self._deadlines[oldest]
        oldest.abort()

    def _close_late(self) -> None:
        """Close what has waited too long, and look again when the next one has. One timer does for all."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._deadlines:
            first = next(iter(self._deadlines.values()))
            if first > loop.time():
                self._timer = loop.call_at(first, self._close_late)
                return
            self._close_oldest()


@final
class _WaitingConnection(asyncio.Protocol):
    """A connection until it has sent the first head.

    It keeps the bytes that came and no more: a parser and what else `Connection` needs take 4 KB of Python
    objects, and 10,000 clients that send nothing would leave the allocator's arenas in pieces.
    """

    __slots__ = ("_arguments", "_received", "_transport", "_waiting")

    def __init__(self, waiting: WaitingConnections, arguments: tuple[Any, ...]) -> None:
        self._waiting = waiting
        self._arguments = arguments  # of `Connection`
        self._received = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        self._transport = transport
        self._all().add(self)
        self._waiting.add(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client. uvicorn gets the connection with its first head, or if it has none."""
        self._received += data
        if _may_be_unfinished_head(self._received):
            return
        self.connection_lost(None)
        connection = Connection(*self._arguments)
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(self._received)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._waiting.remove(self)
        self._all().discard(self)

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def shutdown(self) -> None:
        """Close the connection: the server ends."""
        self._transport.close()

    def _all(self) -> set[Any]:
        _, state, *_ = self._arguments
        return state.connections  # type: ignore[no-any-return]


def _may_be_unfinished_head(received: bytes) -> bool:
    """Return whether bytes may be the beginning of a head whose end is still to come."""
    return (
        len(received) < _MAX_WAITING_BYTES
        and received[:1].isupper()
        and b"\n\r\n" not in received
        and b"\n\n" not in received
    )


class _Parser(HttpRequestParser):
    """httptools' parser, which takes what follows a head with an offer of another protocol for that protocol.

    Java's HttpClient offers HTTP/2 with its first request, whose body would be lost.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._connection = connection

    def offers_upgrade(self) -> bool:
        """Return whether the head of the request offers another protocol."""
        return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        """Take bytes from the client."""
        try:
            super().feed_data(data)
        except HttpParserUpgrade as upgrade:
            if not self.offers_upgrade():
                raise
            self._connection.read_without_upgrade(bytes(data[upgrade.args[0] :]))


class Connection(HttpToolsProtocol):
    """One connection of a client, from its first request on. Its signatures are uvicorn's."""

    parser: _Parser
    _timer: asyncio.TimerHandle | None = None
    _extra_bytes = 0  # of the request that comes now: what is not its body
    _chunks = _chunks_bytes = 0  # of the body that comes now
    _unread_bytes = 0  # of the body of a request that is answered already
    _reads_head = True
    _is_lost = False
    _refusal = ""  # why the parser was stopped
    _answered: RequestResponseCycle | None = None  # the request that is answered now, or was last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        self.parser = _Parser(self)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection, and the request that is answered: uvicorn tells only the last one that came."""
        self._is_lost = True
        self._stop_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset, uvicorn's timer holds the connection
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client; refuse what has no end."""
        self._extra_bytes += len(data)
        super().data_received(data)
        self._extra_bytes = max(0, self._extra_bytes)
        if self.transport.is_closing():
            return
        if self._extra_bytes > MAX_HEAD_BYTES:
            self.send_400_response(
                f"Expected at most {MAX_HEAD_BYTES} bytes of URL, headers, chunk extensions and trailers."
            )
        elif self._unread_bytes > MAX_UNREAD_BYTES:
            self.transport.abort()

    def read_without_upgrade(self, rest: bytes) -> None:
        """Read a request again that offers another protocol, without the offer.

        Args:
            rest: what follows its head.
        """
        head = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                options = [each.strip() for each in value.split(b",")]
                value = b", ".join(each for each in options if each.lower() not in _OF_UPGRADE)
            if name not in _OF_UPGRADE:
                head.append(name + b": " + value)
        self.parser = _Parser(self)
        self.parser.feed_data(b"\r\n".join([*head, b"\r\n"]) + rest)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the client sends, and close. An answer that has begun is cut instead."""
        answered = self._answered
        if answered is not None and answered.response_started and not answered.response_complete:
            self.transport.abort()
        else:
            super().send_400_response(self._refusal or msg)
            self._start_timer()

    def on_message_begin(self) -> None:
        """Begin to read a request."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(f"Expected at most {MAX_PIPELINED} requests ahead of their answers.")
        super().on_message_begin()
        self._reads_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers are dropped: the request was checked without them."""
        if not self._reads_head:
            return
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(f"Expected at most {MAX_HEADERS} headers.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer a request, whose scope gets the way to cut this connection."""
        if self.parser.offers_upgrade():
            return  # it is read again
        self._stop_timer()
        self._reads_head = False
        extensions: Any = {ABORT: self.transport.abort}
        self.scope["extensions"] = extensions
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Begin to read a chunk."""
        self._extra_bytes -= _CHUNK_BYTES
        self._chunks += 1
        if self._chunks > max(MAX_SMALL_CHUNKS, self._chunks_bytes // _SMALL_BYTES):
            self._refuse(f"Expected chunks of at least {_SMALL_BYTES} bytes.")

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._extra_bytes -= len(body)
        self._chunks_bytes += len(body)
        if self.cycle.response_complete:
            self._unread_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Count from 0 for the next request."""
        if self.parser.offers_upgrade():
            return
        super().on_message_complete()
        self._extra_bytes = self._unread_bytes = self._chunks = self._chunks_bytes = 0

    def on_response_complete(self) -> None:
        """Wait for the next request of the connection, or for the client to read the last answer."""
        if self._answered is not None:
            self._answered.body = bytearray()  # of a request that was refused
        super().on_response_complete()
        self._start_timer()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, why: str) -> None:
        """Stop the parser."""
        self._refusal = why
        raise ValueError(why)

    def _start_timer(self) -> None:
        self._stop_timer()
        if not self._is_lost:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._close_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_idle(self) -> None:
        if self._answered is None or self._answered.response_complete:
            self.transport.abort()
