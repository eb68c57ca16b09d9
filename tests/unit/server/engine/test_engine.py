"""One engine for many callers: each gets the tokens that it would get alone, whatever the others do."""

import asyncio
import collections
import contextlib
import gc
import re
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from functools import partial, partialmethod
from types import SimpleNamespace

import numpy as np
import pytest
from tests.decoders import VOCABULARY
from tests.waiting import wait_for

from prejit.runtime import load
from prejit.runtime.errors import (
    ClosedError,
    ContextError,
    DeadlineError,
    QueueFullError,
    RejectError,
    UsageError,
)
from prejit.runtime.generation.continuous_batch import Batch
from prejit.runtime.generation.kv_cache import cache_bytes
from prejit.runtime.generation.options import Request
from prejit.runtime.generation.prefixes import PrefixCache
from prejit.server.engine.engine import Engine
from prejit.server.engine.fair_queue import Limits
from prejit.server.engine.memory import plan_caches

LONG = [number % VOCABULARY for number in range(3, 40)]
FEW = {"max_new_tokens": 4, "stop_token_ids": ()}
MIB = 1 << 20


@pytest.fixture(scope="module")
def bundle(wide_dir):
    return load(wide_dir, on_mismatch="error")


@pytest.fixture
def made(bundle):
    with contextlib.ExitStack() as stack:
        yield lambda **how: stack.enter_context(contextlib.closing(Engine(bundle, **how)))


@pytest.fixture
def engine(made):
    return made(slots=4, queue=64)


def options_of(number):
    """Different requests: greedy and not, short and long, with logprobs, penalties, drafts and masks."""
    allowed = np.arange(VOCABULARY) % 3 != 0
    return {
        **{"max_new_tokens": 3 + number * 5 % 29, "stop_token_ids": ()},
        **({"temperature": 0.9, "seed": number, "top_k": 20} if number % 2 else {}),
        **({"logprobs": 2} if number % 3 == 0 else {}),
        **({"repetition_penalty": 1.3, "frequency_penalty": 0.5} if number % 4 == 1 else {}),
        **({"token_mask": lambda _: allowed} if number % 5 == 2 else {}),
        **({"prompt_lookup": True} if number % 7 == 3 else {}),
    }


def prompt_of(number):
    return [(number * 7 + place) % VOCABULARY for place in range(1 + number * 5 % 31)]


@pytest.fixture(scope="module")
def alone(bundle):
    return [bundle.generate(prompt_of(n), **options_of(n)) for n in range(24)]


def same(found, expected):
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    assert (found.logprobs is None) == (expected.logprobs is None)
    for mine, theirs in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert mine.token_id == theirs.token_id
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_threads_and_tasks_get_what_each_would_get_alone(engine, alone):
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda n: engine.generate(prompt_of(n), **options_of(n)), range(24)))
    for each in zip(found, alone, strict=True):
        same(*each)
    metrics = engine.metrics()
    assert metrics.finished["length"] == sum(one.finish_reason == "length" for one in alone)
    assert metrics.generation_tokens == sum(len(one.token_ids) for one in alone)
    assert metrics.prompt_tokens == sum(len(prompt_of(n)) for n in range(24))
    assert (metrics.running, metrics.waiting) == (0, 0)
    assert metrics.requests[0].runs < metrics.generation_tokens  # they shared steps

    async def read(number):
        return [piece async for piece in engine.stream(prompt_of(number), **options_of(number))]

    async def all_of_them():
        future = asyncio.wrap_future(engine.submit(prompt_of(4), **options_of(4)))
        found = await asyncio.gather(*(read(number) for number in range(24)))
        same(await future, alone[4])
        return found

    for pieces, expected in zip(asyncio.run(all_of_them()), alone, strict=True):
        ids = tuple(piece.token_id for piece in pieces if piece.token_id is not None)
        assert ids == expected.token_ids
        assert pieces[-1].finish_reason == expected.finish_reason
        assert pieces[-1].stats.new_tokens == len(ids)
        assert all(piece.finish_reason is None for piece in pieces[:-1])


