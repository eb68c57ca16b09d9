"""Rows of several callers in one run of a program: a queue, and a thread that takes what waits.

A call that finds the program idle runs at once. While a program runs, other calls collect, and the next run
takes as many of their rows as fit. So a lone caller never waits, and many callers share runs. Where that
saves no time, because a run is short or each row costs as much as the first, callers run it side by side.
Rows that wait run in fair shares between clients.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, final

from prejit.runtime.errors import ClosedError, DeadlineError, QueueFullError, UsageError
from prejit.server.engine.engine_metrics import GOOD_REASONS
from prejit.server.engine.fair_queue import LONGER_QUEUE, FairQueue
from prejit.server.engine.request_recorder import ONE_RUN, Cost, RequestRecorder
from prejit.server.engine.shared_jobs import Ran, Share, SharedJob, overdue, reason_of

_P = TypeVar("_P")

_FIRST_GUESS_SECONDS = 0.1
"""The duration of a run before one was measured, for `QueueFullError.retry_after`."""
_WEIGHT_OF_LAST = 0.2
"""Share of the last run in the mean duration of a run."""
_HAND_OVER_SECONDS = 5e-5
"""The time to hand a call over to another thread. A run that is shorter is not worth sharing."""
_LEAST_SAVING = 0.1
"""Callers share runs if a row then costs less by at least this share."""
_TRIED_RUNS = 8
"""How many runs of half the largest bucket or more decide whether sharing saves time."""
_PATIENCE = 0.1
"""How long callers who shared a run may take to come again, as a share of the shortest run. Without it the
first of them would run alone each time, while the others wait for it."""


@dataclass(slots=True)
class _Costs:
    """The least durations of runs so far. Others have waited for the CPU or for a compile.

    Attributes:
        run: seconds of a run.
        row: seconds of a row in a run by its caller.
        shared_row: seconds of a row in a shared run of half the largest bucket or more, with its handover.
        tried: how many runs were such ones.
    """

    run: float = _FIRST_GUESS_SECONDS
    row: float = math.inf
    shared_row: float = math.inf
    tried: int = 0

    def take(self, seconds: float, rows: int) -> None:
        """Add a run by its caller."""
        self.run = min(self.run, seconds)
        if rows:
            self.row = min(self.row, seconds / rows)

    def take_shared(self, seconds: float, calls: int, rows: int, most: int) -> None:
        """Add a run for several calls."""
        self.run = min(self.run, seconds)
        if calls > 1 and 2 * rows >= most:
            self.tried += 1
            self.shared_row = min(self.shared_row, (seconds + calls * _HAND_OVER_SECONDS) / rows)

    def sharing_saves(self) -> bool:
        """Return whether callers should wait for a run that they share."""
        if self.run <= _HAND_OVER_SECONDS:
            return False
        return self.tried < _TRIED_RUNS or self.shared_row < (1 - _LEAST_SAVING) * self.row


class _Company(NamedTuple):
    """The callers who shared a run, and will probably come again.

    Attributes:
        calls: how many.
        until: when the next run begins without them, by time.monotonic.
    """

    calls: int
    until: float


@final
class Lane(Generic[_P]):
    """One program's queue, and the thread that runs it. Safe to use from many threads.

    The thread starts with the first job that it has to run and ends with `close`.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Sequence[Share[_P]]], Ran],
        *,
        queue: int,
        recorder: RequestRecorder,
        compiled: Callable[[], int] = lambda: 0,
        ended: Callable[[Any], str] = lambda result: "done",
    ) -> None:
        """Make a lane without a thread.

        Args:
            name: of the program, for errors.
            run: runs the shares of one run, whose jobs have equal keys.
            queue: the most jobs that may wait.
            recorder: counts the jobs and the runs.
            compiled: returns how many programs were compiled here so far.
            ended: returns the reason of the end of a job with this result, for metrics.
        """
        self.name = name
        self._run = run
        self._queue = queue
        self._recorder = recorder
        self._compiled = compiled
        self._ended = ended
        self._waiting: FairQueue[SharedJob[_P]] = FairQueue()
        self._thread: threading.Thread | None = None
        self._running = 0
        self._busy_since = 0.0
        self._company = _Company(0, 0.0)
        self._is_draining = self._is_closed = False
        self._seconds = _FIRST_GUESS_SECONDS
        self._costs = _Costs()
        # Entering the lock itself is quicker than entering the condition, which is Python's.
        self._lock = recorder.lock
        self._changed = threading.Condition(self._lock)

    # ------------------------------------------------------------------ callers

    def submit(self, job: SharedJob[_P]) -> None:
        """Add a job to the queue.

        If the queue is full, the newest job of the client with the most fails in its place.

        Raises:
            QueueFullError: too many jobs wait, and no client has more of them than this one; or too many of
                this client.
            ClosedError: the lane is closed or draining.
        """
        with self._changed:
            if self._is_draining:
                self._recorder.refused()
                raise self._closed()
            most, dropped = job.limits.waiting, None
            if most is not None or len(self._waiting) >= self._queue:
                self._drop()
            if most is not None and self._waiting.count(job.client) >= most:
                self._recorder.refused()
                raise self._full(f"{most} waiting calls of this client, found that many")
            if len(self._waiting) >= self._queue:
                full = self._full(
                    f"{self._queue} waiting calls, found the queue full", LONGER_QUEUE
                )
                if (dropped := self._waiting.drop(job.client)) is None:
                    self._recorder.refused()
                    raise full
            if self._thread is None:
                # A daemon that `close` joins at exit: it waits for jobs as long as the process lives.
                thread = threading.Thread(target=self._work, name="prejit-microbatch", daemon=True)
                thread.start()
                self._thread = thread
                atexit.register(self.close)
            self._put(job)
            self._recorder.submitted()
            job.future.add_done_callback(lambda future: self._count_end(job, _reason(future)))
            # The end of a run wakes the thread, too. To wake it for each job would cost more than the job.
            if self._may_run() and (len(self._waiting) == 1 or not self._patience()):
                self._changed.notify_all()
        if dropped is not None:
            dropped.fail(full)

    def result(self, job: SharedJob[_P]) -> Any:
        """Submit a job and wait for its result. It is cancelled if the caller is interrupted.

        Raises:
            DeadlineError: its deadline has passed.
            QueueFullError, ClosedError: as `submit`.
        """
        self.submit(job)
        left = None if job.deadline is None else max(0.0, job.deadline - time.monotonic())
        try:
            return job.future.result(left)
        except DeadlineError:
            raise
        except TimeoutError:
            late = overdue()
            job.fail(late)
            raise late from None
        except BaseException:
            job.future.cancel()  # ctrl-C; where the job itself failed this does nothing
            raise

    def alone(self, rows: int) -> Alone:
        """Let the caller's own thread run the program, if it is idle or sharing saves nothing.

        with lane.alone(rows) as ran:
            if ran is not None:
                return ...  # the program ran; ran.cost and ran.reason may be set before
        """
        return Alone(self, rows)

    def begin_alone(self, ran: Alone) -> bool:
        """Begin a run in the caller's thread; return whether it may run now. See `alone`.

        Raises:
            ClosedError: the lane is closed or draining.
        """
        with self._lock:
            if self._is_draining:
                self._recorder.refused()
                raise self._closed()
            has_company = self._company.calls > 1 and self._patience()
            if (self._running or self._waiting or has_company) and self._costs.sharing_saves():
                return False
            self._recorder.began()
            ran.compiled = self._compiled()
            ran.began = self._begin_run()
            return True

    def end_alone(self, ran: Alone, error: BaseException | None) -> None:
        """Count a run of a caller's thread, and let the next run begin."""
        now = time.monotonic()
        seconds = now - ran.began
        with self._lock:
            busy = self._end_run(now)
            if error is None:
                self._costs.take(seconds, ran.rows)
                self._mean(seconds)
                waited = self._compiled() != ran.compiled
                self._recorder.ran_at_once(ran.reason, seconds, ran.rows, ran.cost, busy, waited)
            elif isinstance(error, UsageError):  # as a call that `submit` is never given
                self._recorder.withdrawn()
            else:
                self._recorder.finished(reason_of(error), seconds)
            if self._waiting or self._is_draining:
                self._changed.notify_all()

    # ------------------------------------------------------------------ the end

    def drain(self, deadline: float | None) -> bool:
        """Refuse new jobs and wait for those that wait or run; return whether none is left."""
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: not self._is_draining or self._is_idle(), left)
            return self._is_idle()

    def undrain(self) -> None:
        """Take jobs again, unless the lane is closed."""
        with self._changed:
            self._is_draining = self._is_closed
            self._changed.notify_all()  # who waits in `drain` goes on

    def close(self) -> None:
        """Fail the jobs that wait with ClosedError, and wait for the run that is under way."""
        with self._changed:
            self._is_draining = self._is_closed = True
            waiting = list(self._waiting)
            for job in waiting:
                self._waiting.remove(job)
            self._changed.notify_all()
            thread = self._thread
        for job in waiting:
            job.fail(self._closed())
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            atexit.unregister(self.close)

    def _is_idle(self) -> bool:
        return not (self._waiting or self._running)

    def _closed(self) -> ClosedError:
        return ClosedError(
            f"{self.name}: expected an open engine, found one that is "
            f"{'closed' if self._is_closed else 'closing and takes no more calls'}",
            hint="send the call to another engine, or make a new one with `Engine(bundle)`",
        )

    def _put(self, job: SharedJob[_P]) -> None:
        self._waiting.put(job, job.client, most_running=job.limits.running)

    def _full(self, found: str, *more: str) -> QueueFullError:
        left = ((job.rows - job.taken) / (job.most or job.rows) for job in self._waiting)
        seconds = self._seconds * (1 + sum(map(math.ceil, left)))
        return QueueFullError(
            f"{self.name}: expected at most {found}",
            retry_after=seconds,
            hint="; ".join((f"try again after {seconds:.2g} seconds", *more)),
        )

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while shares := self._next():
            self._run_shares(shares)
            with self._changed:
                for share in shares:
                    self._waiting.end(share.job.client)
                self._recorder.ran(0, Cost(runs=0), self._end_run(time.monotonic()))
                until = time.monotonic() + _PATIENCE * self._costs.run
                self._company = _Company(len(shares), until)
                self._changed.notify_all()

    def _next(self) -> list[Share[_P]]:
        """Wait for jobs and return the shares of the next run; none: the lane is closed."""
        with self._changed:
            while True:
                if self._is_closed:
                    return []
                self._drop()
                if not self._waiting or not self._may_run():
                    self._changed.wait()
                elif (wait := self._patience()) > 0:
                    self._changed.wait(wait)
                else:
                    self._begin_run()
                    return self._take()

    def _drop(self) -> None:
        """Remove jobs that nobody waits for any more."""
        now = time.monotonic()
        # A list, because a future that fails calls its callbacks now, and they may submit jobs.
        if over := [job for job in list(self._waiting) if job.is_over(now)]:
            for job in over:
                self._waiting.remove(job)
            self._changed.notify_all()  # `drain` waits for an empty queue

    def _patience(self) -> float:
        """Return how many seconds the next run waits for callers who shared the last one."""
        company, waiting = self._company, self._waiting
        if company.calls < 2 or len(waiting) >= company.calls or self._is_draining:
            return 0.0
        if waiting and sum(job.rows - job.taken for job in waiting) >= next(iter(waiting)).most:
            return 0.0
        return max(0.0, company.until - time.monotonic())

    def _may_run(self) -> bool:
        """Return whether a run may begin beside those that run now."""
        return not self._running or not self._costs.sharing_saves()

    def _take(self) -> list[Share[_P]]:
        """Remove from the queue what the next run takes: rows of the next job and of those with its key.

        Rows of a job that do not fit go to the end of the queue, so that a call of a thousand rows does not
        stop all others.
        """
        now = time.monotonic()
        shares: list[Share[_P]] = []
        client, job = self._waiting.take()
        most, key = job.most, job.key
        room = most or job.rows
        while True:
            taken = min(room, job.rows - job.taken)
            shares.append(Share(job, job.taken, job.taken + taken))
            self._waiting.charge(client, taken)
            if not job.began:
                job.began = now
                if not job.is_counted:  # else it was cancelled just now
                    self._recorder.admitted(now - job.submitted)
            job.taken += taken
            room -= taken
            if job.taken < job.rows:
                self._put(job)
            if not room or not most:
                return shares
            try:
                client, job = self._waiting.take(lambda one: one.most > 0 and one.key == key)
            except IndexError:
                return shares

    def _run_shares(self, shares: list[Share[_P]]) -> None:
        started, compiled = time.monotonic(), self._compiled()
        try:
            ran = self._run(shares)
        except Exception as error:
            if len(shares) > 1:  # only the caller whose rows fail gets the error
                for share in shares:
                    self._run_shares([share])
                return
            self._fail(shares[0].job, error)
            return
        ended = time.monotonic()
        rows = sum(share.rows for share in shares if share.job.most)
        with self._changed:
            most = shares[0].job.most or rows
            self._costs.take_shared(ended - started, len(shares), rows, most)
            self._mean(ended - started)
            self._recorder.ran(rows, ran.cost)
        has_compiled = self._compiled() > compiled
        for share, returned in zip(shares, ran.returned, strict=True):
            share.job.returned.append(returned)
            share.job.waited_for_compile |= has_compiled
            if share.end == share.job.rows:
                self._finish(share.job, ended)

    def _finish(self, job: SharedJob[_P], now: float) -> None:
        """Give a job its result, if it is in time."""
        if job.is_over(now):
            return
        try:
            result = job.finish(job.returned)
        except Exception as error:
            job.fail(error)
            return
        self._count_end(job, self._ended(result))  # before its caller can look at the metrics
        with contextlib.suppress(InvalidStateError):  # cancelled just now
            job.future.set_result(result)

    def _fail(self, job: SharedJob[_P], error: Exception) -> None:
        with self._changed:
            with contextlib.suppress(ValueError):  # its last rows were taken
                self._waiting.remove(job)
        job.fail(error)

    def _count_end(self, job: SharedJob[_P], reason: str) -> None:
        """Count the end of a job once."""
        now = time.monotonic()
        with self._lock:
            if job.is_counted:
                return
            job.is_counted = True
            if not job.began:
                self._recorder.abandoned(reason)
                return
            self._recorder.finished(
                reason,
                now - job.submitted,
                now - job.began if reason in (*GOOD_REASONS, "nan") else None,
                waited_for_compile=job.waited_for_compile,
            )

    def _begin_run(self) -> float:
        """Count a run that begins; return the time."""
        now = time.monotonic()
        if not self._running:
            self._busy_since = now
        self._running += 1
        return now

    def _end_run(self, now: float) -> float:
        """Count a run that ends; return how long runs were under way, if it is the last of them."""
        self._running -= 1
        return 0.0 if self._running else now - self._busy_since

    def _mean(self, seconds: float) -> None:
        self._seconds += _WEIGHT_OF_LAST * (seconds - self._seconds)


def _reason(future: Future[Any]) -> str:
    """Return the reason, as metrics have it, for which a future without a result is done."""
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    return "done" if error is None else reason_of(error)


@final
class Alone:
    """A run in a caller's own thread. Made by `Lane.alone`.

    Attributes:
        rows: rows of the caller.
        cost: what the run cost.
        reason: of the end of the call, for metrics.
        began: when the run began, by time.monotonic; 0: it did not.
        compiled: how many programs were compiled here until then.
    """

    __slots__ = ("_lane", "began", "compiled", "cost", "reason", "rows")

    def __init__(self, lane: Lane[Any], rows: int) -> None:
        self._lane = lane
        self.rows = rows
        self.cost = ONE_RUN
        self.reason = "done"
        self.began = 0.0
        self.compiled = 0

    def __enter__(self) -> Alone | None:
        return self if self._lane.begin_alone(self) else None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.began:
            self._lane.end_alone(self, error)
