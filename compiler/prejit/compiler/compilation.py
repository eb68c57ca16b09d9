"""Compiling many programs for many targets side by side, in worker processes.

The pool has a few threads; each has at most one worker process and talks with it alone. Programs may be
submitted while others are compiled. One that fails takes no other with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, final

from prejit.compiler.cache import Cache
from prejit.compiler.cache_key import Key
from prejit.compiler.kernel_library import KernelLibrary
from prejit.compiler.progress import Progress, Quiet
from prejit.compiler.toolchain import Toolchain
from prejit.runtime import bundle
from prejit.runtime.errors import BuildError, PrejitError, RejectError, StoreError
from prejit.runtime.target import Target

WORKER_BYTES = 1 << 30
"""Memory that a worker may need: 180 to 530 MB were measured for the programs of GPT-2 124M."""

_ANSWER_SECONDS = 5.0
"""How long a worker that said nothing usable may take to end by itself."""
_LAST_LINES = 15
_LAST_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class Source:
    """What an executable is compiled from.

    Attributes:
        program: digest of StableHLO, a blob in the cache.
        platforms: that it was lowered for.
        kernels: the library that it calls; None: it calls none.
    """

    program: str
    platforms: tuple[str, ...]
    kernels: KernelLibrary | None = None


def compile_ingredients(toolchain: Toolchain, source: Source) -> tuple[tuple[str, str], ...]:
    """The ingredients of an executable's key: everything that decides it.

    Raises:
        StoreError: XLA_FLAGS names a file, and it cannot be read.
    """
    kernels = () if source.kernels is None else (("kernels", source.kernels.digest),)
    return (
        ("stablehlo", source.program),
        ("platforms", " ".join(source.platforms)),  # which of them is the target, is compiled in
        *kernels,
        *toolchain.ingredients(os.environ),
    )


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One program to compile for one target.

    Attributes:
        program: its name, unique in the build.
        toolchain: what compiles it, and for which target.
        source: what is compiled.
        key: what the result is stored under.
    """

    program: str
    toolchain: Toolchain
    source: Source
    key: Key

    @property
    def target(self) -> Target:
        """What it is compiled for."""
        return self.toolchain.target


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a job.

    Attributes:
        executable: the zstd frame, a blob in the cache; its offset is 0.
        cpu_features: the extensions that the code really uses, in LLVM's names.
        memory: what the program needs while it runs.
        milliseconds: that the compiler took.
    """

    executable: bundle.Segment
    cpu_features: tuple[str, ...]
    memory: bundle.Memory
    milliseconds: int

    def to_plain(self) -> dict[str, Any]:
        """As JSON."""
        plain: dict[str, Any] = json.loads(bundle.to_json(self))
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Compiled:
        """The inverse of `to_plain`.

        Raises:
            RejectError: plain has other keys or types.
        """
        return bundle.from_json(cls, bundle.to_json(plain), "build cache")


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


def compile_all(
    jobs: Iterable[CompileJob],
    cache: Cache,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[tuple[str, str], Compiled]:
    """Compiles what the cache does not hold; results by (program, name of the target).

    Raises:
        BuildError: programs that did not compile, each with its reason. The others are cached.
        StoreError: the cache cannot be written.
    """
    with CompilePool(cache, workers=workers, progress=progress) as pool:
        for job in jobs:
            pool.submit(job)
        return pool.results()


def find_compiled(cache: Cache, key: Key) -> Compiled | None:
    """The result of a compile that the cache holds, undamaged; None: it has to be compiled.

    Raises:
        StoreError: the cache cannot be read.
    """
    stored = cache.lookup(key, verify=True)
    try:
        return None if stored is None else Compiled.from_plain(stored)
    except RejectError:  # written by a prejit that tells more or less of a program
        return None


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
    ) -> None:
        """Starts nothing yet.

        Args:
            cache: where portable programs come from and executables go.
            workers: how many side by side; None: `default_workers()`.
            progress: who is told.
            environ: what workers inherit; None: this process's environment.
        """
        self._cache = cache
        self._limit = workers or default_workers()
        self._progress = progress or Quiet()
        self._environ = dict(os.environ if environ is None else environ)
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: list[CompileJob] = []
        self._unfinished = 0
        self._closed = False
        self._results: dict[tuple[str, str], Compiled] = {}
        self._failures: list[_Failure] = []
        self._lanes: list[threading.Thread] = []
        self._workers: set[_Worker] = set()

    def submit(self, job: CompileJob) -> bool:
        """Takes a job: answers it from the cache, or compiles it as soon as a worker is free.

        Returns:
            Whether it is compiled.
        """
        self._progress.add()
        stored = find_compiled(self._cache, job.key)
        if stored is not None:
            with self._changed:
                self._results[job.program, job.target.name] = stored
            self._progress.cached()
            return False
        with self._changed:
            self._waiting.append(job)
            self._unfinished += 1
            if len(self._lanes) < min(self._limit, self._unfinished):
                lane = threading.Thread(target=self._run_lane, name="compile", daemon=True)
                self._lanes.append(lane)
                lane.start()
            self._changed.notify_all()
        return True

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
        worker: _Worker | None = None
        try:
            while (job := self._next_job(worker)) is not None:
                if worker is None or worker.toolchain != job.toolchain or not worker.alive:
                    self._drop(worker)
                    worker = None
                try:
                    worker = worker or self._new_worker(job.toolchain)
                    self._progress.started(job.program, job.target.name)
                    outcome = worker.compile(job) if worker else None
                except Exception as error:
                    # Any: a thread that ended here would leave `results` waiting for ever.
                    hint = error.hint if isinstance(error, PrejitError) else None
                    outcome = _Failure(job, str(error), hint, store=isinstance(error, StoreError))
                self._finish(job, outcome)
        finally:
            self._drop(worker)

    def _next_job(self, worker: _Worker | None) -> CompileJob | None:
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

    def _new_worker(self, toolchain: Toolchain) -> _Worker | None:
        environment = toolchain.environment(self._environ)
        command = (*toolchain.command, str(self._cache.root), toolchain.target.platform)
        with self._changed:  # closing must either see the worker or keep it from being started
            if self._closed:
                return None
            worker = _Worker(toolchain, command, environment)
            self._workers.add(worker)
        return worker

    def _drop(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._changed:
                self._workers.discard(worker)
            worker.release()

    def _finish(self, job: CompileJob, outcome: Compiled | _Failure | None) -> None:
        with self._changed:
            self._unfinished -= 1
            if self._closed or outcome is None:
                pass  # what was killed did not fail
            elif isinstance(outcome, _Failure):
                self._failures.append(outcome)
                self._progress.failed(job.program, job.target.name, outcome.reason)
            else:
                self._results[job.program, job.target.name] = outcome
                self._progress.finished(job.program, job.target.name)
            self._changed.notify_all()

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


@final
class _Worker:
    """A worker process for one target. Its stderr goes to a file, of which only a failure is told."""

    def __init__(
        self, toolchain: Toolchain, command: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.toolchain = toolchain
        # No pipe: nobody would have to read it, and the last lines are there after a crash.
        self._stderr: BinaryIO = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (see release)
        self._lock = threading.Lock()
        self._killed = False
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to handle; and a group can be killed whole
            )
        except OSError as error:
            self._stderr.close()
            raise BuildError(
                f"cannot start a worker process, {command[0]}: {error.strerror}",
                hint="try fewer workers: --jobs 1",
            ) from error

    @property
    def alive(self) -> bool:
        """Whether it can take another job."""
        return self._process.poll() is None

    def compile(self, job: CompileJob) -> Compiled | _Failure:
        """Asks the process and waits for its answer."""
        start = self._stderr.seek(0, os.SEEK_END)
        answer: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # it is dead, or died in the middle of its answer
            answer = self._ask(_request(job))
        if "result" in answer:
            return Compiled.from_plain(answer["result"])
        if "error" in answer:
            error = answer["error"]
            store = error["code"] == StoreError.code
            return _Failure(job, error["message"], error["hint"], store=store)
        # Without an answer the process itself is gone, not only its fork that compiled.
        code = answer["exit"] if answer else self._exit_code()
        reason, hint = _death(code)
        return _Failure(job, reason, hint, self._last_lines(start))

    def kill(self) -> None:
        """Ends the process and its forks now. Safe from any thread, and again."""
        with self._lock:
            if not self._killed:
                self._killed = True
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def release(self) -> None:
        """Kills and closes everything; for the thread that talks with it."""
        self.kill()
        with suppress(OSError), self._process:  # closes the pipes and waits
            pass
        self._stderr.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        return answer

    def _exit_code(self) -> int:
        try:
            return self._process.wait(timeout=_ANSWER_SECONDS)
        except subprocess.TimeoutExpired:  # it lives, but what it said was no answer
            self.kill()
            return self._process.wait()

    def _last_lines(self, start: int) -> tuple[str, ...]:
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(start, end - _LAST_BYTES))
        text = self._stderr.read().decode("utf-8", "replace")
        return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-_LAST_LINES:]


def _request(job: CompileJob) -> dict[str, Any]:
    """What worker.py reads."""
    key = {"kind": job.key.kind, "name": job.key.name, "ingredients": job.key.ingredients}
    return {
        "program": job.source.program,
        "kernels": None if job.source.kernels is None else job.source.kernels.digest,
        "machine": job.toolchain.machine(job.source.platforms),
        "key": key,
    }


def _death(code: int) -> tuple[str, str]:
    """How a worker ended, and what to do about it."""
    if code >= 0:
        return (
            f"its worker ended with exit code {code}",
            "if the last lines do not tell the cause, report them to prejit's authors",
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    reason = f"its worker was killed by {name}"
    if -code == signal.SIGKILL:
        return reason, "often memory ran out (`dmesg` tells): try fewer workers, --jobs 1"
    return reason, "XLA crashed: try another jaxlib, or simplify the program"


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
