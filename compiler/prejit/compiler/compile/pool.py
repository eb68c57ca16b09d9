"""An executor that compiles in worker processes of this machine.

The pool has a few threads, each with at most one worker process. Jobs may be submitted while others are
compiled. A thread takes the job that is expected to take longest, among those whose memory is free; both
come from the last compile of the same program (`need_of`).
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, compile_once
from prejit.compiler.compile.executor import begin, give_error, give_result, need_of, size_need
from prejit.compiler.compile.schedule import Need
from prejit.compiler.compile.worker_process import JOB_SECONDS, WorkerKilledError, WorkerProcess
from prejit.compiler.progress import Progress, Quiet
from prejit.compiler.store.store_interface import Store
from prejit.runtime.base.process_memory import free_memory_bytes

_available_bytes = partial(free_memory_bytes, with_files=True)
"""Memory that holds files goes to the worker that needs it."""

_SWITCH_SECONDS = 1.0
"""Time to start a worker of another jax or platform: its jobs are taken if they last that much longer."""
_DEFER_SECONDS = 0.5
"""Time after which a lane looks again at a job that another build compiles, if it has nothing else to do."""


def default_workers() -> int:
    """Return how many programs this machine compiles side by side, given its cores and its free memory."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _available_bytes() // size_need(0).bytes))


@dataclass(frozen=True, eq=False)
class _Attempt:
    """A job that waits or is compiled.

    Attributes:
        job: the job.
        future: gets its result.
        need: what it is expected to need.
        not_before: the time before which it is not tried again, because another build compiles it; 0: it was
            not put off.
        alone: whether nothing else may be compiled meanwhile: its worker was killed beside others.
    """

    job: CompileJob
    future: Future[Compiled]
    need: Need
    not_before: float = 0.0
    alone: bool = False


