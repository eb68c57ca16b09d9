"""Tell functions whose signature decides how arguments are passed from those that only look so."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def is_plain(function: Any) -> bool:
    """Return whether an argument by position is the same as one by the name that the signature gives it.

    It is in Python's own functions, and in what jax.jit, a method or functools.partial makes of them. A
    wrapper, such as of jax.vmap, has the signature of the function inside, and may treat the two otherwise:
    `in_axes` is of arguments by position.
    """
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "lower") and hasattr(function, "__wrapped__"):  # of jax.jit
            function = function.__wrapped__
        else:
            break
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004, it is looked at
    wraps = hasattr(function, "__wrapped__") or hasattr(function, "__signature__")
    return inspect.isfunction(function) and not wraps
