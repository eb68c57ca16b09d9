"""Lanes: jobs of several callers share runs, and what goes wrong with one of them stays with its caller."""

import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from tests.threads import in_threads
from tests.waiting import wait_for

from prejit.runtime import ClosedError, DeadlineError, QueueFullError, UsageError
from prejit.server.engine import microbatch
from prejit.server.engine.fair_queue import NO_LIMITS, Limits
from prejit.server.engine.microbatch import Lane
from prejit.server.engine.request_recorder import Cost, RequestRecorder
from prejit.server.engine.shared_jobs import Ran, SharedJob, deadline_after

MOST, PATIENCE = 8, 30.0


class Program:
    """Doubles rows, of which -1 cannot be doubled; records each run, waits for `go`, takes some seconds."""

    def __init__(self):
        self.runs = []
        self.rows = set()
        self.began = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()
        self.seconds = 0.0

    def __call__(self, shares):
        self.began.release()
        assert self.go.wait(PATIENCE)
        time.sleep(self.seconds)
        rows = [share.job.payload[share.start : share.end] for share in shares]
        self.runs.append([len(each) for each in rows])
        self.rows.update(*(each.tolist() for each in rows))
        if any((each == -1).any() for each in rows):
            raise ValueError("no row may be -1")
        return Ran([each * 2 for each in rows], Cost(MOST - sum(map(len, rows))))

    def hold(self, lane):
        """Begin a run that does not end before `go` is set."""
        self.go.clear()
        holding = submit(lane, [0])
        assert self.began.acquire(timeout=PATIENCE)
        return holding


def job(rows, timeout=None, key=None):
    return SharedJob(np.array(rows), len(rows), MOST, key, np.concatenate, deadline_after(timeout))


def lane_of(run, queue=16):
    return Lane("double", run, queue=queue, recorder=RequestRecorder("call", "double", queue))


def metrics(lane):
    return lane._recorder.snapshot()


def submit(lane, rows, client="", limits=NO_LIMITS, **how):
    made = job(rows, **how)
    made.client, made.limits = client, limits
    lane.submit(made)
    return made.future


@pytest.fixture
def program():
    return Program()


@pytest.fixture
def lane(program):
    lane = lane_of(program)
    yield lane
    program.go.set()
    lane.close()


def test_a_call_of_more_rows_than_the_bucket_takes_turns_and_ends_with_an_error(lane, program):
    holding = program.hold(lane)
    long, short = submit(lane, range(20)), submit(lane, [100, 200])
    program.go.set()
    assert short.result(PATIENCE).tolist() == [200, 400]
    assert long.result(PATIENCE).tolist() == [2 * row for row in range(20)]
    assert holding.result(PATIENCE).tolist() == [0]
    with pytest.raises(ValueError, match="no row"):
        submit(lane, [-1] * 30).result(PATIENCE)
    assert submit(lane, [5]).result(PATIENCE).tolist() == [10]
    # The short call does not wait until all of the long one has run.
    assert program.runs == [[1], [8], [2, 6], [6], [8], [1]]


def test_who_waits_gets_the_deadline_and_a_result_that_comes_later_is_none(lane, program):
    program.hold(lane)
    late = submit(lane, [1], timeout=0.01)
    more = []
    late.add_done_callback(lambda _: more.append(submit(lane, [7])))  # a callback may submit
    time.sleep(0.02)
    program.go.set()
    with pytest.raises(DeadlineError, match="expected a result within the timeout"):
        late.result(PATIENCE)
    assert more[0].result(PATIENCE).tolist() == [14]
    assert program.runs == [[1], [1]], "the late one does not run"
    assert program.began.acquire(timeout=PATIENCE)
    program.go.clear()
    late = job([1], timeout=PATIENCE)
    lane.submit(late)
    assert program.began.acquire(timeout=PATIENCE)
    late.deadline = time.monotonic()
    program.go.set()
    with pytest.raises(DeadlineError):
        late.future.result(PATIENCE)
    program.go.clear()
    with pytest.raises(DeadlineError):
        lane.result(job([1], timeout=0.05))
    for timeout in (0, -1, float("nan"), "1", True):
        with pytest.raises(UsageError, match="timeout: expected"):
            deadline_after(timeout)


def test_who_floods_a_full_queue_gets_the_refusals_and_learns_how_long_to_wait(program):
    lane = lane_of(program, queue=4)
    program.hold(lane)
    flood = [submit(lane, [1], client="flood") for _ in range(4)]
    with pytest.raises(QueueFullError, match="at most 4 waiting calls") as caught:
        submit(lane, [1], client="flood")
    assert 0 < caught.value.retry_after < 60
    assert str(caught.value.hint).endswith("--queue of a server")
    other = submit(lane, [7], client="other")
    with pytest.raises(QueueFullError, match="at most 4 waiting calls"):
        flood[-1].result(PATIENCE)
    assert (metrics(lane).finished["refused"], metrics(lane).waiting) == (2, 4)
    assert flood[0].cancel()  # makes room
    late = submit(lane, [3], client="flood")
    program.go.set()
    assert other.result(PATIENCE).tolist() == [14]
    results = [each.result(PATIENCE).tolist() for each in (*flood[1:-1], late)]
    assert results == [[2], [2], [6]]
    lane.close()


