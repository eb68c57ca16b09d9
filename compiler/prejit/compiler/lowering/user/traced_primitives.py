"""Find primitives in a traced function, with their lines in the user's code, for errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

CALLBACKS = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
}
"""Primitives that call Python while the program runs, with the functions that create them."""

PALLAS = "pallas_call"

_LIBRARIES = ("jax", "jaxlib", "flax", "prejit")
_INSTALLED = ("site-packages", "dist-packages")


def find_calls(traced: ClosedJaxpr, *primitives: str) -> list[tuple[str, str]]:
    """Find primitives in a traced function and in all functions that it calls.

    Args:
        traced: the function.
        *primitives: names of primitives.

    Returns:
        The name of each one found, with `file:line` in the user's code or an empty text.
    """
    return [
        (equation.primitive.name, place_of(equation))
        for equation in equations(traced.jaxpr)
        if equation.primitive.name in primitives
    ]


def count_operations(traced: ClosedJaxpr) -> int:
    """Return the number of operations of a traced function and of all functions that it calls."""
    return sum(1 for _ in equations(traced.jaxpr))


def source_files(traced: ClosedJaxpr) -> set[str]:
    """Return the files of all code that made the operations of a traced function."""
    tracebacks = {id(t): t for e in equations(traced.jaxpr) if (t := e.source_info.traceback)}
    codes = {id(code): code for each in tracebacks.values() for code in each.raw_frames()[0]}
    return {code.co_filename for code in codes.values()}


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the operations of a traced function and of all functions that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        inner = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda each: isinstance(each, _JAXPRS)
        )
        for each in inner:
            if isinstance(each, _JAXPRS):
                yield from equations(each.jaxpr if isinstance(each, ClosedJaxpr) else each)


_JAXPRS = (ClosedJaxpr, Jaxpr)


def place_of(equation: Any) -> str:
    """Return the innermost line outside of jax, flax, prejit and Python's standard library."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not _is_library(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def _is_library(file: str) -> bool:
    if file.startswith("<"):  # <string>, <frozen importlib._bootstrap>
        return True
    return any(Path(file).is_relative_to(place) for place in _places())


def _places() -> Iterator[str]:
    for name in _LIBRARIES:
        for place in getattr(sys.modules.get(name), "__path__", ()):
            yield str(place)
    standard = os.path.dirname(os.__file__)
    yield from (str(entry) for entry in Path(standard).iterdir() if entry.name not in _INSTALLED)
