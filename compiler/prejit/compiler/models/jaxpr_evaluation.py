"""Evaluate a jaxpr operation by operation, where some values are not arrays but stand for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

INLINED = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")
"""Primitives that call a jaxpr with their own operands."""


def evaluate(
    closed: ClosedJaxpr, arguments: Sequence[Any], apply: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Return the results of a jaxpr. `apply` returns those of one operation for its operands.

    A value is dropped when the last operation that takes it is done.
    """
    jaxpr = closed.jaxpr
    known: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True)
    )

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    last = {
        atom: place for place, each in enumerate(jaxpr.eqns) for atom in _variables(each.invars)
    }
    last |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    for place, equation in enumerate(jaxpr.eqns):
        results = apply(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
        for atom in (*_variables(equation.invars), *equation.outvars):
            if last.get(atom, place) == place:
                known.pop(atom, None)
    return [read(atom) for atom in jaxpr.outvars]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def bind(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an operation for arrays."""
    parameters = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*given, **parameters)
    return results if equation.primitive.multiple_results else [results]


def called(equation: Any) -> ClosedJaxpr:
    """Return the jaxpr that an operation of INLINED, or a loop, calls."""
    held = next(each for each in equation.params.values() if isinstance(each, ClosedJaxpr | Jaxpr))
    return held if isinstance(held, ClosedJaxpr) else ClosedJaxpr(held, ())
