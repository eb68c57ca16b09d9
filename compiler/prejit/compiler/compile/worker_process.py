"""A worker process as its parent sees it: one request, one answer, or how and why it died (worker.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, final

from prejit.compiler.store.cache import Cache
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.errors import BuildError

JOB_SECONDS = 3600.0
"""How long one job of a worker may take, unless the caller says otherwise."""

_ANSWER_SECONDS = 5.0
"""How long a worker that said nothing usable may take to end by itself."""
_LAST_LINES = 15
_LAST_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker, or its fork that did the job, ended without an answer.

    Attributes:
        reason: what happened.
        hint: what to do about it.
        output: the last lines that it wrote during the job.
    """

    reason: str
    hint: str
    output: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((self.reason, *(f"    | {line}" for line in self.output)))


@final
class WorkerProcess:
    """A worker process for one target. Its stderr goes to a file, which is read after a death."""

    def __init__(self, toolchain: Toolchain, cache: Cache, environ: Mapping[str, str]) -> None:
        """Starts the process.

        Args:
            toolchain: what it compiles with, and for which target.
            cache: where portable programs come from and executables go.
            environ: environment variables that it inherits.

        Raises:
            BuildError: the process cannot be started.
            StoreError: XLA_FLAGS names a file, and it cannot be read.
        """
        self.toolchain = toolchain
        command = (*toolchain.command, str(cache.root), toolchain.target.platform)
        environment = toolchain.environment(environ)
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
        """Return whether it can take another request."""
        return not self._killed and self._process.poll() is None

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | Death:
        """Sends a request and waits for its answer.

        Args:
            request: of worker.py.
            seconds: how long the answer may take; then the process is killed.

        Returns:
            A dict with `result` or `error`, or how it died.
        """
        start = self._stderr.seek(0, os.SEEK_END)
        answer: dict[str, Any] = {}
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            # OSError: it is dead; ValueError: it died in the middle of its answer.
            with suppress(OSError, ValueError):
                answer = self._exchange(request)
        finally:
            timer.cancel()
        if "result" in answer or "error" in answer:
            return answer
        # Without an answer the process itself is gone, not only its fork that did the job.
        code = answer["exit"] if "exit" in answer else self._exit_code()
        reason, hint = _too_late(seconds) if late.is_set() else _ended(code)
        return Death(reason, hint, self._last_lines(start))

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

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        return answer if isinstance(answer, dict) else {}

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


def _too_late(seconds: float) -> tuple[str, str]:
    reason = f"its worker did not answer within {seconds:g} s and was killed"
    return reason, "if it only needs longer, give it more time: --timeout SECONDS"


def _ended(code: int) -> tuple[str, str]:
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
