"""The order of verifying, who waits for what, and what happens after a failure."""

import itertools
import random
import threading
import time

import pytest
from tests.threads import in_threads

from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.blob_hashing import SMALL_BYTES, HashingVerification, Job

LARGE = SMALL_BYTES


def jobs(*names, run, size=LARGE):
    return [
        Job(name, part * size, (part + 1) * size, lambda at=f"{name}{part}": run(at) or 0.0)
        for name in names
        for part in range(3)
    ]


def test_one_thread_runs_all_jobs_and_wakes_who_waits():
    ran, finished = list[str](), threading.Event()
    verification = HashingVerification(
        jobs("a", "b", run=ran.append), threads=1, finished=finished.set
    )
    assert finished.wait(10)
    assert ran == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert verification.is_finished
    verification.finish()
    verification.wait("nothing of that name")
    begun, fail = threading.Event(), threading.Event()

    def run(at):
        begun.set()
        fail.wait(10)
        raise RejectError("/b", "damaged")

    verification = HashingVerification(jobs("a", run=run)[:1], threads=1)
    assert begun.wait(10)
    threading.Timer(0.05, fail.set).start()
    with pytest.raises(RejectError):
        verification.wait("a")


def test_whoever_waits_runs_what_it_needs_and_a_load_small_jobs():
    ran = list[str]()
    verification = HashingVerification(jobs("a", "b", run=ran.append))
    for name, start, end, now in (
        *(("b", LARGE, LARGE + 1, "b1"), ("b", LARGE - 1, LARGE + 1, "b1 b0")),
        ("b", 2 * LARGE, 2 * LARGE, "b1 b0"),  # no byte is needed
        ("a", 2 * LARGE, None, "b1 b0 a2"),
    ):
        verification.wait(name, start, end)
        assert ran == now.split()
    assert not verification.is_finished
    verification.finish()
    assert ran == ["b1", "b0", "a2", "a0", "a1", "b2"]
    assert verification.is_finished
    ran = list[str]()
    small = jobs("small", run=ran.append, size=SMALL_BYTES // 4)
    tail = [Job("large", 3 * LARGE, 3 * LARGE + 1, lambda: ran.append("tail") or 0.0)]
    verification = HashingVerification([*jobs("large", run=ran.append), *tail, *small])
    verification.wait_for_small()
    assert ran == ["small0", "small1", "small2"]


@pytest.mark.parametrize(
    ("threads", "error"),
    [(0, RejectError("/b", "damaged")), (1, StoreError("EIO")), (3, KeyError("bug"))],
)
def test_a_failure_is_raised_to_everyone_and_ends_the_work(threads, error):
    ran, finished = list[str](), threading.Event()

    def run(at):
        ran.append(at)
        if at == "a1":
            raise error

    verification = HashingVerification(
        jobs("a", "b", run=run), threads=threads, finished=finished.set
    )
    for ask in (
        *(verification.finish, verification.check, verification.finish),
        *(verification.wait_for_small, lambda: verification.wait("a")),
        lambda: verification.wait("b"),
    ):
        with pytest.raises(type(error)):
            ask()
    assert not verification.is_finished
    assert not finished.is_set()
    assert len(ran) <= 2 + threads, "threads went on after the failure"


def test_many_threads_that_wait_get_verified_bytes_alone():
    for threads in (0, 1, 2) * 4:
        done = set[str]()

        def run(at, done=done):
            time.sleep(random.random() * 1e-3)
            done.add(at)

        verification = HashingVerification(jobs("a", "b", "c", run=run), threads=threads)

        def wait(seed, verification=verification, done=done):
            for name, part in random.Random(seed).sample([*itertools.product("abc", range(3))], 4):
                verification.wait(name, part * LARGE, (part + 1) * LARGE)
                assert f"{name}{part}" in done

        in_threads(6, wait)
        verification.finish()
        assert len(done) == 9
