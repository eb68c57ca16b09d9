"""Compare two traces of one function: a function that is not pure has no place in a cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.mlir import ir as mlir_ir
from jax.extend.mlir.dialects import stablehlo as mlir_stablehlo

from prejit.compiler.lowering.user.traced_primitives import place_of

ir: Any = mlir_ir  # the bindings of MLIR have no types
stablehlo: Any = mlir_stablehlo


def differing_operation(first: ClosedJaxpr, second: ClosedJaxpr) -> str | None:
    """Return the first operation of a trace that another trace has not, with its line; None: they agree."""
    for one, other in zip_longest(_described(first), _described(second)):
        if one is None or other is None or one[:2] != other[:2]:
            name, _, place = other if other is not None else one
            return f"{name}{f' at {place}' if place else ''}"
    return None


def differing_line(first: bytes, second: bytes) -> str:
    """Return the first line of StableHLO in which two portable programs differ, from both."""
    for one, other in zip_longest(_lines(first), _lines(second), fillvalue="nothing"):
        if one != other:
            return f"{_short(one)}, then {_short(other)}"
    return "their form"


def _described(closed: ClosedJaxpr) -> Iterator[tuple[str, Any, str]]:
    """Yield the name of each operation, its shapes and constants, and its line in the user's code."""
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    yield from _operations(closed.jaxpr, values)


def _operations(jaxpr: Jaxpr, values: dict[Any, Any]) -> Iterator[tuple[str, Any, str]]:
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
        for value in jax.tree.leaves(
            [*equation.params.values()], is_leaf=lambda each: isinstance(each, ClosedJaxpr | Jaxpr)
        ):
            if isinstance(value, ClosedJaxpr):
                yield from _described(value)
            elif isinstance(value, Jaxpr):
                yield from _operations(value, {})


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


def _short(line: str) -> str:
    return line if len(line) <= 200 else f"{line[:200]}..."
