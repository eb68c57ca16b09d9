"""An engine that sleeps gives its memory back, loses no request, and wakes up to the same tokens."""

import contextlib
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.extent import one_in
from tests.held_mask import Held
from tests.waiting import wait_for

from prejit.runtime import load
from prejit.runtime.errors import ClosedError, DeadlineError
from prejit.runtime.generation.options import Request
from prejit.server.engine.engine import Engine
from prejit.server.engine.memory import NoRoomError

FEW = {"max_new_tokens": 4, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def bundle(wide_dir):
    with load(wide_dir, on_mismatch="error") as found:
        yield found


class Door:
    """A room with memory, unless it is closed."""

    def __init__(self):
        self.is_open, self.waited = True, []

    def claim(self, sleeper, waited_seconds):
        self.waited.append(waited_seconds)
        if self.is_open:
            sleeper.rise()
        return self.is_open


@pytest.fixture
def door():
    return Door()


@pytest.fixture
def engine(bundle, door):
    with contextlib.closing(Engine(bundle, slots=4, room=door)) as found:
        yield found


def test_it_gives_its_memory_back_and_wakes_with_the_next_request(engine, bundle):
    assert engine.sleeper.is_sleeping
    prompt = list(range(3, 40))
    expected = engine.generate(prompt, **FEW)
    assert not engine.sleeper.is_sleeping
    wait_for(lambda: engine.metrics().prefix_bytes)  # what the slot held is kept
    used = set(bundle._programs._ready)
    assert engine.sleep()
    metrics = engine.metrics()
    assert (metrics.cache_bytes, metrics.prefix_bytes) == (0, 0)
    assert bundle._programs._ready == {}
    engine.wake()
    assert used <= set(bundle._programs._ready)
    again = engine.generate(prompt, **FEW)
    assert (again.token_ids, again.stats.reused_tokens) == (expected.token_ids, 0)
    found = engine.metrics().sleep
    assert (found.is_sleeping, found.sleeps, found.wakes) == (False, 1, 2)
    assert found.wake_seconds.count == 2
    assert 0 < found.wake_seconds.sum < 60
    assert engine.metrics().programs["loaded"] >= 2  # as they were obtained first


def test_a_bundle_that_sleeps_keeps_no_empty_cache(bundle):
    bundle.prepare(*(each.name for each in bundle.decoder.prefills(1, 24)))
    bundle.batch(4).insert(Request([3, 4, 5], max_new_tokens=2))
    assert bundle.decoder.spares
    bundle.sleep()
    assert not bundle.decoder.spares


def test_a_request_waits_for_memory_from_its_beginning_to_its_end_or_the_engines(engine, door):
    door.is_open = False
    with pytest.raises(DeadlineError):
        engine.generate([1, 2], timeout=0.3, **FEW)
    with pytest.raises(NoRoomError, match=r"expected [\d,]+ bytes for caches and programs"):
        engine.wake()
    door.is_open, door.waited = True, []
    assert len(engine.generate([1, 2], **FEW).token_ids) == 4
    assert max(door.waited) < 0.3  # a wait that was given up does not count for the next one
    wait_for(engine.sleep)
    door.is_open = False
    cancelled, waiting = (engine.submit([1, 2], **FEW) for _ in range(2))
    assert cancelled.cancel()
    for _ in range(10):
        time.sleep(0.05)
        with pytest.raises(NoRoomError):
            engine.wake()
    assert not engine.drain(0.05)
    assert engine.sleeper.is_sleeping
    assert not waiting.done()
    door.is_open, door.waited = True, []
    assert len(waiting.result(60).token_ids) == 4
    assert engine.drain(60)  # it went on while the engine drained
    assert max(door.waited) >= 0.5  # a refused wake does not begin a wait anew
    engine.undrain()
    wait_for(engine.sleep)
    door.is_open, door.waited = False, []
    waiting = engine.submit([1, 2], **FEW)
    wait_for(lambda: door.waited)
    engine.close()
    with pytest.raises(ClosedError):
        waiting.result(60)
    assert engine.sleeper.is_sleeping


def test_a_busy_engine_does_not_sleep_and_begins_nothing_while_another_asks_for_memory(
    engine,
):
    held, ends = Held(), threading.Event()
    running = engine.submit([1, 2], token_mask=held, **FEW)
    assert held.began.wait(60)
    assert not engine.sleep()
    assert not engine.sleep(between=True)

    def ask():
        while not ends.is_set() and not engine.sleep(between=True):
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        wait_for(lambda: engine.sleeper.yields)
        later = [engine.submit([3, number], **FEW) for number in range(3)]
        held.ends.set()
        assert len(running.result(60).token_ids) == 4  # who runs is not disturbed
        asking.result(60)
        ends.set()
    assert all(len(each.result(60).token_ids) == 4 for each in later)
    found = engine.metrics().sleep
    assert (found.sleeps, found.wakes) == (1, 2)


def test_an_engine_that_follows_another_begins_after_what_waits_there(bundle, monkeypatch):
    held = Held()
    with (
        contextlib.closing(Engine(bundle, slots=1)) as earlier,
        contextlib.closing(Engine(bundle, slots=1)) as later,
    ):

        def occupy_earlier(seconds):
            held.began.clear()
            held.ends.clear()
            monkeypatch.setattr("prejit.server.engine.engine._LONGEST_TURN_SECONDS", seconds)
            running = earlier.submit([1, 2], token_mask=held, **FEW)
            assert held.began.wait(60)
            waiting = earlier.submit([3], **FEW)
            later.begin_after(earlier)
            return running, waiting

        before = occupy_earlier(60.0)
        new = later.submit([4], **FEW)
        time.sleep(0.1)
        assert not new.done()
        assert later.metrics().waiting == 1
        held.ends.set()
        for each in (*before, new):
            assert len(each.result(60).token_ids) == 4
        _, waiting = occupy_earlier(0.1)
        assert len(later.generate([4], **FEW).token_ids) == 4  # it does not wait for long
        held.ends.set()
        assert len(waiting.result(60).token_ids) == 4


def test_functions_wake_it_too(settled_dir, door):
    x = np.ones((2, 16), np.float32)
    with (
        load(settled_dir, on_mismatch="error") as found,
        contextlib.closing(Engine(found, room=door)) as engine,
    ):
        results = [engine.call("score", x=x) for _ in range(4)]
        # jaxlib dispatches these, and holds the executable
        assert engine.sleep()
        door.is_open = False
        waiting = engine.submit_call("score", x=x)
        time.sleep(0.05)
        assert not waiting.done()
        door.is_open = True
        results.append(waiting.result(60))
        assert engine.sleep()
        results.append(engine.call("score", x=x))
        assert all(np.array_equal(each, results[0]) for each in results)


def test_requests_that_come_while_it_falls_asleep_are_answered(engine, bundle):
    expected = bundle.generate([1, 2], **FEW).token_ids
    ends = threading.Event()
    with ThreadPoolExecutor(5) as pool:
        sleeping = pool.submit(lambda: sum(engine.sleep() for _ in iter(ends.is_set, True)))
        found = pool.map(lambda _: engine.generate([1, 2], **FEW).token_ids, range(40))
        assert all(each == expected for each in found)
        ends.set()
        assert sleeping.result(60)


@pytest.mark.parametrize("held", one_in(2, [False, True]))
def test_a_closed_bundle_leaves_no_client_to_the_collector(wide_dir, held):
    """Each client of XLA has threads, and a handler may hold the engine until its request ends."""
    gc.collect()
    gc.disable()
    try:
        found = load(wide_dir, on_mismatch="error")
        engine = Engine(found, slots=1)
        engine.generate([1, 2], **FEW)
        client = type(found._programs.device.first.client)
        before = sum(isinstance(each, client) for each in gc.get_objects())
        if held:
            engine.close()
        found.close()
        if not held:
            del engine
        del found
        gc.collect(1)
        assert sum(isinstance(each, client) for each in gc.get_objects()) == before - 1
    finally:
        gc.enable()


def test_an_engine_that_was_closed_while_something_ran_leaves_its_room_to_others(bundle):
    """As the trial of a release does, which keeps the bundle awake that is swapped meanwhile."""

    class Room:
        def claim(self, sleeper, waited_seconds):
            if sleeper is later.sleeper and not earlier.sleep():
                return False
            sleeper.rise()
            return True

    with (
        contextlib.closing(Engine(bundle, slots=1, room=Room())) as earlier,
        contextlib.closing(Engine(bundle, slots=1, room=Room())) as later,
    ):
        earlier.generate([1, 2], **FEW)
        with earlier.sleeper:
            earlier.close()
        time.sleep(0.3)  # it yields for 0.25 s
        with pytest.raises(ClosedError), earlier.sleeper:
            """The trial would go on, beside a bundle that no longer answers."""
        assert len(later.submit([1, 2], **FEW).result(10).token_ids) == 4
