"""The client of a worker process: one request, one answer, or an error that says how the process died."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from prejit.compiler.base.process_errors import error_of
from prejit.compiler.compile.compile_jobs import Compiled, Source
from prejit.compiler.native.products import Product
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.child_process import Child, ending
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.errors import BuildError, PrejitError

JOB_SECONDS = 3600.0
"""Default time limit of one job of a worker."""
OUTPUT_MARK = "\n    | "
"""Precedes each line of a worker's output in an error."""

_ANSWER_SECONDS = 5.0
"""Time that a worker without a usable answer has to end by itself."""
_LAST_LINES = 15
"""Maximum lines in an error of a worker's output, and of the stack with which faulthandler ends it."""
_FATAL = "Fatal Python error: "
"""Begins what faulthandler writes. Its stack begins with the innermost call."""


class WorkerKilledError(BuildError):
    """SIGKILL ended a worker, most likely because memory ran out."""


@final
class WorkerProcess:
    """A worker process of one jax and platform: one request at a time. A context manager, which ends it.

    Its stderr goes to a file, from which an error quotes the last lines.
    """

    def __init__(self, toolchain: Toolchain, store: Store, environ: Mapping[str, str]) -> None:
        """Start the process.

        Raises:
            BuildError: the process cannot be started.
        """
        self._toolchain, self._store, self._environ = toolchain, store, environ
        command = (*toolchain.command, str(store.root), toolchain.target.platform)
        try:
            self._child = Child(command, environment=toolchain.environment(environ), errors="kept")
        except OSError as error:
            raise BuildError(
                f"cannot start a worker process, {command[0]}: {error.strerror}",
                hint="try fewer workers: --jobs 1",
            ) from error

    @property
    def alive(self) -> bool:
        """Return whether it can take another request."""
        return self._child.alive

    def serves(self, toolchain: Toolchain) -> bool:
        """Return whether a toolchain's programs can be compiled in this process, whatever their target."""
        return self._toolchain.process == toolchain.process

    def compile(
        self, source: Source, toolchain: Toolchain, seconds: float = JOB_SECONDS
    ) -> Compiled:
        """Compile a program. The executable becomes a blob of the store.

        Raises:
            BuildError: the program does not compile, or the worker died.
            StoreError: the worker cannot read or write the store; or XLA_FLAGS names a file that cannot be
                read.
        """
        request = {
            "flags": self._flags(toolchain),
            "program": source.program,
            "kernels": None if source.kernels is None else source.kernels.digest,
            "calls": dict(source.calls),
            "machine": toolchain.machine(source.platforms),
            "cpus": toolchain.cpus,
        }
        return from_plain(Compiled, self._ask(request, seconds))

    def measure(
        self,
        programs: Sequence[Mapping[str, Any]],
        weights: Path,
        kernels: str | None,
        seconds: float = JOB_SECONDS,
    ) -> list[int]:
        """Return the microseconds of one run of each program on this machine: see `worker_requests.measure`.

        Raises:
            BuildError: a program fails, the worker died, or all of them took longer than the limit.
        """
        request = {"programs": list(programs), "weights": str(weights), "kernels": kernels}
        return list[int](self._measured({"measure": request}, seconds))

    def measure_forms(
        self, product: Product, forms: Mapping[str, str], kernels: str, seconds: float = JOB_SECONDS
    ) -> dict[str, int]:
        """Return the nanoseconds that each form of a product takes here: see `worker_requests.measure_forms`.

        Raises:
            BuildError: a form fails, the worker died, or it took longer than the limit.
        """
        request = {"product": str(product), "forms": dict(forms), "kernels": kernels}
        return dict[str, int](self._measured({"measure_forms": request}, seconds))

    def _measured(self, request: Mapping[str, Any], seconds: float) -> Any:
        try:
            return self._ask({"flags": self._flags(self._toolchain), **request}, seconds)
        except PrejitError as error:
            raise BuildError(
                f"target {self._toolchain.target.name}: cannot measure its programs on this machine: {error}",
                hint=error.hint or "the compiler of this jax may have an error: try another jax",
            ) from error

    def _flags(self, toolchain: Toolchain) -> str:
        results = None
        if (tuned := toolchain.tuned) is not None:
            results = self._store.blob_path(self._store.put_blob(tuned.results))
        return toolchain.worker_flags(self._environ, results)

    def _ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Send a request and return the result in its answer."""
        answer = self._child.ask(request, seconds)
        answer = answer if isinstance(answer, dict) else {}
        if "result" in answer:
            return answer["result"]
        if "error" in answer:
            raise error_of(answer["error"])
        # Without an answer the process itself is gone, not only its fork that did the job.
        code = answer["exit"] if "exit" in answer else self._child.exit_code(_ANSWER_SECONDS)
        late = self._child.late
        reason, hint = _ended(code)
        if late:
            reason = f"its worker did not answer within {seconds:g} s and was killed"
            hint = "if it only needs longer, give it more time: --timeout SECONDS"
        lines = "".join(f"{OUTPUT_MARK}{line}" for line in _last_lines(self._child.errors()))
        killed = code == -signal.SIGKILL and not late
        raise (WorkerKilledError if killed else BuildError)(reason + lines, hint=hint)

    def kill(self) -> None:
        """End the process and its forks now. Safe from any thread, and again."""
        self._child.kill()

    def release(self) -> None:
        """Kill the process and close its pipes. Call it from the thread that sends requests."""
        self._child.release()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def _last_lines(output: str) -> tuple[str, ...]:
    words, fatal, stack = output.partition(_FATAL)
    texts = (words, (fatal + stack).partition("\nExtension modules: ")[0])
    said, trace = ([line.rstrip() for line in t.splitlines() if line.strip()] for t in texts)
    return (*said[-_LAST_LINES:], *trace[:_LAST_LINES])


def _ended(code: int) -> tuple[str, str]:
    """Return how a worker ended, and what to do about it."""
    reason = f"its worker {ending(code)}"
    if code >= 0:
        return reason, "if the last lines do not show the cause, report them to prejit's authors"
    if -code == signal.SIGKILL:
        return reason, "memory may have run out (see `dmesg`): try fewer workers, --jobs 1"
    return reason, "XLA crashed: try another jaxlib, or simplify the program"
