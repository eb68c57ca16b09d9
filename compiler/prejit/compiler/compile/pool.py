"""An executor that compiles in worker processes of this machine.

The pool has a few threads, each with at most one worker process. Jobs may be submitted while others are
compiled.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import final

from prejit.compiler.compile.executor import compile_once, find_compiled
from prejit.compiler.compile.jobs import Compiled, CompileJob
from prejit.compiler.compile.worker_process import JOB_SECONDS, OUTPUT_MARK, WorkerProcess
from prejit.compiler.progress import Progress, Quiet
from prejit.compiler.store.interface import Store
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.errors import BuildError, PrejitError, StoreError

WORKER_BYTES = 1 << 30
"""Memory that one worker may need. Programs of GPT-2 124M took 180 to 530 MB."""

_DEFER_SECONDS = 0.5
"""Time after which a lane looks again at a job that another build compiles, if it has nothing else to do."""


def default_workers() -> int:
    """Return how many programs this machine compiles side by side, given its cores and its free memory."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _available_bytes() // WORKER_BYTES))


@final
class WorkerPool:
    """An `Executor` whose jobs run in worker processes, one job a worker at a time."""

    def __init__(
        self,
        store: Store,
        *,
        workers: int | None = None,
        progress: Progress | None = None,
        environ: Mapping[str, str] | None = None,
        timeout_seconds: float = JOB_SECONDS,
    ) -> None:
        """Start nothing yet.

        Args:
            store: holds portable programs and kernels; executables go there.
            workers: number of worker processes; None: `default_workers()`.
            progress: shows each job.
            environ: environment variables that workers inherit; None: this process's.
            timeout_seconds: time limit of one job; then the pool kills its worker.
        """
        self._store = store
        self._limit = workers or default_workers()
        self._progress = progress or Quiet()
        self._environ = dict(os.environ if environ is None else environ)
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()  # guards all that follows
        self._compiled = 0
        # Each with the time before which it is not tried again: another build compiles it.
        self._waiting: list[tuple[CompileJob, Future[Compiled], float]] = []
        self._unfinished = 0
        self._closed = False
        self._lanes: list[threading.Thread] = []
        self._workers: set[WorkerProcess] = set()

    @property
    def compiled(self) -> int:
        """See `Executor.compiled`."""
        return self._compiled

    @property
    def lowering_processes(self) -> int:
        """See `Executor.lowering_processes`."""
        return self._limit // 4

    def submit(self, job: CompileJob) -> Future[Compiled]:
        """See `Executor.submit`."""
        self._progress.add()
        future: Future[Compiled] = Future()
        stored = find_compiled(self._store, job.key)
        if stored is not None:
            self._progress.cached()
            future.set_result(stored)
            return future
        with self._changed:
            self._waiting.append((job, future, 0.0))
            self._unfinished += 1
            if len(self._lanes) < min(self._limit, self._unfinished):
                lane = threading.Thread(target=self._run_lane, name="compile", daemon=True)
                self._lanes.append(lane)
                lane.start()
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """See `Executor.close`."""
        with self._changed:
            self._closed = True
            for _, future, _ in self._waiting:
                if not future.cancel():  # it was tried
                    future.set_exception(CancelledError())
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
        """Run job after job in one thread, with one worker for as long as the toolchain stays the same."""
        worker: WorkerProcess | None = None

        def compile_job(job: CompileJob) -> Compiled | None:
            nonlocal worker
            if not (worker and worker.alive and worker.toolchain == job.toolchain):
                self._release(worker)
                worker = None
                worker = self._new_worker(job.toolchain)
            if worker is None:
                return None
            self._progress.started(job.program, job.target.name)
            return worker.compile(job.source, self._timeout_seconds)

        try:
            while (next_job := self._next_job(worker)) is not None:
                job, future = next_job
                if not future.running():
                    future.set_running_or_notify_cancel()
                try:
                    outcome, compiled = compile_once(
                        self._store,
                        job,
                        compile_job,
                        progress=self._progress,
                        give_up=self._has_better_to_do,
                    )
                except Exception as error:
                    # Any error: a thread that ended here would leave its future waiting for ever.
                    self._fail(job, future, error)
                else:
                    if not (compiled or outcome or self._closed):
                        self._defer(job, future)
                    else:
                        self._finish(job, future, outcome, compiled)
        finally:
            self._release(worker)

    def _next_job(self, worker: WorkerProcess | None) -> tuple[CompileJob, Future[Compiled]] | None:
        """Return the next job, preferably for the worker's own toolchain; None: the pool is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                due = [i for i, (*_, at) in enumerate(self._waiting) if at <= now]
                if due:
                    fitting = (
                        i
                        for i in due
                        if worker and self._waiting[i][0].toolchain == worker.toolchain
                    )
                    job, future, _ = self._waiting.pop(next(fitting, due[0]))
                    return job, future
                first = min((at for *_, at in self._waiting), default=None)
                self._changed.wait(None if first is None else first - now)
            return None

    def _has_better_to_do(self) -> bool:
        """Return whether a lane need not wait for another build: a job is due, or the pool is closed."""
        with self._changed:
            now = time.monotonic()
            return self._closed or any(at <= now for *_, at in self._waiting)

    def _defer(self, job: CompileJob, future: Future[Compiled]) -> None:
        """Try a job later: another build compiles it now."""
        with self._changed:
            if not self._closed:
                self._waiting.append((job, future, time.monotonic() + _DEFER_SECONDS))
                self._changed.notify_all()
                return
        self._finish(job, future, None, False)

    def _new_worker(self, toolchain: Toolchain) -> WorkerProcess | None:
        """Start a worker for a toolchain; None: the pool is closed."""
        with self._changed:  # `close` either sees the worker or prevents it
            if self._closed:
                return None
            worker = WorkerProcess(toolchain, self._store, self._environ)
            self._workers.add(worker)
        return worker

    def _release(self, worker: WorkerProcess | None) -> None:
        if worker is not None:
            with self._changed:
                self._workers.discard(worker)
            worker.release()

    def _finish(
        self, job: CompileJob, future: Future[Compiled], outcome: Compiled | None, compiled: bool
    ) -> None:
        with self._changed:
            self._unfinished -= 1
            self._compiled += compiled and outcome is not None
        if outcome is None:
            future.set_exception(CancelledError())
            return
        try:
            if compiled:
                self._progress.finished(job.program, job.target.name)
            else:
                self._progress.cached()
        finally:  # even where progress cannot be shown, nobody waits for ever
            future.set_result(outcome)

    def _fail(self, job: CompileJob, future: Future[Compiled], error: Exception) -> None:
        with self._changed:
            self._unfinished -= 1
            closed = self._closed
        if closed:  # `close` killed its worker: the job did not fail by itself
            future.set_exception(CancelledError())
            return
        hint = error.hint if isinstance(error, PrejitError) else None
        kind = StoreError if isinstance(error, StoreError) else BuildError
        reason = str(error).partition(OUTPUT_MARK)[0]
        try:
            self._progress.failed(job.program, job.target.name, reason)
        finally:
            future.set_exception(kind(f"{job.program} for {job.target.name}: {error}", hint=hint))


def _available_bytes() -> int:
    """Return the memory that this process may still take, given the machine and its control group."""
    limits = [WORKER_BYTES * 1024]  # where nothing is known, cores are the limit
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # "max", where there is no limit, is a ValueError
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        directory = Path("/sys/fs/cgroup", group.lstrip("/"))
        used = int((directory / "memory.current").read_text())
        limits.append(int((directory / "memory.max").read_text()) - used)
    return max(0, min(limits))
