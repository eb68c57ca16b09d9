"""Bad clients: none of them may stop the others, cost a 500, or stay for ever."""

import asyncio
import collections
import contextlib
import gc
import itertools
import os
import select
import socket
import time
import weakref
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.unit.server.running import answer, running, wait_for

from prejit.server.gate import gate
from prejit.server.gate.gate import Gate
from prejit.server.gate.server_settings import Settings
from prejit.server.http import connections
from prejit.server.served.served import Models

HEAD = b" HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /hello" + HEAD + b"\r\n"
STREAM = b"GET /stream" + HEAD + b"\r\n"
LAST = b"GET /hello" + HEAD + b"Connection: close\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


Streams = SimpleNamespace(begun=0, closed=0)


async def hello(request):
    return PlainTextResponse("hello")


async def size(request):
    return PlainTextResponse(str(len(await request.body())))


async def slow_headers(request):
    """The header after the whole body."""
    await request.body()
    return PlainTextResponse(f"authorization: {request.headers.get('authorization', 'none')}")


async def large(request):
    return Response(b"x" * (16 << 20))


async def stream(request):
    """Endless parts of 64 KB."""

    async def parts():
        Streams.begun += 1
        try:
            while True:
                yield b"x" * 65_536
                await asyncio.sleep(0)
        finally:
            Streams.closed += 1

    return StreamingResponse(parts())


@contextlib.contextmanager
def serving(settings):
    """A server of the handlers above, behind a gate."""
    models = Models()
    models.change("loading", "ready")
    app = Starlette(
        routes=[
            Route("/hello", hello),
            Route("/size", size, methods=["POST"]),
            Route("/slow_headers", slow_headers, methods=["POST"]),
            Route("/large", large),
            Route("/stream", stream),
        ],
        middleware=[Middleware(Gate, models=models, settings=settings)],
    )
    Streams.begun = Streams.closed = 0
    with running(models, settings, app) as found:
        yield found
        check(found)  # whatever a test did, others are served afterwards
        wait_for(lambda: found.requests() == 0)


@pytest.fixture
def server():
    with serving(Settings(body_bytes=1 << 20, timeout_seconds=60)) as found:
        yield found


def exchange(server, *sent):
    with server.connect() as connection:
        for part in sent:
            connection.sendall(part)
        return answer(connection)


def check(server):
    assert httpx.get(f"{server.url}/hello", timeout=60).text == "hello"


GARBAGE = [
    b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a port without it
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /hello" + HEAD + b"bad header\r\n\r\n",
    b"POST /size" + HEAD + b"Content-Length: -1\r\n\r\n",
    b"POST /size" + HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"POST /size" + HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    b"POST /size" + HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"\x00" * 4096,
    os.urandom(4096),
]


def test_garbage_is_400_or_nothing(server):
    for sent in GARBAGE:
        with server.connect() as connection:
            connection.sendall(sent)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            got = answer(connection)
        assert got == b"" or got.startswith(b"HTTP/1.1 40"), (sent, got[:200])
    got = exchange(server, GET + GET + b"\x00garbage\r\n\r\n" + GET)
    assert b"HTTP/1.1 400" in got
    assert b" 500 " not in got


def test_requests_are_framed_exactly_and_a_trailer_is_no_header(server):
    post = b"POST /size" + HEAD + b"Content-Length: %d\r\n\r\n%s"
    got = exchange(server, b"".join(post % (n, b"x" * n) for n in range(50)) + LAST)
    answers = [part.partition(b"\r\n\r\n")[2] for part in got.split(b"HTTP/1.1 200 OK")]
    assert [int(each.split(b"HTTP")[0]) for each in answers[1:51]] == list(range(50))
    for count, status in ((256, 200), (257, 400)):
        got = exchange(server, GET[:-2] + b"X:\r\n" * (count - 2) + b"Connection: close\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 %d" % status)
        assert (b"at most 256 headers" in got) == (status == 400)
    # The gate has checked the request without it.
    late = b"POST /slow_headers" + CHUNKED + b"1\r\na\r\n0\r\n", b"Authorization: late\r\n\r\n"
    small = b"POST /size" + CHUNKED + b"1\r\na\r\n" * 4095 + b"0\r\n\r\n"
    got = exchange(server, *late, small + LAST)
    assert b"authorization: none" in got
    assert b"\r\n\r\n4095HTTP" in got  # small chunks are a body as any


