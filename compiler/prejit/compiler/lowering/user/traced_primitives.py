"""Find primitives in a traced function, with their lines in the user's code, and compare two traces of it.

A function that is not pure has no place in a cache.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile, zip_longest
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.mlir import ir as mlir_ir
from jax.extend.mlir.dialects import stablehlo as mlir_stablehlo

from prejit.compiler.base.python_source import PACKAGES
from prejit.runtime.base.wording import shortened

CALLBACKS = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
}
"""Primitives that call Python while the program runs, with the functions that create them."""

PALLAS = "pallas_call"

INDEXING = (
    *("gather", "dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add", "scatter-mul"),
    *("scatter-min", "scatter-max", "scatter-sub"),
)
"""Primitives that read or write arrays at places that they are given."""

_TOOLS = (3, 4)
"""Identifiers of sys.monitoring that Python reserves for no kind of tool."""
_LIBRARIES = ("jax", "jaxlib", "flax", "prejit")


def find_calls(traced: ClosedJaxpr, *primitives: str) -> list[tuple[str, str]]:
    """Find primitives in a traced function and in all functions that it calls.

    Returns:
        The name of each one found, with `file:line` in the user's code or an empty text.
    """
    return [
        (equation.primitive.name, place_of(equation))
        for equation in equations(traced.jaxpr)
        if equation.primitive.name in primitives
    ]


def source_files(traced: ClosedJaxpr) -> set[str]:
    """Return the files of all code that made the operations of a traced function."""
    tracebacks = {id(t): t for e in equations(traced.jaxpr) if (t := e.source_info.traceback)}
    codes = {id(code): code for each in tracebacks.values() for code in each.raw_frames()[0]}
    return {code.co_filename for code in codes.values()}


def called_files(traced: ClosedJaxpr, caller: str) -> set[str]:
    """Return the files of the code, called by that of the file `caller`, that made a trace's own operations.

    jax may have traced the functions inside of it before, for another caller.
    """
    tracebacks = (each.source_info.traceback for each in traced.jaxpr.eqns)
    stacks = [[code.co_filename for code in each.raw_frames()[0]] for each in tracebacks if each]
    return {file for stack in stacks for file in takewhile(lambda file: file != caller, stack)}


@contextmanager
def noting_files(found: set[str]) -> Iterator[None]:
    """Add the files of all code that this thread runs in the block, also of code that makes no operations."""
    monitoring: Any = getattr(sys, "monitoring", None)
    tool = next((i for i in _TOOLS if monitoring and monitoring.get_tool(i) is None), None)
    if tool is None:  # Python 3.11, where this costs more
        before = sys.getprofile()
        sys.setprofile(lambda frame, *_: found.add(frame.f_code.co_filename))
        try:
            yield
        finally:
            sys.setprofile(before)
        return

    tracing = threading.get_ident()

    def note(code: CodeType, _: int) -> object:
        if threading.get_ident() != tracing:  # what other threads do has nothing to do with it
            return None
        found.add(code.co_filename)
        return monitoring.DISABLE  # once for each code

    monitoring.use_tool_id(tool, "prejit")
    monitoring.register_callback(tool, monitoring.events.PY_START, note)
    monitoring.set_events(tool, monitoring.events.PY_START)
    monitoring.restart_events()
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.PY_START, None)
        monitoring.free_tool_id(tool)


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the operations of a traced function and of all functions that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for called, _ in called_by(equation):
            yield from equations(called)


def called_by(equation: Any) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    """Yield the functions that an operation calls, each with its constants."""
    held = jax.tree.leaves(
        [*equation.params.values()], is_leaf=lambda each: isinstance(each, ClosedJaxpr | Jaxpr)
    )
    for each in held:
        if isinstance(each, ClosedJaxpr | Jaxpr):
            yield (each.jaxpr, each.consts) if isinstance(each, ClosedJaxpr) else (each, ())


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
    yield from (str(entry) for entry in Path(standard).iterdir() if entry.name not in PACKAGES)


ir: Any = mlir_ir  # the bindings of MLIR have no types
stablehlo: Any = mlir_stablehlo


def differing_operation(first: ClosedJaxpr, second: ClosedJaxpr) -> str | None:
    """Return the first operation of a trace that another trace has not, with its line; None: they agree."""
    traces = (_described(each.jaxpr, each.consts) for each in (first, second))
    for one, other in zip_longest(*traces):
        if one is None or other is None or one[:2] != other[:2]:
            name, _, place = other if other is not None else one
            return f"{name}{f' at {place}' if place else ''}"
    return None


def differing_line(first: bytes, second: bytes) -> str:
    """Return the first line of StableHLO in which two portable programs differ, from both."""
    for one, other in zip_longest(_lines(first), _lines(second), fillvalue="nothing"):
        if one != other:
            return f"{shortened(one, 200)}, then {shortened(other, 200)}"
    return "their form"


def _described(jaxpr: Jaxpr, consts: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the name of each operation, its shapes and constants, and its line in the user's code."""
    values = dict(zip(jaxpr.constvars, consts, strict=False))  # an open one has no values
    for equation in jaxpr.eqns:
        constants = []
        for variable in equation.invars:
            if isinstance(variable, Literal):
                constants.append(_content(variable.val))
            elif variable in values:
                constants.append(_content(values[variable]))
        shapes = [str(variable.aval) for variable in (*equation.invars, *equation.outvars)]
        settings = [
            (name, value)
            for name, value in sorted(equation.params.items())
            if isinstance(value, int | float | str | bool | tuple) and _is_plain(value)
        ]
        yield equation.primitive.name, (shapes, constants, settings), place_of(equation)
        for called in called_by(equation):
            yield from _described(*called)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | bool)


def _content(value: Any) -> Any:
    try:
        array = np.asarray(value)
        return str(array.dtype), array.shape, array.tobytes()
    except (TypeError, ValueError):  # random keys
        return str(getattr(value, "aval", type(value)))


def _lines(portable: bytes) -> list[str]:
    with jax.interpreters.mlir.make_ir_context():
        module = stablehlo.deserialize_portable_artifact(ir.Context.current, portable)
        return [line.strip() for line in str(module).splitlines()]
