"""Latency that leaves out what a stalled server costs would make every server look well."""

import asyncio
import math

import numpy as np
import pytest
from tests.queued_server import queued_server

from prejit.server.load.http_client import Exchange, HttpClient
from prejit.server.load.load_window import measure, send_window
from prejit.server.load.workload import DrawnLoad, Lengths

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
        (10.1, role),
        (10.2, TOKEN),
        (10.5, chat[:9]),
        (10.6, chat[9:] + b": waiting\n\n"),
        (10.9, USAGE + DONE),
    )
    found = measure(exchange(*parts), True, 9.0)
    assert (found.due, found.failed) == (1.0, "")
    assert found.lag == pytest.approx(0.001)
    assert found.first == pytest.approx(0.2)
    assert found.whole == pytest.approx(1.0)
    assert found.gaps == pytest.approx((0.4,))
    assert (found.prompt_tokens, found.new_tokens) == (7, 3)
    assert found.per_token == pytest.approx(0.2)
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


def window(url, rate, seconds):
    async def run():
        client = HttpClient(url)
        try:
            return await send_window(client, LOAD, rate, seconds, 0, 0, lambda line: None)
        finally:
            client.close()

    return asyncio.run(run())


def test_a_stalled_server_costs_every_request_of_its_pause():
    """The pause is half of the window, so that half of the requests wait a quarter of it in the mean.

    A closed loop of 4 would have 4 slow ones.
    """
    with queued_server("--service-ms", 5, "--pause", 0.5, 1.0) as url:
        found = window(url, 60, 2.0)
    assert len(found) == 120
    assert not any(each.failed for each in found)
    whole = np.array([each.whole for each in found])
    assert (whole > 0.1).mean() > 0.35
    assert whole.max() > 0.9


@pytest.mark.parametrize(
    "content",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",  # ends early
        b"not HTTP\r\n\r\n",
        b"",
    ],
)
def test_a_broken_server_is_a_reason(content):
    async def run():
        async def handle(reader, writer):
            await reader.readline()
            writer.write(content)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            return await send_window(client, LOAD, 20, 0.2, 0, 0, lambda line: None)

    for each in asyncio.run(run()):
        assert each.failed


def test_a_connection_that_the_server_closed_meanwhile_is_replaced():
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

    async def run():
        count = 0

        async def handle(reader, writer):
            nonlocal count
            count += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            await reader.readline()  # the next request comes, and has no answer
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            [request] = LOAD.requests(1, np.random.default_rng(0))
            found = [await client.exchange(request, 0.0) for _ in range(2)]
            client.close()
        return count, found

    count, found = asyncio.run(run())
    assert (count, [each.body for each in found]) == (2, [b"{}", b"{}"])
