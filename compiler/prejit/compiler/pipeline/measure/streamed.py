"""Evaluate a function of a model's weights: each is read for one operation, and then dropped.

The function is traced once, and its jaxpr is evaluated operation by operation. So memory holds what lies
between two layers, and one weight; of a float32 matrix that is multiplied with, or of a table, a block of
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from prejit.compiler.models import narrow_matrices
from prejit.compiler.models.int4_rounding import Rows
from prejit.compiler.models.narrow_matrices import INLINED, bind, called
from prejit.compiler.models.quantizing import blocks


@dataclass(frozen=True)
class Weight:
    """An argument of a traced function that is read when it is used; `name` is that of a parameter."""

    rows: Rows
    name: str = ""


def evaluate(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a jaxpr, whose arguments are arrays and weights."""
    return list(map(_whole, narrow_matrices.evaluate(closed, arguments, apply)))


def apply(equation: Any, given: list[Any]) -> Sequence[Any]:
    """Return the results of one operation."""
    name = equation.primitive.name
    if name == "optimization_barrier":  # nothing is compiled here that it could keep apart
        return given
    if any(isinstance(each, Weight) for each in given):
        if name in INLINED:
            return evaluate(called(equation), given)
        if name == "dot_general" and (product := _product(equation, *given)) is not None:
            return [product]
        if name == "gather" and (rows := _gathered(equation, *given)) is not None:
            return [rows]
    return bind(equation, list(map(_whole, given)))


def _product(equation: Any, x: Any, matrix: Any) -> jax.Array | None:
    """Return x [..., in] times a matrix (out, in), by blocks of its rows; None: it is another product."""
    (of_x, of_matrix), batches = equation.params["dimension_numbers"]
    kind = equation.invars[1].aval
    if isinstance(x, Weight) or kind.ndim != 2 or kind.dtype != np.float32 or any(batches):
        return None
    if (*of_x, *of_matrix) != (x.ndim - 1, 1) or x.dtype != np.float32:
        return None
    parts = [
        lax.dot_general(x, matrix.rows[part], (((x.ndim - 1,), (1,)), ((), ())))
        for part in blocks(kind.shape)
    ]
    return jnp.concatenate(parts, -1)


def _gathered(equation: Any, table: Any, index: Any) -> jax.Array | None:
    """Return whole rows of a table at an index [..., 1]; None: something else is gathered."""
    numbers, shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    if isinstance(index, Weight) or equation.params["slice_sizes"] != (1, *shape[1:]):
        return None
    if (numbers.collapsed_slice_dims, numbers.start_index_map) != ((0,), (0,)):
        return None
    if len(shape) != 2 or numbers.offset_dims != (index.ndim - 1,):
        return None
    wanted, places = np.unique(np.asarray(index)[..., 0], return_inverse=True)
    if wanted.size and not 0 <= wanted[0] <= wanted[-1] < shape[0]:
        return None
    found = [table.rows[slice(each, each + 1)] for each in wanted.tolist()]
    return jnp.asarray(np.concatenate(found)[places.reshape(index.shape[:-1])])


def _whole(value: Any) -> Any:
    if not isinstance(value, Weight):
        return value
    rows = value.rows
    return jnp.asarray(rows if isinstance(rows, np.ndarray) else rows[:])