def test_requests_that_come_and_go_move_between_batches(bundle, made, monkeypatch):
    """One request, then more than fit into two slots, then one again: 1, 4 and 1 rows."""
    monkeypatch.setattr("prejit.server.engine.generation_loop._SHRINK_SECONDS", 0.0)
    monkeypatch.setattr("prejit.runtime.generation.decode.CALL_SECONDS", 0.0)
    sizes, resize = [], Batch.resize
    monkeypatch.setattr(Batch, "resize", lambda self, n: sizes.append(n) or resize(self, n))
    engine = made(slots=4)
    bundle.prepare()
    first = engine.stream([5], max_new_tokens=72, stop_token_ids=())
    pieces = [next(first) for _ in range(3)]
    others = [engine.submit(prompt_of(n), **FEW, seed=n) for n in range(3)]
    for number, future in enumerate(others):
        same(future.result(60), bundle.generate(prompt_of(number), **FEW, seed=number))
    pieces += list(first)
    expected = bundle.generate([5], max_new_tokens=72, stop_token_ids=())
    assert tuple(piece.token_id for piece in pieces) == expected.token_ids
    assert 4 in sizes
    assert sizes[-1] < 4


def reused(engine, last, **options):
    return engine.generate([*LONG[:30], last], max_new_tokens=2, **options).stats.reused_tokens


@pytest.mark.parametrize(
    ("mine", "theirs", "shares", "expected"),
    [
        ({"client": "a"}, {"client": "b"}, False, 0),
        ({"client": "a"}, {"client": "b"}, True, 30),
        ({"cache_salt": "a"}, {}, True, 0),
        ({"client": "a", "cache_salt": "b"}, {"client": "b", "cache_salt": "a"}, False, 0),
    ],
)
def test_a_prompt_cannot_be_guessed_by_what_is_reused(bundle, made, mine, theirs, shares, expected):
    bundle.prepare()
    engine = made(slots=4, prefix_memory=4 * MIB, share_prefixes=shares)
    prompt = {"max_new_tokens": 30, "stop_token_ids": ()}
    with engine.stream([*LONG[:30], 1], **prompt, **mine) as running:
        next(running)
        assert reused(engine, 2, **theirs) == expected  # of a slot that runs
        list(running)
    assert reused(engine, 3, **mine) == 30
    assert reused(engine, 4, **theirs) >= expected
    for number in range(8):  # other texts take all slots
        engine.generate([number] * 20, max_new_tokens=2, client="c")
    assert reused(engine, 5, **mine) == 30  # of what is kept
    engine = made(slots=4, prefix_memory=4 * MIB, share_prefixes=shares)
    reused(engine, 1, **mine)
    assert reused(engine, 2, **theirs) == expected  # of a slot that is free


@pytest.mark.parametrize("shares", [False, True])
def test_prompts_of_two_clients_that_enter_together_share_nothing(bundle, shares):
    batch = Batch(bundle.decoder, 2, prefixes=PrefixCache(bundle.decoder, 4 * MIB))
    spaces = enumerate([("a",), ("a",) if shares else ("b",)])
    batch.insert(*(Request([*LONG[:30], n], max_new_tokens=2, namespace=at) for n, at in spaces))
    assert max(token.usage.reused_tokens for token in batch.step()) == 30 * shares


@pytest.mark.parametrize(
    ("client", "memory", "common", "waits"),
    [("a", MIB, 30, True), ("b", MIB, 30, False), ("a", 0, 30, False), ("a", MIB, 12, False)],
)
def test_a_prompt_waits_for_one_that_begins_alike(bundle, made, client, memory, common, waits):
    batch = Batch(bundle.decoder, 4, prefixes=PrefixCache(bundle.decoder, memory))
    batch.insert(Request([3], max_new_tokens=30))
    batch.begin(Request([*LONG[:30], 1], max_new_tokens=2, namespace=("a",)))
    other = Request([*LONG[:common], 2, 3], max_new_tokens=2, namespace=(client,))
    assert batch.awaits(other) == waits
    while batch.entering:
        batch.step(prefill_tokens=8)
    assert not batch.awaits(other)
    engine = made(slots=4, prefix_memory=4 * MIB)
    burst = [engine.submit([*LONG[:30], last], max_new_tokens=9) for last in range(4)]
    assert sorted(each.result(60).stats.reused_tokens for each in burst) == [0, 30, 30, 30]