@pytest.mark.parametrize(("patience", "is_gone"), [(1000 * PATIENCE, False), (0.1, True)])
def test_callers_who_shared_a_run_share_the_next_unless_some_are_gone(
    lane, program, monkeypatch, patience, is_gone
):
    def is_idle():
        with lane.alone(1) as ran:
            return ran is not None

    def submit_three():
        return [submit(lane, [number]) for number in range(3)]

    monkeypatch.setattr(microbatch, "_PATIENCE", patience)
    program.seconds = 0.01 if is_gone else 0.001
    program.hold(lane)
    together = submit_three()
    program.go.set()
    for future in together:
        future.result(PATIENCE)
    if is_gone:
        assert submit(lane, [3]).result(PATIENCE).tolist() == [6]
        wait_for(is_idle)  # the result comes just before the end of the run
    else:
        assert not is_idle()  # a call would run alone while the others wait
        for future in submit_three():
            future.result(PATIENCE)  # nobody else is expected
        assert submit(lane, range(MOST)).result(PATIENCE).tolist() == [*range(0, 2 * MOST, 2)]
        assert program.runs == [[1], [1] * 3, [1] * 3, [MOST]]


def test_calls_shorter_than_a_handover_do_not_wait_for_each_other(lane):
    def short():
        with lane.alone(1) as outer, lane.alone(1) as inner:
            return outer is not None and inner is not None

    assert not short()  # the duration is not known yet
    wait_for(short)
    with lane.alone(1) as ran:
        assert ran is not None
        assert submit(lane, [4]).result(PATIENCE).tolist() == [8]  # nor does a future wait
        assert not lane.drain(deadline_after(0.01))
    assert lane.drain(deadline_after(PATIENCE))


def test_a_caller_runs_an_idle_program_itself_and_leaves_it_idle_after_an_error(lane):
    with pytest.raises(KeyError), lane.alone(1):
        raise KeyError
    with lane.alone(3) as ran:
        assert ran is not None
        ran.cost = Cost(5)
        with lane.alone(1) as other:  # it is busy now
            assert other is None
        waiting = submit(lane, [4])
        time.sleep(0.01)
        assert not waiting.done()
    assert waiting.result(PATIENCE).tolist() == [8]
    found = metrics(lane)
    assert (found.succeeded, found.rows, found.runs, found.padded_rows) == (2, 4, 2, 5 + 7)
    assert found.finished["error"] == 1


def test_close_fails_what_waits_and_ends_the_thread(lane, program):
    running = program.hold(lane)
    waiting = submit(lane, [1])
    closing = threading.Thread(target=lane.close)
    closing.start()
    with pytest.raises(ClosedError, match="found one that is closed"):
        waiting.result(PATIENCE)
    program.seconds = 0.1
    program.go.set()
    closing.join(PATIENCE)
    assert running.result(0).tolist() == [0]  # it waited for the end of the run
    for refused in (lambda: submit(lane, [1]), lane.alone(1).__enter__):
        with pytest.raises(ClosedError):
            refused()
    lane.close()
    assert not any(each.name == "prejit-microbatch" for each in threading.enumerate())


def test_sixteen_threads_get_their_own_rows(lane, program):
    def call(number):
        for turn in range(50):
            rows = np.arange(turn % 11 + 1) + 1000 * number + turn
            assert lane.result(job(rows)).tolist() == (2 * rows).tolist(), (number, turn)

    in_threads(16, call)
    found = metrics(lane)
    rows = sum(turn % 11 + 1 for turn in range(50))
    assert (found.succeeded, found.rows) == (16 * 50, 16 * rows)
    assert found.runs == len(program.runs)
    assert found.padded_rows == MOST * found.runs - found.rows
    assert (found.running, found.waiting) == (0, 0)


def test_every_end_of_a_call_is_counted_once(program):
    lane = lane_of(program, queue=5)
    running = program.hold(lane)
    cancelled, wrong, good = submit(lane, [1]), submit(lane, [-1]), submit(lane, [3])
    late = job([2], timeout=PATIENCE)
    lane.submit(late)
    assert (metrics(lane).running, metrics(lane).waiting) == (1, 4)
    assert cancelled.cancel()
    assert running.cancel()
    late.deadline = time.monotonic()
    submit(lane, [4]).set_exception(DeadlineError("late"))  # the server ends the wait of its client
    with pytest.raises(QueueFullError):
        [submit(lane, [5]) for _ in range(9)]
    program.go.set()
    assert good.result(PATIENCE).tolist() == [6]
    ended = ((DeadlineError, late.future), (ValueError, wrong), (CancelledError, cancelled))
    for error, future in ended:
        with pytest.raises(error):
            future.result(PATIENCE)
    assert lane.drain(deadline_after(PATIENCE))
    with pytest.raises(ClosedError):
        submit(lane, [9])
    assert not program.rows & {1, 2, 4}, "what was cancelled or late did not run"
    found = metrics(lane)
    assert (found.running, found.waiting) == (0, 0)
    ends = {reason: count for reason, count in found.finished.items() if count}
    assert ends == {"done": ends["done"], "cancelled": 2, "deadline": 2, "error": 1, "refused": 2}
    assert found.whole_seconds.count == found.run_seconds.count == ends["done"]
    lane.close()


def test_a_client_has_no_more_calls_than_it_may(lane, program):
    program.hold(lane)
    limits = Limits(waiting=3, running=1)
    futures = [submit(lane, [number], client="few", limits=limits) for number in range(3)]
    with pytest.raises(QueueFullError, match="at most 3 waiting calls of this client"):
        submit(lane, [9], client="few", limits=limits)
    others = [submit(lane, [number], client="other") for number in range(3)]
    program.go.set()
    assert [int(future.result(PATIENCE)[0]) for future in futures + others] == 2 * [0, 2, 4]
    assert sorted(program.runs, key=len) == [[1], [1], [1], [1] * 4]
    # A place is free again when a call was cancelled.
    program.hold(lane)
    waiting = [submit(lane, [1], client="few", limits=limits) for _ in range(3)]
    waiting[0].cancel()
    submit(lane, [1], client="few", limits=limits)
    program.go.set()