@final
class WorkerPool:
    """An `Executor` whose jobs run in worker processes, one job a worker at a time."""

    def __init__(
        self,
        store: Store,
        *,
        workers: int | None = None,
        progress: Progress | None = None,
        timeout_seconds: float = JOB_SECONDS,
        in_order: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            store: holds portable programs and kernels; executables go there.
            workers: maximum number of worker processes; None: `default_workers()`.
            progress: shows each job.
            timeout_seconds: time limit of one job; then the pool kills its worker.
            in_order: whether jobs are taken as they are submitted, and not the longest first: the caller
                divides them among machines by their order.
        """
        self._store = store
        self._limit = workers or default_workers()
        self._progress = progress or Quiet()
        self._environ = dict(os.environ)
        self._timeout_seconds = timeout_seconds
        self._in_order = in_order
        self._memory = _available_bytes()
        self._changed = threading.Condition()  # guards all that follows
        self._compiled: set[str] = set()  # digests of keys
        self._waiting: list[_Attempt] = []
        self._running: set[_Attempt] = set()
        self._unfinished = 0
        self._closed = False
        self._lanes: list[threading.Thread] = []
        self._workers: set[WorkerProcess] = set()

    @property
    def compiled(self) -> frozenset[str]:
        """See `Executor.compiled`."""
        with self._changed:
            return frozenset(self._compiled)

    @property
    def lowering_processes(self) -> int:
        """See `Executor.lowering_processes`."""
        return self._limit // 4

    def submit(self, job: CompileJob) -> Future[Compiled]:
        """See `Executor.submit`."""
        future = begin(self._store, self._progress, job)
        if future.done():
            return future
        attempt = _Attempt(job, future, need_of(self._store, job))
        with self._changed:
            self._waiting.append(attempt)
            self._unfinished += 1
            if len(self._lanes) < min(self._limit, self._unfinished):
                lane = threading.Thread(target=self._run_lane, name="compile", daemon=True)
                self._lanes.append(lane)
                lane.start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """See `Executor.close`."""
        with self._changed:
            self._closed = True
            for each in self._waiting:
                if not each.future.cancel():  # it was tried
                    each.future.set_exception(CancelledError())
            self._waiting.clear()
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()
        for lane in self._lanes:
            lane.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _run_lane(self) -> None:
        """Run job after job in one thread, with one worker for as long as it serves."""
        worker: WorkerProcess | None = None

        def compile_job(job: CompileJob) -> Compiled | None:
            nonlocal worker
            if not (worker and worker.alive and worker.serves(job.toolchain)):
                self._release(worker)
                worker = None
                with self._changed:  # `close` either sees the worker or prevents it
                    if self._closed:
                        return None
                    worker = WorkerProcess(job.toolchain, self._store, self._environ)
                    self._workers.add(worker)
            self._progress.started(job.program, job.target.name)
            return worker.compile(job.source, job.toolchain, self._timeout_seconds)

        try:
            while (attempt := self._next(worker)) is not None:
                if not attempt.future.running():
                    attempt.future.set_running_or_notify_cancel()
                outcome, is_new = None, False
                error: Exception | None = None
                try:
                    outcome, is_new = compile_once(
                        self._store,
                        attempt.job,
                        compile_job,
                        progress=self._progress,
                        give_up=self._has_better_to_do,
                    )
                except Exception as found:
                    # Any error: a thread that ended here would leave its future waiting for ever.
                    error = found
                self._end(attempt, outcome, is_new, error)
        finally:
            self._release(worker)

    def _next(self, worker: WorkerProcess | None) -> _Attempt | None:
        """Wait for a job that may be compiled now, and return the best one; None: the pool is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                due = [each for each in self._waiting if each.not_before <= now]
                if self._running:  # beside none, every job may be compiled
                    free = self._free_bytes()
                    due = [each for each in due if not each.alone and each.need.bytes <= free]
                if due:
                    best = min(due, key=partial(self._rank, worker))  # the first of equal ones
                    self._waiting.remove(best)
                    self._running.add(best)
                    self._changed.notify()  # there may be room for one more
                    return best
                later = [each.not_before for each in self._waiting if each.not_before > now]
                self._changed.wait(min(later) - now if later else None)
            return None

    def _free_bytes(self) -> int:
        """Return the memory that no running job reserves, and that nobody has taken meanwhile."""
        if any(each.alone for each in self._running):
            return 0
        reserved = sum(each.need.bytes for each in self._running)
        return min(self._memory - reserved, _available_bytes())

    def _rank(self, worker: WorkerProcess | None, attempt: _Attempt) -> tuple[bool, float]:
        """Return the place of a job in the order of one lane."""
        gained = 0.0 if self._in_order else attempt.need.seconds
        if worker is None or not worker.serves(attempt.job.toolchain):
            gained -= _SWITCH_SECONDS
        return attempt.not_before > 0, -gained

    def _has_better_to_do(self) -> bool:
        """Return whether a lane need not wait for another build: a job is due, or the pool is closed."""
        with self._changed:
            now = time.monotonic()
            return self._closed or any(each.not_before <= now for each in self._waiting)

    def _end(
        self, attempt: _Attempt, outcome: Compiled | None, is_new: bool, error: Exception | None
    ) -> None:
        """Take the end of an attempt: the job's result or error, or a reason to try it again."""
        job, future = attempt.job, attempt.future
        again: _Attempt | None = None
        is_killed = isinstance(error, WorkerKilledError)
        if is_killed and not attempt.alone:
            again = replace(attempt, alone=True, not_before=0.0)
        elif error is None and outcome is None and not is_new:  # another build compiles it now
            again = replace(attempt, not_before=time.monotonic() + _DEFER_SECONDS)
        with self._changed:
            self._running.remove(attempt)
            is_closed = self._closed
            if is_new and outcome is not None:
                self._compiled.add(job.key.digest)
            if again is not None and not is_closed:
                self._waiting.append(again)
            else:
                self._unfinished -= 1
            self._changed.notify_all()  # its memory is free
        if again is not None and not is_closed:
            if is_killed:
                self._progress.note(
                    f"{job.program} for {job.target.name}: its worker was killed, most likely because memory "
                    "ran out; it is tried again while nothing else is compiled"
                )
        elif outcome is not None:
            give_result(self._progress, job, future, outcome, is_new=is_new)
        elif error is None or is_closed:
            # `close` killed its worker: the job did not fail by itself.
            future.set_exception(CancelledError())
        else:
            hint = "nothing else was compiled: it may need more memory than this machine has (see `dmesg`)"
            give_error(self._progress, job, future, error, hint if is_killed else None)

    def _release(self, worker: WorkerProcess | None) -> None:
        if worker is not None:
            with self._changed:
                self._workers.discard(worker)
            worker.release()