@pytest.mark.parametrize("pauses", [True, False])
def test_two_conversations_in_turns_compute_only_what_is_new(bundle, made, monkeypatch, pauses):
    """Each takes the slot of the other one, whose answer was kept in a pause, or is kept then."""
    kept, original = threading.Semaphore(0), Batch.keep
    monkeypatch.setattr(Batch, "keep", lambda self: (original(self), kept.release()))
    bundle.prepare()
    engine = made(slots=1, prefix_memory=4 * MIB)
    texts = [LONG[:20], LONG[10:30]]
    for turn in range(3):
        for number, text in enumerate(texts):
            found = engine.generate(text, **FEW)
            assert found.token_ids == bundle.generate(text, **FEW).token_ids
            # All but what came since; the last token of the answer is in no cache.
            assert turn == 0 or found.stats.reused_tokens == len(text) - 3
            texts[number] = [*text, *found.token_ids, 3, 4]
            assert not pauses or kept.acquire(timeout=60)


def test_the_texts_of_a_client_do_not_wait_for_the_burst_of_another(bundle, made, monkeypatch):
    bundle.prepare()
    most, original = {}, Batch.step

    def step(self, meanwhile, positions):
        clients = {ticket.client for ticket in engine._loop._running.values() if ticket.answered}
        if "few" in clients:
            most["beside few"] = max(most.get("beside few", 0), positions)
        elif clients:
            most["alone"] = max(most.get("alone", 0), positions)
        return original(self, meanwhile, positions)

    monkeypatch.setattr(Batch, "step", step)
    engine = made(slots=4, prefill_tokens=3)
    for client, length in (("few", 60), ("many", 6)):
        with engine.stream(prompt_of(3), max_new_tokens=length, client=client) as text:
            next(text)
            prompts = map(prompt_of, range(3, 11))
            wait([engine.submit(each, max_new_tokens=2, client="many") for each in prompts], 60)
    assert most["beside few"] == 3
    assert most["alone"] > 3


@pytest.fixture
def one_slot(made):
    return made(slots=1, queue=3)


def occupy(engine, **options):
    """A stream that holds a slot for long, and has begun."""
    stream = engine.stream([1], max_new_tokens=70, stop_token_ids=(), **options)
    next(stream)
    return stream


@pytest.fixture
def slow(monkeypatch):
    """Beginnings and steps of a token take at least 20 ms, so that a test can do something meanwhile."""
    found = SimpleNamespace(seconds=0.02)

    def slowed(original, *arguments):
        time.sleep(found.seconds)
        return original(*arguments)

    for each in (Batch.begin, Batch.step):
        monkeypatch.setattr(Batch, each.__name__, partialmethod(partial(slowed, each)))
    monkeypatch.setattr("prejit.runtime.generation.decode.CALL_SECONDS", 0.0)
    return found


@pytest.mark.usefixtures("slow")
def test_a_client_that_floods_makes_room_and_priorities_and_clients_decide_who_is_next(one_slot):
    with occupy(one_slot, client="flood"):
        flood = [one_slot.submit([2], max_new_tokens=1, client="flood") for _ in range(3)]
        other = one_slot.submit([2], max_new_tokens=1, client="other")
        with pytest.raises(QueueFullError, match="fewer than 3 requests"):
            flood[2].result(60)
        assert one_slot.metrics().waiting == 3
        with pytest.raises(QueueFullError, match="expected fewer than 3 requests") as error:
            one_slot.submit([2], client="flood")
        assert 0 < error.value.retry_after < 60
        assert re.match(r"try again after .* seconds; .*--queue of a server", str(error.value.hint))
    for each in (*flood[:2], other):
        assert each.result(60).finish_reason is not None
    assert one_slot.metrics().finished["refused"] == 2
    finished, futures = [], []
    with occupy(one_slot, client="a"):
        for name, client, priority in (("a", "a", 0), ("b", "b", 0), ("urgent", "a", -1)):
            futures.append(one_slot.submit([2], max_new_tokens=2, client=client, priority=priority))
            futures[-1].add_done_callback(lambda _, name=name: finished.append(name))
    wait(futures, 60)
    assert finished == ["urgent", "b", "a"]


