"""The client of a process that lowers: one request, one answer, or an error that says how it ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

from prejit.compiler.base.process_group import ProcessGroup
from prejit.compiler.pipeline.lowerers.lowerer_messages import (
    Checked,
    Done,
    Project,
    Work,
    error_of,
    plain,
)
from prejit.runtime.errors import PrejitError

_COMMAND = (sys.executable, "-P", "-m", "prejit.compiler.pipeline.lowerers.lowerer_child")


class ProcessEndedError(Exception):
    """A process ended without an answer; the text says how, as the rest of a sentence about it."""


class DeclinedError(Exception):
    """A process does not find what its build has; the text says why."""


@final
class LoweringProcess:
    """A process that lowers programs of one manifest. Its stderr is the build's."""

    def __init__(self, project: Project, *, check: bool) -> None:
        """Start the process, which begins to read the manifest and the user's code.

        Args:
            project: what it reads.
            check: whether it also checks what it reads.

        Raises:
            ProcessEndedError: it cannot be started.
        """
        self._checked: Checked | None = None
        self._is_ready = False
        self._error: PrejitError | None = None
        try:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is ours to handle; and a group can be killed whole
            )
        except OSError as error:
            raise ProcessEndedError(f"cannot be started: {error.strerror}") from error
        self._group = ProcessGroup(self._process)
        with suppress(OSError):  # it has ended already: the answer says so
            self._send(plain(replace(project, check=check)))

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def checked(self) -> Checked | None:
        """Wait until the process has read its manifest and the code, and return what that shows.

        Returns:
            None: this process checks nothing.

        Raises:
            PrejitError: the manifest, the model or the user's code has a mistake.
            DeclinedError: the manifest is another one than the build's.
            ProcessEndedError: it has ended.
        """
        if self._error is not None:
            raise self._error
        if not self._is_ready:
            try:
                answer = self._answer()
            except PrejitError as error:
                self._error = error  # it has ended: whoever asks again gets the same error
                raise
            if "declined" in answer:
                raise DeclinedError(answer["declined"])
            found = answer["checked"]
            self._checked = None if found is None else Checked.from_plain(found)
            self._is_ready = True
        return self._checked

    def lower(self, work: Work) -> Done:
        """Lower a unit of programs.

        Raises:
            PrejitError: a program cannot be lowered, or see `checked`.
            DeclinedError, ProcessEndedError: see `checked`.
        """
        self.checked()
        with suppress(OSError):
            self._send({"lower": plain(work)})
        return Done.from_plain(self._answer()["lowered"])

    def kill(self) -> None:
        """End the process now, with those that the user's code started. Safe from any thread, and again."""
        self._group.kill()

    def release(self) -> None:
        """Kill the process and close its pipes. Call it from the thread that sends requests."""
        self._group.release()

    def _send(self, request: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()

    def _answer(self) -> Mapping[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line.endswith(b"\n"):
            self.kill()
            code = self._process.wait()
            raise ProcessEndedError(_ended(code))
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise error_of(answer["error"])
        return answer


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
