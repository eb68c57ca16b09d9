"""Child processes that answer lines of JSON, or run to their end. Each ends with all that it started."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Literal, NamedTuple, final

Errors = Literal["shown", "kept", "dropped"]
"""The place of a child's stderr: this process's, a file that an error quotes, or none."""

_LAST_BYTES = 16 << 10
"""Maximum bytes of a child's stderr that are read for an error."""
_PR_SET_PDEATHSIG = 1
"""Number of a prctl option, from linux/prctl.h."""


@final
class Child:
    """A process that answers each line of its stdin with a line of its stdout, both JSON.

    One thread sends requests; any may kill it. A context manager, which ends it.

    Attributes:
        pid: its number.
        late: whether a time limit ended it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        errors: Errors = "shown",
        own_session: bool = True,
    ) -> None:
        """Start the process, which Ctrl-C does not reach. Raise OSError where it cannot be started.

        `own_session`: it has no terminal, so that it cannot stop at ours. In a session of its own `nice` does
        nothing (sched(7)).
        """
        kept = errors == "kept"
        # release closes it
        self._errors = tempfile.TemporaryFile() if kept else open(os.devnull, "w+b")  # noqa: SIM115
        self._start = 0
        self._lock = threading.Lock()
        self._killed = self.late = False
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if errors == "shown" else self._errors,
                env=environment,
                start_new_session=own_session,
                process_group=None if own_session else 0,
            )
        except OSError:
            self._errors.close()
            raise
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether it can take another request."""
        return not self._killed and self._process.poll() is None

    def ask(self, request: Any, seconds: float | None = None) -> Any:
        """Send a request and return its answer, as `answer` does. After `seconds` the process is killed."""
        if seconds is None:
            self.send(request)
            return self.answer()
        timer = threading.Timer(seconds, self._end_late)  # it may not even read the request
        timer.daemon = True
        timer.start()
        try:
            return self.ask(request)
        finally:
            timer.cancel()

    def send(self, request: Any) -> None:
        """Send a request. Where the process has ended, its answer is missing, too."""
        assert self._process.stdin is not None
        self._start = os.fstat(self._errors.fileno()).st_size
        line = json.dumps(request).encode() + b"\n"
        with suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the next answer; None: the process ended before or within it, or wrote something else."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        with suppress(ValueError):
            return json.loads(line) if line.endswith(b"\n") else None
        return None

    def exit_code(self, seconds: float = 5.0) -> int:
        """Return its exit code, or minus its signal. After so many seconds more it is killed."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def errors(self) -> str:
        """Return the end of what it wrote to its stderr since the last request, where that is kept."""
        return _last(self._errors, self._start)

    def kill(self) -> None:
        """End it now, with all that it started. Safe from any thread, and again."""
        with self._lock:
            if not self._killed:
                self._killed = True  # later its number may be another's
                _kill_group(self.pid)

    def _end_late(self) -> None:
        self.late = True
        self.kill()

    def release(self) -> None:
        """Kill it and close its pipes. Call it from the thread that sends requests."""
        self.kill()
        with suppress(OSError), self._process:  # closes the pipes and waits
            pass
        self._errors.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


class ChildResult(NamedTuple):
    """The end of a process that `run_child` ran: its stdout and the end of its stderr.

    `code`: its exit code, or minus its signal; None: the time limit ended it.
    """

    code: int | None
    output: bytes
    errors: str


def run_child(
    command: Sequence[str],
    content: bytes = b"",
    *,
    seconds: float | None = None,
    most_bytes: int = -1,
    **options: Any,
) -> ChildResult:
    """Run a process to its end, in a session of its own, and kill what it started.

    `content` is its stdin. After `seconds` it is killed. At most `most_bytes` of its stdout are read (-1:
    all). Other options are those of subprocess.Popen.

    Raises:
        OSError: it cannot be started.
    """
    # Files in memory and no pipes: a process that it leaves behind would keep these open.
    with (
        open(os.memfd_create("output"), "w+b") as output,
        open(os.memfd_create("errors"), "w+b") as kept,
    ):
        options = {"stderr": kept, "start_new_session": True, **options}
        code: int | None = None
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, **options) as process:
            try:
                process.communicate(content, timeout=seconds)
                code = process.returncode
            except subprocess.TimeoutExpired:
                pass
            finally:
                _kill_group(process.pid)
        output.seek(0)
        return ChildResult(code, output.read(most_bytes), _last(kept, 0))


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _last(file: BinaryIO, start: int) -> str:
    # A read at a place: the child writes where the file that both have open stands.
    at = max(start, os.fstat(file.fileno()).st_size - _LAST_BYTES)
    return os.pread(file.fileno(), _LAST_BYTES, at).decode("utf-8", "replace")


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty; empty: there is none."""
    return text.strip().rpartition("\n")[2]


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(code: int) -> str:
    """Return how a process ended, as the rest of a sentence, from its exit code or minus its signal."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


# ---------------------------------------------------------------------- in the process


def take_stdout() -> BinaryIO:
    """Return the stdout of this process for its answers. What anything else prints goes to its stderr."""
    answers = open(os.dup(1), "wb")  # noqa: SIM115 (open until the process ends)
    os.dup2(2, 1)
    return answers


def write_answer(answers: BinaryIO, answer: Any) -> None:
    """Write an answer in a line of its own."""
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def end_with_parent() -> None:
    """Let this process end when the thread that started it ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