def test_a_client_has_no_more_than_its_limits(engine, slow):
    served = []
    given = {"client": "a", "limits": Limits(waiting=2, running=1, on_tokens=served.append)}
    with occupy(engine, client="a", limits=Limits(waiting=2, running=1)):
        few = {"max_new_tokens": 2, "stop_token_ids": (), **given}
        waiting = [engine.submit([2, 3], **few) for _ in range(2)]
        with pytest.raises(QueueFullError, match="fewer than 2 requests of this client") as error:
            engine.submit([2], **given)
        assert "--queue" not in str(error.value.hint)  # a longer one would not help
        engine.generate([4], max_new_tokens=3, client="b")  # other slots are free
        assert not any(each.done() for each in waiting)
        assert engine.metrics().waiting == 2
    for each in waiting:
        each.result(60)
    assert sum(served) == 8
    with pytest.raises(UsageError, match="running: expected 1 or more, found 0"):
        Limits(running=0)


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(one_slot, slow):
    one_slot.generate([1], max_new_tokens=2)  # the programs are loaded
    running = occupy(one_slot, timeout=2)
    slow.seconds = 0.1  # its 70 tokens take longer than its deadline lets it
    waiting = one_slot.submit([2], max_new_tokens=1, timeout=0.05)
    with pytest.raises(DeadlineError, match="got no slot"):
        waiting.result(60)
    with pytest.raises(TimeoutError, match=r"this request had \d+ tokens"):
        list(running)
    slow.seconds = 0.0
    assert one_slot.generate([2], max_new_tokens=2, stop_token_ids=()).finish_reason == "length"
    assert one_slot.metrics().finished["deadline"] == 2


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("how", ["close", "drop", "task"])
def test_a_stream_that_ends_early_frees_its_slot(one_slot, how):
    stream = one_slot.stream([1], max_new_tokens=70, stop_token_ids=())

    async def stop(pieces):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                _ = [piece async for piece in pieces]

    if how == "task":
        asyncio.run(stop(stream))
    else:
        next(stream)
    if how == "close":
        stream.close()
        assert list(stream) == []
    del stream
    gc.collect()
    assert one_slot.generate([2], max_new_tokens=1, timeout=60).finish_reason is not None
    assert one_slot.metrics().finished["cancelled"] == 1


@pytest.mark.usefixtures("slow")
def test_futures_are_cancelled_while_they_wait_and_while_they_run(one_slot):
    running, waiting = (one_slot.submit([1], max_new_tokens=70) for _ in range(2))
    wait_for(lambda: one_slot.metrics().running)
    assert (waiting.cancel(), running.cancel()) == (True, True)
    with pytest.raises(CancelledError):
        running.result(1)
    done = one_slot.submit([1], max_new_tokens=1)
    done.result(5)
    assert not done.cancel()
    assert one_slot.metrics().finished["cancelled"] == 2


def test_a_mask_that_fails_ends_its_own_request(engine, alone):
    def broken(ids):
        if len(ids) > 2:
            raise ZeroDivisionError("a caller's mistake")
        return None

    shapes = engine.submit([1], max_new_tokens=9, token_mask=lambda _: np.ones(3, bool))
    failing = engine.submit([1], max_new_tokens=9, stop_token_ids=(), token_mask=broken)
    others = [engine.submit(prompt_of(n), **options_of(n)) for n in range(6)]
    with pytest.raises(ZeroDivisionError, match="a caller's mistake"):
        failing.result(60)
    with pytest.raises(UsageError, match=r"token_mask: expected bool\[48\].* found bool\[3\]"):
        shapes.result(60)
    for future, expected in zip(others, alone, strict=False):
        same(future.result(60), expected)


def test_mistakes_are_refused_before_they_wait(engine, bundle_dir):
    for options, message in (
        *(({"prompt": [VOCABULARY]}, "prompt"), ({"priority": "high"}, "priority")),
        *(({"client": 3}, "client"), ({"timeout": 0}, "timeout: expected more than 0")),
        ({"colour": "red"}, "colour"),
    ):
        for ask in (engine.submit, engine.stream):
            with pytest.raises(UsageError, match=message):
                ask(**{"prompt": [1], **options})
    assert engine.metrics().waiting == 0
    with contextlib.closing(Engine(load(bundle_dir))) as without:
        with pytest.raises(UsageError, match="this bundle holds no decoder"):
            without.submit([1])
        assert without.drain(1)


@pytest.mark.parametrize(
    ("name", "error", "good_steps"),
    [("step", RejectError("a", "b"), 3), ("step", ValueError(), 0), ("begin", MemoryError(), 0)],
)
def test_what_fails_ends_what_runs_loses_no_token_of_before_and_the_engine_goes_on(
    engine, alone, monkeypatch, name, error, good_steps
):
    monkeypatch.setattr("prejit.runtime.generation.decode.CALL_SECONDS", 0.0)  # one token a step
    original, steps, tokens = getattr(Batch, name), [], []

    def fail(self, *arguments):
        if len(steps) == good_steps:
            monkeypatch.setattr(Batch, name, original)
            raise error
        steps.append(original(self, *arguments))
        return steps[-1]

    monkeypatch.setattr(Batch, name, fail)
    stream = (piece.token_id for piece in engine.stream([1], **FEW))
    with pytest.raises(type(error)):
        collections.deque(map(tokens.append, stream))
    assert tokens == [found[0].token_id for found in steps]
    same(engine.generate(prompt_of(2), **options_of(2)), alone[2])
    assert engine.metrics().finished["error"] == 1


