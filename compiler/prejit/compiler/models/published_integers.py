"""Keep the integers and scales of a matrix that was published in few bits, where a dtype can hold them.

A published matrix is integers times scales of groups of inputs. It is kept exactly

    as int4     integers from -8 to 7, groups of a multiple of 32 inputs, scales that float16 holds
    as int8     integers from -128 to 127, one scale for each output

Any other is rounded like a matrix in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from prejit.compiler.base.stored_dtypes import StoredDtype
from prejit.compiler.models.layers import int4_words
from prejit.compiler.models.layers.int4_words import GROUP

Values = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Integers:
    """A matrix, or matrices of experts, as integers and scales: the values are their products.

    Attributes:
        values: int8 [..., out, in].
        scales: float32 [..., out, groups]. A group is in / groups inputs beside each other.
    """

    values: Values
    scales: Values


def joined(parts: Sequence[Sequence[Integers | None]]) -> Integers | None:
    """Return matrices of experts, whose outputs are joined, as one; None: one is no such product."""
    rows = []
    for matrices in parts:
        whole = [matrix for matrix in matrices if matrix is not None]
        if len(whole) < len(matrices) or len({each.scales.shape[1] for each in whole}) != 1:
            return None
        values = np.concatenate([each.values for each in whole])
        rows.append((values, np.concatenate([each.scales for each in whole])))
    if len({scales.shape for _, scales in rows}) != 1:
        return None
    return Integers(np.stack([values for values, _ in rows]), np.stack([s for _, s in rows]))


@runtime_checkable
class PublishedInFewBits(Protocol):
    """Rows of a matrix that may have been published in few bits."""

    @property
    def form(self) -> str:
        """How it was published, in words; empty: as floats."""
        ...

    def integers(self) -> Integers | None:
        """Return it as integers and scales; None: it is no such product."""
        ...


def has_few_bits(rows: object) -> bool:
    """Return whether a matrix was published in few bits."""
    return isinstance(rows, PublishedInFewBits) and bool(rows.form)


def kept(rows: object, stored: StoredDtype, contracted: int) -> tuple[Values, Values] | None:
    """Return the integers and scales of a matrix as they are stored; None: it must be rounded.

    Args:
        rows: the matrix.
        stored: the dtype.
        contracted: the axis of the inputs in the module's matrix.
    """
    if not stored.has_scales or not isinstance(rows, PublishedInFewBits):
        return None
    found = rows.integers()
    if found is None:
        return None
    if stored.words is not None:
        return _as_words(found)
    first = found.scales[..., :1]
    if stored.largest is None or not np.array_equal(found.scales, first + 0 * found.scales):
        return None
    values = found.values if contracted == found.values.ndim - 1 else found.values.swapaxes(-1, -2)
    return np.ascontiguousarray(values), np.ascontiguousarray(first[..., 0])


def _as_words(found: Integers) -> tuple[Values, Values] | None:
    """Return a matrix as int4_words.py has it; None: it does not fit."""
    groups, inputs = found.scales.shape[-1], found.values.shape[-1]
    with np.errstate(over="ignore"):
        scales = found.scales.astype(np.float16)
    fits = inputs // groups % GROUP == 0 and inputs % groups == 0 and found.values.ndim == 2
    if (
        not fits
        or found.values.min(initial=0) < -8
        or found.values.max(initial=0) > 7
        or not np.array_equal(scales.astype(np.float32), found.scales)
    ):
        return None
    each = np.repeat(scales, inputs // groups // GROUP, axis=1)
    return int4_words.packed(found.values), int4_words.packed_scales(each)
