"""Rows of several callers in one run of a program: a queue, and a thread that takes what waits.

A call that finds the program idle runs at once. While a program runs, other calls collect, and the next run
takes as many of their rows as fit. So a lone caller never waits, and many callers share runs. Where that
saves no time, because a run is short or each row costs as much as the first, callers run it side by side.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, final

from prejit.runtime.engine.metrics import MicroMetrics
from prejit.runtime.engine.shared_jobs import Ran, Share, SharedJob, overdue
from prejit.runtime.errors import ClosedError, DeadlineError, QueueFullError

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
    ) -> None:
        """Make a lane without a thread.

        Args:
            name: of the program, for metrics and errors.
            run: runs the shares of one run, whose jobs have equal keys.
            queue: the most jobs that may wait.
        """
        self.name = name
        self._run = run
        self._queue = queue
        self._waiting: deque[SharedJob[_P]] = deque()
        self._thread: threading.Thread | None = None
        self._running = 0
        self._company = _Company(0, 0.0)
        self._is_draining = self._is_closed = False
        self._calls = self._rows = self._padded_rows = self._batches = 0
        self._seconds = _FIRST_GUESS_SECONDS
        self._costs = _Costs()
        # Entering the lock itself is quicker than entering the condition, which is Python's.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    # ------------------------------------------------------------------ callers

    def submit(self, job: SharedJob[_P]) -> None:
        """Add a job to the queue.

        Raises:
            QueueFullError: as many jobs wait as may.
            ClosedError: the lane is closed or draining.
        """
        with self._changed:
            self._check_open()
            if len(self._waiting) >= self._queue:
                self._drop()
            if len(self._waiting) >= self._queue:
                seconds = self._seconds_of_queue()
                raise QueueFullError(
                    f"{self.name}: expected at most {self._queue} waiting calls, found the queue full",
                    retry_after=seconds,
                    hint=f"try again in {seconds:.2g} seconds, or make the engine with a longer queue",
                )
            if self._thread is None:
                # A daemon that `close` joins at exit: it waits for jobs as long as the process lives.
                thread = threading.Thread(target=self._work, name="prejit-microbatch", daemon=True)
                thread.start()
                self._thread = thread
                atexit.register(self.close)
            self._waiting.append(job)
            # The end of a run wakes the thread, too. To wake it for each job would cost more than the job.
            if self._may_run() and (len(self._waiting) == 1 or not self._patience()):
                self._changed.notify_all()

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
            job.future.cancel()
            raise overdue() from None
        except BaseException:
            job.future.cancel()  # ctrl-C; where the job itself failed this does nothing
            raise

    def alone(self, rows: int) -> Alone:
        """Let the caller's own thread run the program, if it is idle or sharing saves nothing.

        with lane.alone(rows) as ran:
            if ran is not None:
                return ...  # the program ran, and ran.padded_rows are counted
        """
        return Alone(self, rows)

    def begin_alone(self) -> bool:
        """Return whether the caller's thread may run the program now. See `alone`.

        Raises:
            ClosedError: the lane is closed or draining.
        """
        with self._lock:
            self._check_open()
            is_taken = self._running or self._waiting or self._patience()
            if is_taken and self._costs.sharing_saves():
                return False
            self._running += 1
            return True

    def end_alone(self, ran: Alone | None, seconds: float) -> None:
        """Count a run of a caller's thread, and let the next run begin; None: the run failed."""
        with self._lock:
            self._running -= 1
            if ran is not None:
                self._costs.take(seconds, ran.rows)
                self._count(1, ran.rows, ran.padded_rows, ran.batches, seconds)
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
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
            thread = self._thread
        for job in waiting:
            job.fail(self._closed())
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            atexit.unregister(self.close)

    def metrics(self) -> MicroMetrics:
        """Return what the lane has done so far."""
        with self._changed:
            return MicroMetrics(
                self.name, self._calls, self._rows, self._padded_rows, self._batches
            )

    def _is_idle(self) -> bool:
        return not (self._waiting or self._running)

    def _check_open(self) -> None:
        if self._is_draining:
            raise self._closed()

    def _closed(self) -> ClosedError:
        return ClosedError(
            f"{self.name}: expected an open engine, found one that is "
            f"{'closed' if self._is_closed else 'closing and takes no more calls'}",
            hint="send the call to another engine, or make a new one with `bundle.engine()`",
        )

    def _seconds_of_queue(self) -> float:
        runs = sum(
            math.ceil((job.rows - job.taken) / (job.most or job.rows)) for job in self._waiting
        )
        return self._seconds * (runs + 1)

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while shares := self._next():
            self._run_shares(shares)
            with self._changed:
                self._running -= 1
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
                    self._running += 1
                    return self._take()

    def _drop(self) -> None:
        """Remove jobs that nobody waits for any more."""
        now = time.monotonic()
        # A list, because a future that fails calls its callbacks now, and they may submit jobs.
        if any([job.is_over(now) for job in list(self._waiting)]):
            self._waiting = deque(job for job in self._waiting if not job.future.done())
            self._changed.notify_all()  # `drain` waits for an empty queue

    def _patience(self) -> float:
        """Return how many seconds the next run waits for callers who shared the last one."""
        company, waiting = self._company, self._waiting
        if company.calls < 2 or len(waiting) >= company.calls or self._is_draining:
            return 0.0
        if waiting and sum(job.rows - job.taken for job in waiting) >= waiting[0].most:
            return 0.0
        return max(0.0, company.until - time.monotonic())

    def _may_run(self) -> bool:
        """Return whether a run may begin beside those that run now."""
        return not self._running or not self._costs.sharing_saves()

    def _take(self) -> list[Share[_P]]:
        """Remove from the queue what the next run takes: rows of the first job and of those with its key.

        Rows of the first job that do not fit go to the end of the queue, so that a call of a thousand rows
        does not stop all others.
        """
        first, now = self._waiting[0], time.monotonic()
        shares: list[Share[_P]] = []
        kept: deque[SharedJob[_P]] = deque()
        room = first.most or first.rows
        for job in self._waiting:
            if not room or (job is not first and (not first.most or job.key != first.key)):
                kept.append(job)
                continue
            taken = min(room, job.rows - job.taken)
            shares.append(Share(job, job.taken, job.taken + taken))
            job.began = job.began or now
            job.taken += taken
            room -= taken
            if job.taken < job.rows and job is not first:
                kept.append(job)
        if first.taken < first.rows:
            kept.append(first)
        self._waiting = kept
        return shares

    def _run_shares(self, shares: list[Share[_P]]) -> None:
        started = time.monotonic()
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
        finished = 0
        for share, returned in zip(shares, ran.returned, strict=True):
            share.job.returned.append(returned)
            if share.end == share.job.rows:
                finished += self._finish(share.job, ended)
        rows = sum(share.rows for share in shares if share.job.most)
        with self._changed:
            most = shares[0].job.most or rows
            self._costs.take_shared(ended - started, len(shares), rows, most)
            self._count(finished, rows, ran.padded_rows, ran.batches, ended - started)

    def _finish(self, job: SharedJob[_P], now: float) -> bool:
        """Give a job its result; return whether it was in time."""
        if job.is_over(now):
            return False
        try:
            result = job.finish(job.returned)
        except Exception as error:
            job.fail(error)
            return False
        with contextlib.suppress(InvalidStateError):  # cancelled just now
            job.future.set_result(result)
        return True

    def _fail(self, job: SharedJob[_P], error: Exception) -> None:
        with self._changed:
            with contextlib.suppress(ValueError):  # its last rows were taken
                self._waiting.remove(job)
        job.fail(error)

    def _count(self, calls: int, rows: int, padded: int, batches: int, seconds: float) -> None:
        self._calls += calls
        self._rows += rows
        self._padded_rows += padded
        self._batches += batches
        self._seconds += _WEIGHT_OF_LAST * (seconds - self._seconds)


@final
class Alone:
    """A run in a caller's own thread. Made by `Lane.alone`.

    Attributes:
        rows: rows of the caller.
        padded_rows: rows that only filled the bucket.
        batches: how many runs of the program it took.
    """

    __slots__ = ("_began", "_lane", "batches", "padded_rows", "rows")

    def __init__(self, lane: Lane[Any], rows: int) -> None:
        self._lane = lane
        self._began = 0.0
        self.rows = rows
        self.padded_rows = 0
        self.batches = 1

    def __enter__(self) -> Alone | None:
        if not self._lane.begin_alone():
            return None
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._began:
            seconds = time.monotonic() - self._began
            self._lane.end_alone(self if kind is None else None, seconds)
