"""A process that lowers, as its build sees it: what both say to each other, and the client of one process.

A message is a line of JSON:

Project                                what to read; the first request
{"checked": ...}                       it was read; a Checked or null
{"declined": why}                      the process does not find what the build has: it lowers nothing
{"lower": ...}                         a Work
{"lowered": ...}                       a Done
{"error": {code, message, hint}}       an error of the user, in place of the other answers
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from prejit.compiler.base.process_errors import error_of
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.plan import Lowered, OwnFacts, PlanOptions
from prejit.compiler.store.build_cache_key import Key
from prejit.runtime.base.child_process import Child, ending
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.errors import PrejitError

_COMMAND = (sys.executable, "-P", "-m", "prejit.compiler.pipeline.lower.lowerer_child")


@dataclass(frozen=True)
class Project:
    """The input with which a process plans as its build does.

    Attributes:
        manifest: path of the manifest.
        content: digest of what the build has read there, as `manifest_digest` gives it.
        root: directory of the store.
        namespace: separates its results from those of others in the same directory.
        path: `sys.path` of the build.
        check: whether the process checks the model and the user's code for all others.
    """

    manifest: str
    content: str
    options: PlanOptions
    root: str
    namespace: str
    path: tuple[str, ...]
    check: bool = False


def manifest_digest(manifest: Manifest) -> str:
    """Return a digest of a manifest that was read from a file."""
    return digest_of(repr(manifest).encode())


@dataclass(frozen=True)
class Checked:
    """Facts read from the model and the user's code: the number of tokens, and the decoder of the user."""

    vocab_size: int | None
    own: OwnFacts | None


@dataclass(frozen=True)
class Work:
    """A unit of programs to lower.

    Attributes:
        programs: by name, the portable form of those that have one; None: it is to be made.
        chosen: whether programs with kernels get the forms of products that tables choose now; false: all
            products stay with their kernels, because forms are measured first.
    """

    programs: dict[str, Lowered | None]
    chosen: bool


@dataclass(frozen=True)
class Done:
    """A unit of programs that was lowered. Contents are in the store.

    Attributes:
        programs: the portable forms by name.
        parameters: those of the unit's function, as `content_of` describes them.
        keys: the keys of the results that were put into the store.
        notes: lines for the user.
    """

    programs: dict[str, Lowered]
    parameters: dict[str, str]
    keys: tuple[Key, ...]
    notes: tuple[str, ...] = ()


class ProcessEndedError(Exception):
    """A process ended without an answer; the text says how, as the rest of a sentence about it."""


class DeclinedError(Exception):
    """A process does not find what its build has; the text says why."""


@final
class LoweringProcess:
    """A process that lowers programs of one manifest. Its stderr is the build's."""

    def __init__(self, project: Project, *, check: bool) -> None:
        """Start the process, which begins to read the manifest and the user's code, and checks them if asked.

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
        self._child.send(asdict(replace(project, check=check)))

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
            self._checked = None if found is None else from_plain(Checked, found)
            self._is_ready = True
        return self._checked

    def lower(self, work: Work) -> Done:
        """Lower a unit of programs.

        Raises:
            PrejitError: a program cannot be lowered, or see `checked`.
            DeclinedError, ProcessEndedError: see `checked`.
        """
        self.checked()
        self._child.send({"lower": asdict(work)})
        return from_plain(Done, self._answer()["lowered"])

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
