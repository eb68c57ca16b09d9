"""Models that share memory: the least recently used one sleeps first, and none that runs requests."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tests.waiting import wait_for

from prejit.runtime.errors import ClosedError
from prejit.runtime.generation.cache_plan import CODE_TIMES
from prejit.server.engine.memory import NoRoomError
from prejit.server.engine.sleeper import Sleeper
from prejit.server.served import served_loading
from prejit.server.served.served_loading import ModelMemory


class StandInEngine:
    """An engine of some size, whose requests a test counts."""

    def __init__(self, shared, need, growth=0, stacks=None):
        self.live = 0
        self.freed = 0
        self.growth_bytes = growth
        self.sleeper = Sleeper("m", need, shared.room, lambda: self.live)
        shared.add(f"of-{need}", self, bundle(0, stacks))

    def sleep(self, *, between=False):
        return self.sleeper.sleep(self._free, between=between)

    def _free(self):
        self.freed += 1

    def use(self):
        if found := self.sleeper.try_begin():
            self.sleeper.end()
        return found


def engines(*needs):
    """Return engines that share 10 bytes."""
    shared = ModelMemory(10, 0)
    return [StandInEngine(shared, need) for need in needs]


def awake(*engines):
    return [not each.sleeper.is_sleeping for each in engines]


def test_the_least_recently_used_one_sleeps_first_and_no_more_than_needed():
    a, b, c = engines(4, 4, 4)
    assert awake(a, b, c) == [False, False, False]
    assert (a.use(), b.use(), a.use()) == (True, True, True)
    assert awake(a, b, c) == [True, True, False]
    assert c.use()
    assert awake(a, b, c) == [True, False, True]
    assert b.use()
    assert awake(a, b, c) == [False, True, True]
    assert (a.freed, b.freed, c.freed) == (1, 1, 0)


def test_one_that_runs_requests_or_has_some_that_wait_stays_awake():
    a, b = engines(6, 6)
    a.sleeper.begin()
    assert not b.use()
    a.sleeper.end()
    a.live = 1
    assert not b.use()
    assert awake(a, b) == [True, False]
    a.live = 0
    assert b.use()
    assert awake(a, b) == [False, True]
    a, b, c = engines(6, 4, 8)
    a.sleeper.begin()
    assert b.use()
    assert not c.use()
    assert awake(a, b, c) == [True, True, False]


def test_busy_models_take_turns(monkeypatch):
    monkeypatch.setattr(served_loading, "_PATIENCE_SECONDS", 0.05)
    a, b = engines(6, 6)
    a.live = b.live = 1  # requests wait for both, all the time
    turns = []
    ends = threading.Event()

    def run(engine):
        while not ends.is_set():
            try:
                engine.sleeper.begin(ends.is_set)
            except ClosedError:
                return
            if not turns or turns[-1] is not engine:
                turns.append(engine)
            assert awake(a, b).count(True) == 1
            time.sleep(0.002)
            engine.sleeper.end()

    with ThreadPoolExecutor(2) as pool:
        running = pool.map(run, (a, b))
        try:
            wait_for(lambda: len(turns) >= 6)
        finally:
            ends.set()
    assert list(running) == [None, None]
    assert a.sleeper.metrics().wakes >= 3


def bundle(code, stacks=None):
    """A bundle; stacks: the arrays of its adapters."""
    memories = SimpleNamespace(temp_bytes=7, output_bytes=5, alias_bytes=2, argument_bytes=1 << 40)
    executable = SimpleNamespace(raw_size=code)
    config = SimpleNamespace(
        decoder=None if stacks is None else SimpleNamespace(adapters=stacks),
        programs=[SimpleNamespace(memory=memories, executable=executable)],
        requirement=SimpleNamespace(platform="cpu"),
    )
    return SimpleNamespace(config=config, decoder=SimpleNamespace(device=None))


def test_what_is_left_for_one_more_with_and_without_a_limit_or_adapters(monkeypatch):
    monkeypatch.setattr(served_loading, "free_bytes", lambda device: 10_000)
    shared = ModelMemory(None, 2)
    assert shared.for_caches("a", bundle(1000)) == 5000  # at the start, one more comes
    StandInEngine(shared, 4000, growth=3000)
    assert shared.for_caches("b", bundle(1000)) == 7000
    StandInEngine(shared, 1000, growth=1000)
    need = 100 * CODE_TIMES + 10
    assert shared.for_caches("c", bundle(100)) == 10_000 - 4000 - need
    message = r"c: expected 25,010 bytes for its programs, found 6,000"
    with pytest.raises(NoRoomError, match=message) as caught:
        shared.for_caches("c", bundle(1000))
    assert "; these could sleep: of-" in str(caught.value.hint)
    monkeypatch.setattr(served_loading, "free_bytes", lambda device: 4000)
    shared = ModelMemory(9000, 1)
    assert shared.for_caches("a", bundle(100)) == 4000 - need  # the system has less than the limit
    one = StandInEngine(shared, 8000)
    assert one.use()
    assert shared.for_caches("b", bundle(100)) == 9000 - need
    with pytest.raises(NoRoomError, match="found 9,000 left"):
        shared.for_caches("b", bundle(1000))
    # The stacks of adapters are not part of what an engine may take.
    monkeypatch.setattr(served_loading, "free_bytes", lambda device: 10_000)
    stacks = ('["q.A","h.0"] float32[2,1,4,25]', '["q.B","h.0"] float32[2,1,4,25]')
    shared = ModelMemory(9000, 0)
    one, other = StandInEngine(shared, 5000, stacks=stacks), StandInEngine(shared, 3000)
    assert (one.use(), other.use()) == (True, True)
    # 1,600 bytes are the adapters' of the one that sleeps.
    assert awake(one, other) == [False, True]
    assert shared.for_caches("b", bundle(100)) == 9000 - 1600 - need
    message = "4,110 bytes for its programs and adapters, found 4,100 left"
    with pytest.raises(NoRoomError, match=message):
        ModelMemory(4100, 0).for_caches("b", bundle(100, stacks))


@pytest.mark.parametrize("limit", [None, 9000])
def test_a_model_that_cannot_wake_names_the_others_that_could_sleep(monkeypatch, limit):
    monkeypatch.setattr(served_loading, "wake_bytes", lambda device: 6000)
    shared = ModelMemory(limit, 0)
    one, other = StandInEngine(shared, 5000), StandInEngine(shared, 4500, growth=2000)
    assert other.use()
    one.sleep()
    other.live = 1
    left = "4,000" if limit is None else "4,500"
    text = f"one: expected 5,000 bytes for its caches and programs, found {left} left"
    with pytest.raises(NoRoomError, match=text) as caught:
        shared.check_wake("one", bundle(1), one.sleeper)
    expected = "these could sleep: of-4500 (4,500 bytes, once its requests have ended)"
    assert str(caught.value.hint).endswith(expected)
    other.live = 0
    if limit is None:  # nobody sleeps by itself
        assert other.sleep()
    shared.check_wake("one", bundle(1), one.sleeper)
    shared.check_wake("other", bundle(1), other.sleeper)  # awake, or there is room
