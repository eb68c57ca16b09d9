"""The part of `prejit record --untraced` that runs in the processes of the program.

`prejit.runtime.recorded.hook` loads it by its path. It imports jax, Python's library, itself and it.
"""

from __future__ import annotations

from typing import Any


def call_recorder(*arguments: Any) -> Any:
    """Return a CallRecorder, whose arguments these are."""
    from prejit.compiler.recording.hook.call_recorder import CallRecorder

    return CallRecorder(*arguments)