@pytest.mark.parametrize("how", ["submit", "stream", "failed", "cancelled"])
def test_a_request_that_ended_is_freed_without_the_garbage_collector(engine, how):
    """Its grammar may have memory that the collector does not see."""

    class Mask:
        def __call__(self, ids):
            if how == "failed" and ids:
                raise ZeroDivisionError

    asked = {"max_new_tokens": 6, "stop_token_ids": (), "token_mask": Mask()}
    freed = weakref.ref(asked["token_mask"])
    gc.collect()
    gc.disable()
    try:
        if how == "stream":
            list(engine.stream([1], **asked))
        elif how == "cancelled":
            engine.submit([1], **asked).cancel()
        else:
            with contextlib.suppress(ZeroDivisionError):
                engine.submit([1], **asked).result(60)
        del asked
        engine.generate([2], max_new_tokens=1)  # the loop has dropped what ended before
        assert freed() is None
    finally:
        gc.enable()


def test_memory_is_bounded_before_a_request_and_a_small_one_has_a_shorter_context(bundle, made):
    plan = partial(plan_caches, bundle.decoder, 4)
    budgets = [1 << 40]
    for context, together in ((72, 2), (72, 1), (24, 2), (24, 1)):
        less = plan(budgets[-1], 0)
        assert (less.batch, less.context, less.together) == (4, context, together)
        budgets.append(less.peak_bytes - 1)
    for refused, message in (
        (lambda: plan(budgets[-1], 0), "memory: expected at least"),
        (lambda: plan(less.peak_bytes, 1), "prefixes"),
        (lambda: made(slots=5), "rows at once"),
        (lambda: made(slots=4, memory=100), "memory: expected at least"),
    ):
        with pytest.raises(UsageError, match=message):
            refused()
    # Prefixes take no more than the slots unless asked for.
    slots = cache_bytes(bundle.decoder.cache, 4, 72)
    plenty = plan(1 << 40, None)
    assert plenty.prefix_bytes == slots
    assert plan(plenty.peak_bytes - slots + 400, None).prefix_bytes == 100
    assert plan(1 << 40, 9 * slots).prefix_bytes == 9 * slots
    engine = made(slots=4, memory=budgets[2], prefix_memory=0)
    with pytest.raises(ContextError, match="at most 24 tokens, for which the engine has memory"):
        engine.submit(LONG)
    found = engine.generate([1, 2, 3], stop_token_ids=())
    assert found.finish_reason == "context"
    assert len(found.token_ids) == 24 - 3 + 1
    assert engine.metrics().cache_budget_bytes == budgets[2]


@pytest.mark.usefixtures("slow")
def test_draining_finishes_what_is_there_until_it_is_undone_and_closing_ends_it(made):
    engine = made(slots=1)
    running = engine.submit([1], max_new_tokens=20, stop_token_ids=())
    waiting = engine.submit([1], max_new_tokens=2, stop_token_ids=())
    assert not engine.drain(0.01)
    with pytest.raises(ClosedError, match="draining"):
        engine.submit([1])
    wait_for(lambda: engine.drain(0.0))
    assert [len(each.result(0).token_ids) for each in (running, waiting)] == [20, 2]
    engine.undrain()
    running = engine.submit([1], max_new_tokens=200, stop_token_ids=())
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(engine.drain)
        wait_for(lambda: engine._loop._refuses)
        engine.undrain()  # ends the wait, too
        waits.result(60)
    running.cancel()
    assert len(engine.generate([1], max_new_tokens=2, stop_token_ids=()).token_ids) == 2
    running, waiting = occupy(engine), engine.submit([1], max_new_tokens=1)
    engine.close()
    with pytest.raises(ClosedError, match="closed before the request was finished"):
        list(running)
    for refused in (lambda: waiting.result(1), engine.undrain):
        with pytest.raises(ClosedError):
            refused()
    with pytest.raises(ClosedError, match="this engine is closed"):
        engine.submit([1])
