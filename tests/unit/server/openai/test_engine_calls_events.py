"""The response of a stream: what clients get when something fails, and what ends when they leave."""

import asyncio
import threading

import pytest

from prejit.runtime.errors import DeadlineError, NumbersError, QueueFullError
from prejit.server.openai import engine_calls as module
from prejit.server.openai.engine_calls import EventStream

ENDS = {"type": "http.response.body", "body": b"", "more_body": False}


class Client:
    """One side of an ASGI connection. It stays until `gone` is set."""

    def __init__(self):
        self.sent, self.gone = [], asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    async def read(self, events, **scope):
        await EventStream(events)({"type": "http", **scope}, self.receive, self.send)

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)


async def of(*events):
    """Yield these events; raise the one that is an exception."""
    for event in events:
        if isinstance(event, Exception):
            raise event
        yield event


def test_events_come_one_by_one_and_an_error_before_them_has_its_own_status():
    client = Client()
    asyncio.run(client.read(of(b"one", b"two")))
    start, *bodies = client.sent
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    parts = [(each["body"], each["more_body"]) for each in bodies]
    assert parts == [(b"one", True), (b"two", True), (b"", False)]
    client = Client()
    with pytest.raises(QueueFullError):
        asyncio.run(client.read(of(QueueFullError("full", retry_after=1))))
    assert client.sent == []


def test_a_request_that_waits_has_a_head_and_comments(monkeypatch):
    """A proxy cuts a connection on which nothing comes."""
    monkeypatch.setattr(module, "COMMENT_SECONDS", 0.01)

    client, slot = Client(), asyncio.Event()

    async def events():
        yield b""
        await slot.wait()
        yield b"one"
        await asyncio.sleep(0.05)
        yield b"two"

    async def main():
        task = asyncio.ensure_future(client.read(events()))
        async with asyncio.timeout(60):
            while client.body.count(b": waiting\n\n") < 2:
                await asyncio.sleep(0.001)
        assert client.sent[0]["type"] == "http.response.start"
        slot.set()
        await task
        assert client.body.rpartition(b": waiting\n\n")[2] == b"onetwo"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "is_suspected"), [(NumbersError("not numbers"), True), (DeadlineError("late"), False)]
)
def test_an_error_behind_the_first_event_is_an_event_and_makes_the_server_look(error, is_suspected):
    client, suspected = Client(), threading.Event()
    asyncio.run(client.read(of(b"data: 1\n\n", error), state={"suspected": suspected}))
    assert client.body.startswith(b'data: 1\n\ndata: {"error":{"message":"')
    assert client.sent[-1] == ENDS
    assert suspected.is_set() == is_suspected


@pytest.mark.parametrize(("after", "leaves"), [(0, True), (1, True), (1, False)])
def test_events_are_closed_when_the_client_leaves_or_the_request_is_cancelled(after, leaves):
    async def main():
        client, closed = Client(), []

        async def events():
            try:
                for _ in range(after):
                    yield b"one"
                await asyncio.sleep(60)
            finally:
                closed.append(True)

        task = asyncio.ensure_future(client.read(events()))
        await asyncio.sleep(0.01)
        if leaves:
            client.gone.set()
            await asyncio.wait_for(task, 10)
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert closed

    asyncio.run(main())
