"""Requests and drains end, whatever an engine's end, its caller or the system does in between."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.held_mask import Held
from tests.waiting import wait_for

from prejit.runtime import load
from prejit.runtime.errors import ClosedError
from prejit.server.engine.engine import Engine
from prejit.server.engine.fair_queue import Limits
from prejit.server.engine.microbatch_calls import Calling

FEW = {"max_new_tokens": 4, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def bundle(wide_dir):
    with load(wide_dir, on_mismatch="error") as found:
        yield found


@pytest.fixture
def engine(bundle):
    with contextlib.closing(Engine(bundle, slots=2)) as found:
        yield found


def test_a_drain_ends_when_the_engine_is_closed_while_a_request_runs(engine):
    held = Held()
    running = engine.submit([1], token_mask=held, **FEW)
    assert held.began.wait(60)
    with ThreadPoolExecutor(2) as pool:
        drained = pool.submit(engine.drain)
        wait_for(lambda: engine._loop._refuses)
        closed = pool.submit(engine.close)
        wait_for(lambda: engine._loop._stops)
        held.ends.set()
        assert drained.result(10)
        closed.result(10)
    with pytest.raises(ClosedError):
        running.result(0)


class Failing:
    """Takes the tokens of a client, and fails with some of them."""

    def __init__(self, at):
        self._at, self._count = at, 0

    def __call__(self, tokens):
        self._count += 1
        if self._count == self._at:
            raise ZeroDivisionError("a mistake of who counts")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_request_whose_tokens_cannot_be_counted_fails_and_leaves_nothing_behind(engine, at):
    wrong = engine.submit([1], limits=Limits(on_tokens=Failing(at)), **FEW)
    with pytest.raises(ZeroDivisionError):
        wrong.result(10)
    assert len(engine.generate([1], **FEW).token_ids) == 4
    assert engine.drain(10)
    metrics = engine.metrics()
    assert (metrics.running, metrics.waiting, metrics.finished["error"]) == (0, 0, 1)


def test_tasks_wake_when_the_tokens_of_another_request_cannot_be_counted(engine, monkeypatch):
    monkeypatch.setattr("prejit.runtime.generation.decode.CALL_SECONDS", 0.0)  # one token a step

    async def read():
        stream = engine.stream([1], max_new_tokens=60, stop_token_ids=())
        await anext(stream)
        wrong = engine.submit([2], limits=Limits(on_tokens=Failing(4)), **FEW)

        async def rest():
            return [piece async for piece in stream]

        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(rest(), 10)
        with pytest.raises(ZeroDivisionError):
            wrong.result(10)

    asyncio.run(read())


def test_an_engine_whose_thread_could_not_start_starts_it_with_the_next_request(
    engine, monkeypatch
):
    def start(thread):
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError):
        engine.submit([1], **FEW)
    assert engine.metrics().waiting == 0
    assert len(engine.submit([1], **FEW).result(10).token_ids) == 4


def test_a_drain_that_begins_while_the_first_call_is_prepared_refuses_it(settled_dir, monkeypatch):
    began, goes_on, prepare = threading.Event(), threading.Event(), Calling.__init__

    def held(self, *arguments, **options):
        prepare(self, *arguments, **options)
        began.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(Calling, "__init__", held)
    x = np.ones((2, 16), np.float32)
    with (
        load(settled_dir, on_mismatch="error") as found,
        contextlib.closing(Engine(found)) as engine,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(engine.call, "score", x=x)
        assert began.wait(60)
        drained = pool.submit(engine.drain, 0.0)
        wait_for(lambda: engine._is_ending)
        goes_on.set()
        drained.result(10)
        with pytest.raises(ClosedError):
            engine.call("score", x=x)
        with contextlib.suppress(ClosedError):  # it came before the drain or after it
            first.result(10)
