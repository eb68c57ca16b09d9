"""Update an array row after row: unrolled for few rows, a loop for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax

UNROLLED_ROWS = 64
"""Maximum number of rows that are unrolled. The time to compile a chain of updates grows with the square of
its length: decode of 128 rows takes 107 s, with a loop 10 s."""

T = TypeVar("T")


def each_row(rows: int, update: Callable[[int | jax.Array, T], T], values: T) -> T:
    """Return `update(row, values)` for one row after another.

    Args:
        rows: the number of rows.
        update: returns the values with one row changed, in place if they are donated.
        values: the arrays to update.
    """
    if rows > UNROLLED_ROWS:
        looped: T = lax.fori_loop(0, rows, update, values)
        return looped
    for row in range(rows):
        values = update(row, values)
    return values
