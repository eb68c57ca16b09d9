"""Find the lines of a program that make its executables call Python."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakKeyDictionary

from prejit.compiler.recording.hook.jax_lowerings import hook_callbacks
from prejit.runtime.recorded.hook import jax_calls

_OURS = os.path.dirname(__file__), os.path.dirname(jax_calls.__file__)
_UNKNOWN = "a line not known"
_MOST = 3
"""Maximum number of lines in a reason."""
_EQUINOX = os.path.join("equinox", "_errors.py")
"""The file of equinox whose checks call Python: those of diffrax, lineax and optimistix, too."""


class CallbackLines:
    """Notes where the program asked for each function that an executable calls, when jax lowers it."""

    def __init__(self) -> None:
        self._lines: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

        def note(callback: Any, frames: list[tuple[str, int]]) -> None:
            self._lines[callback] = _line(frames)

        hook_callbacks(note)

    def reason(self, executable: Any) -> str | None:
        """Return why a MeshExecutable that calls Python is traced; None: it calls nothing."""
        unloaded = getattr(executable, "_unloaded_executable", None)
        callbacks = getattr(unloaded, "host_callbacks", None)
        if not callbacks:
            return None
        lines = [*dict.fromkeys(self._lines.get(each, _UNKNOWN) for each in callbacks)]
        more = f" and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
        advice = "return the value instead, or put that part under a jax.jit of its own"
        if all(_EQUINOX in each for each in lines):
            advice = "EQX_ON_ERROR=nan makes such a check give NaN instead of an error"
        return (
            f"it calls Python at {', '.join(lines[:_MOST])}{more}, so it is traced, though not compiled: "
            + advice
        )


def _line(frames: list[tuple[str, int]]) -> str:
    """Return the innermost line of the program, and the file of the library between it and jax."""
    frames = [(file, line) for file, line in frames if not file.startswith(_OURS)]
    own = [f"{os.path.basename(file)}:{line}" for file, line in frames if not _is_library(file)]
    library = os.sep.join(frames[0][0].split(os.sep)[-2:]) if frames else ""
    if not own or not _is_library(frames[0][0]):
        return own[0] if own else library or _UNKNOWN
    return f"{own[0]} (in {library})"


def _is_library(file: str) -> bool:
    return "site-packages" in file
