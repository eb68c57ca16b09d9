"""Latency that leaves out what a stalled server costs would make every server look well."""

import asyncio
import math
from contextlib import closing

import numpy as np
import pytest
from tests.queued_server import queued_server

from prejit.server.load.http_client import Exchange, HttpClient
from prejit.server.load.load_search import measure, send_window
from prejit.server.load.workload import DrawnLoad, Lengths, LoadRequest

LOAD = DrawnLoad("completions", "queue", 1.0, Lengths(8, 8), Lengths(2, 2))


def event(content):
    return f"data: {content}\n\n".encode()


TOKEN = event('{"choices":[{"text":"a"}]}')
USAGE = event('{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}')
DONE = event("[DONE]")


def exchange(*parts, status=200, failed=""):
    return Exchange(10.0, 10.001, status, list(parts), 11.0, failed)


def test_a_stream_is_measured_from_when_it_was_due_and_parts_count_without_a_usage():
    role = event('{"choices":[{"delta":{"role":"assistant","content":""}}]}')
    chat = event('{"choices":[{"delta":{"content":"b"}}]}')
    parts = (
        *((10.1, role), (10.2, TOKEN), (10.5, chat[:9]), (10.6, chat[9:] + b": waiting\n\n")),
        (10.9, USAGE + DONE),
    )
    found = measure(exchange(*parts), True, 9.0)
    assert (found.due, found.failed) == (1.0, "")
    measured = (found.lag, found.first, found.whole, found.per_token, *found.gaps)
    assert measured == pytest.approx((0.001, 0.2, 1.0, 0.2, 0.4))
    assert (found.prompt_tokens, found.new_tokens) == (7, 3)
    found = measure(exchange((10.2, TOKEN), (10.3, TOKEN + DONE)), True, 9.0)
    assert (found.new_tokens, found.failed) == (2, "")


@pytest.mark.parametrize(
    ("found", "is_streamed", "reason"),
    [
        (exchange(failed="cannot connect"), True, "cannot connect"),
        (exchange((10.1, b'{"error":{"message":"full"}}'), status=429), True, "status 429: full"),
        (exchange((10.1, b'{"error":"no model"}'), status=404), False, "status 404: no model"),
        (exchange((10.1, b"<html>"), status=502), True, "status 502: <html>"),
        (exchange((10.1, TOKEN)), True, "ends without"),
        (exchange((10.1, event('{"error":{"code":"deadline"}}'))), True, "deadline"),
        (exchange((10.1, event("{"))), True, "found another"),
        (exchange((10.1, b"<html>")), False, "found another"),
    ],
)
def test_a_failure_has_a_reason_and_no_latency(found, is_streamed, reason):
    answer = measure(found, is_streamed, 9.0)
    assert reason in answer.failed
    assert answer.whole == math.inf


async def use(url, ask):
    client = HttpClient(url)
    try:
        return await ask(client)
    finally:
        client.close()


def asked(handle, ask):
    """Return what a client gets at a server whose connections `handle` answers."""

    async def answer(reader, writer):
        with closing(writer):
            await handle(reader, writer)

    async def run():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            return await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ask)

    return asyncio.run(run())


def window(client, rate, seconds):
    return send_window(client, LOAD, rate, seconds, 0, 0, lambda line: None)


def test_a_stalled_server_costs_every_request_of_its_pause():
    """Half of the requests wait a quarter of the window in the mean; a closed loop of 4 has 4 slow ones."""
    with queued_server("--service-ms", 5, "--pause", 0.5, 1.0) as url:
        found = asyncio.run(use(url, lambda client: window(client, 60, 2.0)))
    assert len(found) == 120
    assert not any(each.failed for each in found)
    whole = np.array([each.whole for each in found])
    assert (whole > 0.1).mean() > 0.35
    assert whole.max() > 0.9


@pytest.mark.parametrize(
    "content", [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", b"not HTTP\r\n\r\n", b""]
)
def test_a_broken_server_is_a_reason(content):
    async def handle(reader, writer):
        await reader.readline()
        writer.write(content)

    found = asked(handle, lambda client: window(client, 20, 0.2))
    assert all(each.failed for each in found)


def test_a_connection_that_the_server_closed_meanwhile_is_replaced():
    connections = []

    async def handle(reader, writer):
        connections.append(reader)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        await reader.readline()  # the next request comes, and has no answer

    async def ask(client):
        [request] = LOAD.requests(1, np.random.default_rng(0))
        return [(await client.exchange(request, 0.0)).body for _ in range(2)]

    assert asked(handle, ask) == [b"{}", b"{}"]
    assert len(connections) == 2


def test_a_unix_socket_is_asked_and_an_answer_has_a_time_limit(tmp_path):
    path, heads = tmp_path / "admin", []

    async def answer(reader, writer):
        with closing(writer):  # also if the loop ends before this notices that the client has gone
            while head := await reader.readline():
                await reader.readuntil(b"\r\n\r\n")
                heads.append(head)
                if head.startswith(b"POST /quick"):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def ask(client):
        limits = (("quick", 60), ("slow", 0.05))
        requests = [(LoadRequest(f"/{name}", b"", {}, False), limit) for name, limit in limits]
        return [await client.exchange_within(*each) for each in requests]

    async def run():
        async with await asyncio.start_unix_server(answer, path):
            return await use(f"unix:{path}", ask)

    found, late = asyncio.run(run())
    assert (found.status, found.body, found.failed) == (200, b"ok", "")
    assert late.failed == "no answer within 0.05 s"
    assert heads == [b"POST /quick HTTP/1.1\r\n", b"POST /slow HTTP/1.1\r\n"]
