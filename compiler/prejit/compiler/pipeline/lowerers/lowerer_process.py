"""The client of a process that lowers: one request, one answer, or an error that says how it ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

from prejit.compiler.pipeline.lowerers.lowerer_messages import (
    Checked,
    Done,
    Project,
    Work,
    error_of,
    plain,
)
from prejit.runtime.base.child_process import Child, ending
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
            self._child = Child(_COMMAND)
        except OSError as error:
            raise ProcessEndedError(f"cannot be started: {error.strerror}") from error
        self._child.send(plain(replace(project, check=check)))

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._child.pid

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
        self._child.send({"lower": plain(work)})
        return Done.from_plain(self._answer()["lowered"])

    def kill(self) -> None:
        """End the process now, with those that the user's code started. Safe from any thread, and again."""
        self._child.kill()

    def release(self) -> None:
        """Kill the process and close its pipes. Call it from the thread that sends requests."""
        self._child.release()

    def _answer(self) -> Mapping[str, Any]:
        answer: Mapping[str, Any] | None = self._child.answer()
        if answer is None:
            raise ProcessEndedError(ending(self._child.exit_code()))
        if "error" in answer:
            raise error_of(answer["error"])
        return answer