LONG = b"a" * 999
ENDLESS = {
    "trailers": (b"GET /hello" + CHUNKED + b"0\r\n", b"X: %s\r\n" % LONG),
    "a long trailer": (b"POST /size" + CHUNKED + b"0\r\nX: ", LONG),
    "an extension": (b"POST /size" + CHUNKED + b"5;", LONG),
    "many extensions": (b"GET /hello" + CHUNKED, b"1;%s\r\nx\r\n" % LONG),
    "an unread body": (b"GET /hello" + CHUNKED, b"400\r\n%s\r\n" % (b"a" * 1024)),
    "small chunks": (b"POST /size" + CHUNKED, b"1\r\na\r\n" * 99),
    "headers": (b"GET /hello HTTP/1.1\r\n", b"X:\r\n" * 199),
    "a header": (b"GET /hello HTTP/1.1\r\nX: ", LONG),
    "a path": (b"GET /", LONG),
    # In one segment: after a part of them the server would stop reading, and wait for the client to read.
    "requests ahead": (STREAM + GET * 100, GET),
}
"""The beginning of what a client sends, and what it then sends again and again."""


@pytest.mark.parametrize("what", ENDLESS)
def test_nothing_that_a_client_sends_is_without_end(what, monkeypatch, server):
    begin, part = ENDLESS[what]
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", 1 << 20, raising=False)
    # More than what all buffers of a connection hold.
    sent = itertools.chain([begin], itertools.repeat(part, (64 << 20) // len(part)))
    with server.connect(60) as connection, pytest.raises(OSError, match=r"reset|[Bb]roken|aborted"):
        collections.deque(map(connection.sendall, sent), maxlen=0)
    wait_for(lambda: not server.server.server_state.connections)


def test_an_offer_of_another_protocol_is_ignored(server):
    """As Java's HttpClient makes it, with a body."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    for framed in (b"Content-Length: 5\r\n\r\nhello", chunked):
        sent = 2 * (b"POST /size" + HEAD + offer + framed) + LAST
        for width in (len(sent), 7):
            found = exchange(server, *(sent[i : i + width] for i in range(0, len(sent), width)))
            assert found.count(b"HTTP/1.1 200 OK") == 3
            assert found.count(b"\r\n\r\n5") == 2
    for offer, count in (
        (b"Connection: Upgrade\r\nUpgrade: websocket\r\n", 2),
        (b"Connection: close, upgrade\r\nUpgrade: h2c\r\n", 1),
    ):
        found = exchange(server, GET[:-2] + offer + b"\r\n" + LAST)
        assert found.count(b"HTTP/1.1 200 OK") == count
        assert found.endswith(b"hello")
    found = exchange(server, b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\nxyz")
    assert found.startswith(b"HTTP/1.1 4")


def test_a_client_that_sends_nothing_or_slow_heads_and_trailers_is_closed(monkeypatch, server):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    for sent in (b"", b"GET /hel", GET):
        assert exchange(server, sent).count(b"HTTP/1.1 200") == (sent == GET)
    for begin, part in (
        (b"GET /hello" + CHUNKED + b"0\r\n", b"X: a\r\n"),
        (b"GET /hello" + CHUNKED + b"0\r\n", b"a"),
        (b"GET /hello HTTP/1.1\r\nX-Long: ", b"a"),
    ):
        with server.connect() as connection, contextlib.suppress(OSError):
            connection.sendall(begin)
            for _ in range(3000):
                connection.sendall(part)
                time.sleep(0.02)
            pytest.fail(f"{part} may come for ever after {begin}")


def test_a_client_that_goes_ends_all_its_requests_and_a_reset_one_is_freed(server):
    """Not only the last one that it sent, nor when the time for its next head is over."""
    for _ in range(5):
        with server.connect() as connection:
            connection.sendall(STREAM + GET)
            assert connection.recv(1000)
    wait_for(lambda: Streams.closed == Streams.begun == 5)
    wait_for(lambda: not server.server.server_state.connections)
    with server.connect() as connection:
        connection.sendall(GET)
        wait_for(lambda: select.select([connection], [], [], 0)[0])
        [kept] = map(weakref.ref, server.server.server_state.connections)
    # Closed with an answer that was not read: the server sees a reset.
    wait_for(lambda: gc.collect() is not None and kept() is None)
    with server.connect() as connection:
        connection.sendall(b"POST /hello" + HEAD + b"Content-Length: 60000\r\n\r\n" + b"a" * 60_000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 405")
        [kept] = server.server.server_state.connections
        assert len(kept.cycle.body) == 0


def test_a_body_in_another_transfer_coding_is_not_read_as_what_it_is_not(server):
    gzip = b"Transfer-Encoding: gzip, chunked\r\n\r\n"
    for coding in (gzip, gzip.replace(b", ", b"\r\nTransfer-Encoding: ")):
        got = exchange(
            server, b"POST /size" + HEAD + b"Connection: close\r\n" + coding + b"0\r\n\r\n"
        )
        assert got.startswith(b"HTTP/1.1 501 ")
        assert b"expected chunked alone, found 'gzip, chunked'" in got


def test_of_too_many_that_have_sent_no_head_the_oldest_is_closed(monkeypatch, server):
    monkeypatch.setattr(connections, "MAX_WAITING", 5)
    with contextlib.ExitStack() as opened:
        first = opened.enter_context(server.connect())
        for number in range(20):
            connection = opened.enter_context(server.connect())
            connection.sendall(b"GET" if number % 2 else b"")
        assert answer(first) == b""
        wait_for(lambda: len(server.server.server_state.connections) == 5)
        connection.sendall(b" /hello HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 200")


def test_a_body_that_stops_coming_is_408_and_one_that_is_too_long_413(monkeypatch, server):
    # A client that still sends may find the connection closed: it must not wait for ever.
    parts = (b"x" * 65_536 for _ in range(160))
    with contextlib.suppress(httpx.WriteError, httpx.ReadError):
        assert httpx.post(f"{server.url}/size", content=parts, timeout=60).status_code == 413
    most = b"x" * (1 << 20)
    assert httpx.post(f"{server.url}/size", content=most, timeout=60).text == str(len(most))
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.2)
    got = exchange(server, b"POST /size HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
    assert got.startswith(b"HTTP/1.1 408")


def slow_reader(server, request):
    """Return the connection of a client that reads little."""
    slow = server.connect()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.sendall(request)
    return slow


def test_a_slow_reader_holds_no_memory_and_nobody_up(server):
    with slow_reader(server, STREAM):
        wait_for(lambda: Streams.begun == 1)
        for _ in range(20):
            check(server)
        open_ones = server.server.server_state.connections
        assert max(each.transport.get_write_buffer_size() for each in open_ones) < 1 << 20
    wait_for(lambda: Streams.closed == 1)


def test_a_reader_that_never_reads_is_cut_after_the_time_of_a_request(monkeypatch):
    monkeypatch.setattr(gate, "GRACE_SECONDS", 0.0)
    with serving(Settings(timeout_seconds=0.5)) as server, slow_reader(server, STREAM):
        wait_for(lambda: Streams.begun == 1)
        wait_for(lambda: not server.server.server_state.connections)
        assert server.requests() == 0


def test_an_answer_that_nobody_reads_is_dropped_in_time(monkeypatch, server):
    """Even where the connection is to be closed behind it."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with slow_reader(server, LAST.replace(b"/hello", b"/large")):
        wait_for(server.server.server_state.connections.__len__)
        wait_for(lambda: not server.server.server_state.connections)
