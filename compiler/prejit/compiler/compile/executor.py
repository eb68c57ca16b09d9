"""The interface of executors of compile jobs, and what they have in common.

`pool.WorkerPool` is the executor that compiles in worker processes of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from typing import Protocol

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, as_compiled, find_compiled
from prejit.compiler.compile.schedule import Need
from prejit.compiler.compile.worker_process import OUTPUT_MARK
from prejit.compiler.progress import Progress
from prejit.compiler.store.store_interface import Store
from prejit.runtime.errors import BuildError, PrejitError, StoreError

_BASE_SECONDS, _SECONDS_A_BYTE = 0.1, 100e-6
_BASE_BYTES, _BYTES_A_BYTE = 300 << 20, 1000
"""Need of a program that was never compiled: a constant, and a part that grows with its StableHLO."""
_RESERVE = 1.25
"""Memory that is reserved for a job, in times of what it needed last."""
WORKER_BYTES = 200 << 20
"""Memory of a worker process and of what runs it, beside the job's own."""


class Executor(Protocol):
    """Compiles jobs side by side. Use it as a context manager: leaving the block ends unfinished jobs.

    A job that fails ends no other job. Finished results stay in the store.
    """

    @property
    def compiled(self) -> frozenset[str]:
        """Digests of the keys of jobs that this executor compiled; all other results came from the store."""

    @property
    def lowering_processes(self) -> int:
        """Number of processes of this machine that may lower while this executor compiles.

        Lowering a program takes about a quarter of the time that compiling it takes.
        """

    def submit(self, job: CompileJob) -> Future[Compiled]:
        """Take a job: its result comes from the store, or is compiled as soon as there is room.

        The future fails with a BuildError or StoreError that names program and target.
        """

    def close(self) -> None:
        """End all unfinished jobs at once and cancel their futures."""

    def __enter__(self) -> Executor:
        """Return the executor itself."""

    def __exit__(self, *raised: object) -> None:
        """Close it."""


def begin(store: Store, progress: Progress, job: CompileJob) -> Future[Compiled]:
    """Count a job and return its future, which has the result already if the store has it."""
    progress.add()
    future: Future[Compiled] = Future()
    if (stored := find_compiled(store, job.key)) is not None:
        progress.cached()
        future.set_result(stored)
    return future


def give_result(
    progress: Progress, job: CompileJob, future: Future[Compiled], result: Compiled, *, is_new: bool
) -> None:
    """Show that a job has ended and give its future the result."""
    try:
        if is_new:
            progress.finished(job.program, job.target.name, result.milliseconds / 1000)
        else:
            progress.cached()
    finally:  # even where progress cannot be shown, nobody waits for ever
        future.set_result(result)


def give_error(
    progress: Progress,
    job: CompileJob,
    future: Future[Compiled],
    error: Exception,
    hint: str | None = None,
) -> None:
    """Show that a job has failed and give its future a BuildError or StoreError that names it."""
    hint = hint or (error.hint if isinstance(error, PrejitError) else None)
    kind = StoreError if isinstance(error, StoreError) else BuildError
    try:
        progress.failed(job.program, job.target.name, str(error).partition(OUTPUT_MARK)[0])
    finally:
        future.set_exception(kind(f"{job.program} for {job.target.name}: {error}", hint=hint))


def pass_on(future: Future[Compiled], ended: Future[Compiled]) -> None:
    """Give a future the outcome of another one that has ended."""
    if ended.cancelled():
        future.set_exception(CancelledError())
    elif (error := ended.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(ended.result())


def collect(futures: Mapping[tuple[str, str], Future[Compiled]]) -> dict[tuple[str, str], Compiled]:
    """Wait for all jobs and return their results, by (program, name of the target).

    Raises:
        BuildError: programs that did not compile, each with its reason. The others are in the store.
        StoreError: one of the reasons is that the store cannot be written.
    """
    results: dict[tuple[str, str], Compiled] = {}
    failures: list[PrejitError] = []
    for name in sorted(futures):
        try:
            results[name] = futures[name].result()
        except PrejitError as error:
            failures.append(error)
    if not failures:
        return {name: results[name] for name in futures}
    message = f"{len(failures)} of {len(futures)} programs did not compile\n" + "\n".join(
        f"  {line}" for failure in failures for line in str(failure).splitlines()
    )
    hints = sorted({failure.hint for failure in failures if failure.hint})
    if results:
        hints.append(f"{len(results)} finished and stay cached")
    hint = "; ".join(hints) or None
    if any(isinstance(failure, StoreError) for failure in failures):
        raise StoreError(message, hint=hint)
    raise BuildError(message, hint=hint)


def need_of(store: Store, job: CompileJob) -> Need:
    """Return what the last compile of this name took, whatever its key, else an estimate by the size."""
    known = as_compiled(store.last_result(job.key.kind, job.key.name))
    if known is None:
        path = store.blob_path(job.source.program)
        return size_need(0 if path is None else path.stat().st_size)
    milliseconds = max(known.milliseconds, 1)
    cores = max(1, math.floor(known.cpu_milliseconds / milliseconds + 0.5))
    memory = math.ceil(_RESERVE * known.peak_bytes) + WORKER_BYTES
    return Need(milliseconds / 1000, memory, cores)


def size_need(stablehlo_bytes: int) -> Need:
    """Return what a program that was never compiled is expected to need, by the size of its StableHLO."""
    memory = _BASE_BYTES + _BYTES_A_BYTE * stablehlo_bytes
    seconds = _BASE_SECONDS + _SECONDS_A_BYTE * stablehlo_bytes
    return Need(seconds, math.ceil(_RESERVE * memory) + WORKER_BYTES)
