"""Worker processes that compile jobs side by side."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

from prejit.compiler.compile.jobs import Compiled, CompileJob, find_compiled
from prejit.compiler.compile.worker_process import JOB_SECONDS, Death, WorkerProcess
from prejit.compiler.progress import Progress, Quiet
from prejit.compiler.store.cache import Cache
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.errors import BuildError, PrejitError, StoreError

WORKER_BYTES = 1 << 30
"""Memory that a worker may need: 180 to 530 MB were measured for the programs of GPT-2 124M."""


@dataclass(frozen=True, slots=True)
class _Failure:
    job: CompileJob
    reason: str
    hint: str | None = None
    output: tuple[str, ...] = ()
    store: bool = False

    def __str__(self) -> str:
        head = f"{self.job.program} for {self.job.target.name}: {self.reason}"
        return "\n".join((head, *(f"    | {line}" for line in self.output)))


def default_workers() -> int:
    """How many programs this machine compiles side by side: by its cores, and by its free memory."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _available_bytes() // WORKER_BYTES))


@final
class CompilePool:
    """Compiles what is submitted, a job a worker; use it as a context manager.

    Leaving the block, by an error or Ctrl-C too, ends all workers. What was finished stays cached.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        workers: int | None = None,
        progress: Progress | None = None,
        environ: Mapping[str, str] | None = None,
        timeout_seconds: float = JOB_SECONDS,
    ) -> None:
        """Starts nothing yet.

        Args:
            cache: where portable programs come from and executables go.
            workers: how many side by side; None: `default_workers()`.
            progress: who is told.
            environ: what workers inherit; None: this process's environment.
            timeout_seconds: how long one job may take; then its worker is killed.
        """
        self._cache = cache
        self._limit = workers or default_workers()
        self._progress = progress or Quiet()
        self._environ = dict(os.environ if environ is None else environ)
        self._timeout_seconds = timeout_seconds
        self.compiled = 0
        """Programs that workers of this pool compiled; all others were in the cache."""
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: list[CompileJob] = []
        self._unfinished = 0
        self._closed = False
        self._results: dict[tuple[str, str], Compiled] = {}
        self._failures: list[_Failure] = []
        self._lanes: list[threading.Thread] = []
        self._workers: set[WorkerProcess] = set()

    def submit(self, job: CompileJob) -> None:
        """Takes a job: answers it from the cache, or compiles it as soon as a worker is free."""
        self._progress.add()
        stored = find_compiled(self._cache, job.key)
        if stored is not None:
            with self._changed:
                self._results[job.program, job.target.name] = stored
            self._progress.cached()
            return
        with self._changed:
            self._waiting.append(job)
            self._unfinished += 1
            if len(self._lanes) < min(self._limit, self._unfinished):
                lane = threading.Thread(target=self._run_lane, name="compile", daemon=True)
                self._lanes.append(lane)
                lane.start()
            self._changed.notify_all()

    def results(self) -> dict[tuple[str, str], Compiled]:
        """Waits for all jobs; results by (program, name of the target).

        Raises:
            BuildError: programs that did not compile, each with its reason. The others are cached.
            StoreError: the cache cannot be written.
        """
        with self._changed:
            while self._unfinished:
                self._changed.wait()
        if self._failures:
            raise self._error()
        return dict(self._results)

    def close(self) -> None:
        """Ends all workers at once; jobs that are not finished are lost."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()
        for lane in self._lanes:
            lane.join()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run_lane(self) -> None:
        """A thread: job after job, with a worker for as long as the target stays the same."""
        worker: WorkerProcess | None = None
        try:
            while (job := self._next_job(worker)) is not None:
                outcome: Compiled | _Failure | None = None
                compiled = False
                try:
                    with self._turn(job) as held:
                        # Another build may have compiled it since it was submitted.
                        outcome = find_compiled(self._cache, job.key) if held else None
                        if held and outcome is None:
                            if not (worker and worker.alive and worker.toolchain == job.toolchain):
                                self._drop(worker)
                                worker = None
                                worker = self._new_worker(job.toolchain)
                            if worker is not None:
                                self._progress.started(job.program, job.target.name)
                                outcome = self._compile(worker, job)
                                compiled = True
                except Exception as error:
                    # Any: a thread that ended here would leave `results` waiting for ever.
                    hint = error.hint if isinstance(error, PrejitError) else None
                    outcome = _Failure(job, str(error), hint, store=isinstance(error, StoreError))
                self._finish(job, outcome, compiled)
        finally:
            self._drop(worker)

    @contextmanager
    def _turn(self, job: CompileJob) -> Iterator[bool]:
        """Held by the one build that compiles a job; false where the pool is closed meanwhile."""
        label = f"waiting for another build, which compiles {job.program} for {job.target.name}"
        with ExitStack() as stack:
            with self._progress.phase(label):
                making = self._cache.making(job.key, give_up=lambda: self._closed)
                held = stack.enter_context(making)
            yield held

    def _next_job(self, worker: WorkerProcess | None) -> CompileJob | None:
        """The next job, one for the worker's own target if there is one; None: the pool is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            fitting = (
                i
                for i, job in enumerate(self._waiting)
                if worker and job.toolchain == worker.toolchain
            )
            return self._waiting.pop(next(fitting, 0))

    def _new_worker(self, toolchain: Toolchain) -> WorkerProcess | None:
        """A worker for a toolchain; None: the pool is closed."""
        with self._changed:  # closing must either see the worker or keep it from being started
            if self._closed:
                return None
            worker = WorkerProcess(toolchain, self._cache, self._environ)
            self._workers.add(worker)
        return worker

    def _drop(self, worker: WorkerProcess | None) -> None:
        if worker is not None:
            with self._changed:
                self._workers.discard(worker)
            worker.release()

    def _compile(self, worker: WorkerProcess, job: CompileJob) -> Compiled | _Failure:
        answer = worker.ask(_request(job), self._timeout_seconds)
        if isinstance(answer, Death):
            return _Failure(job, answer.reason, answer.hint, answer.output)
        if "result" in answer:
            return Compiled.from_plain(answer["result"])
        error = answer["error"]
        store = error["code"] == StoreError.code
        return _Failure(job, error["message"], error["hint"], store=store)

    def _finish(self, job: CompileJob, outcome: Compiled | _Failure | None, compiled: bool) -> None:
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()  # first: whatever follows, `results` must not wait for ever
            if self._closed or outcome is None:
                pass  # what was killed did not fail
            elif isinstance(outcome, _Failure):
                self._failures.append(outcome)
                self._progress.failed(job.program, job.target.name, outcome.reason)
            else:
                self._results[job.program, job.target.name] = outcome
                self.compiled += compiled
                if compiled:
                    self._progress.finished(job.program, job.target.name)
                else:
                    self._progress.cached()

    def _error(self) -> PrejitError:
        failures = sorted(self._failures, key=lambda f: (f.job.program, f.job.target.name))
        total = len(failures) + len(self._results)
        message = f"{len(failures)} of {total} programs did not compile\n" + "\n".join(
            f"  {line}" for failure in failures for line in str(failure).splitlines()
        )
        hints = {failure.hint for failure in failures if failure.hint}
        cached = f"{len(self._results)} finished and stay cached" if self._results else ""
        hint = "; ".join([*sorted(hints), *([cached] if cached else [])]) or None
        if any(failure.store for failure in failures):
            return StoreError(message, hint=hint)
        return BuildError(message, hint=hint)


def _request(job: CompileJob) -> dict[str, Any]:
    """What worker.py reads."""
    key = {"kind": job.key.kind, "name": job.key.name, "ingredients": job.key.ingredients}
    return {
        "program": job.source.program,
        "kernels": None if job.source.kernels is None else job.source.kernels.digest,
        "machine": job.toolchain.machine(job.source.platforms),
        "key": key,
    }


def _available_bytes() -> int:
    """Memory that this process may still take: of the machine, and of its control group."""
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
