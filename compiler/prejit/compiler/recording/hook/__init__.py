"""The part of `prejit record` that runs in the processes of the program.

`prejit.runtime.recorded.hook` loads it by its path. It imports jax, Python's library, itself and it.
"""

from __future__ import annotations

from typing import Any

from prejit.compiler.recording.hook.jax_lowerings import keep_programs
from prejit.compiler.recording.hook.outer_call import outer_call


def call_recorder(*arguments: Any) -> Any:
    """Return a CallRecorder, whose arguments these are."""
    from prejit.compiler.recording.hook.call_recorder import CallRecorder

    return CallRecorder(*arguments)


__all__ = ["call_recorder", "keep_programs", "outer_call"]
