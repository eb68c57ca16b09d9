"""Keep the integers and scales of a matrix that was published in few bits, where a dtype can hold them.

A published matrix is integers times scales of groups of inputs. It is kept exactly

    as int4     integers from -8 to 7, groups of a multiple of 32 inputs, scales that float16 holds
    as int8     integers from -128 to 127, one scale for each output

`nearest` keeps as much as it can of 4 bits with zero points. Any other matrix is rounded like one in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from prejit.compiler.base.stored_dtypes import StoredDtype
from prejit.compiler.models import int4_rounding
from prejit.compiler.models.layers import int4_words
from prejit.compiler.models.layers.int4_words import GROUP
from prejit.runtime.errors import CheckpointError

Values = np.ndarray[Any, Any]
_BLOCK_ELEMENTS = 1 << 20
"""Elements that are rounded at a time, in memory in float32."""


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


def integers_of(rows: object) -> Integers | None:
    """Return a matrix as it was published; None: not as integers and scales."""
    return rows.integers() if isinstance(rows, PublishedInFewBits) and rows.form else None


def kept(found: Integers, stored: StoredDtype, contracted: int) -> tuple[Values, Values] | None:
    """Return the integers and scales of a matrix as they are stored; None: it must be rounded.

    Args:
        found: the matrix.
        stored: the dtype.
        contracted: the axis of the inputs in the module's matrix.
    """
    if stored.words is not None:
        in_groups = _in_groups(found)
        if in_groups is None or found.values.min(initial=0) < -8 or found.values.max(initial=0) > 7:
            return None
        return int4_words.packed(found.values), int4_words.packed_scales(in_groups)
    first = found.scales[..., :1]
    are_equal = (found.scales == first).all() and np.isfinite(first).all()
    if stored.largest is None or not are_equal:
        return None
    values = found.values if contracted == found.values.ndim - 1 else found.values.swapaxes(-1, -2)
    return np.ascontiguousarray(values), np.ascontiguousarray(first[..., 0])


def kept_experts(found: Integers, stored: StoredDtype) -> tuple[Values, Values] | None:
    """Return the words and scales of matrices of experts; None: one must be rounded."""
    each = []
    for values, scales in zip(found.values, found.scales, strict=True):
        if (one := kept(Integers(values, scales), stored, 1)) is None:
            return None
        each.append(one)
    return np.stack([words for words, _ in each]), np.stack([scales for _, scales in each])


@runtime_checkable
class PublishedAsMXFP4(Protocol):
    """Matrices of experts that were published as MXFP4, or other ones from such a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices."""
        ...

    def mxfp4(self, expert: int) -> tuple[Values, Values] | None:
        """Return the elements of an expert, uint8 [out, in], and bfloat16 scales [out, in / 32]."""
        ...


def kept_mxfp4(rows: object, name: str) -> tuple[Values, Values]:
    """Return matrices of experts as words and scales, exactly.

    Raises:
        CheckpointError: they were not published as MXFP4, although config.json says so.
    """
    words, scales = [], []
    if isinstance(rows, PublishedAsMXFP4):
        for expert in range(rows.shape[0]):
            if (found := rows.mxfp4(expert)) is not None:
                words.append(int4_words.packed(found[0]))
                scales.append(int4_words.packed_scales(found[1]))
        if len(words) == rows.shape[0]:
            return np.stack(words), np.stack(scales)
    raise CheckpointError(
        f"{name}: expected a matrix in MXFP4, as quantization_config in config.json says, found floats",
        hint="take config.json and the weights from one checkpoint",
    )


def nearest(found: Integers) -> tuple[Values, Values] | None:
    """Return a matrix whose integers four bits do not hold as words and scales; None: it has other groups.

    With a zero point integers go from -15 to 15, but those of 32 inputs often fit after a change of sign.
    Each group keeps its scale if no other one is better, and clips what does not fit.
    """
    in_groups = _in_groups(found)
    if in_groups is None:
        return None
    outputs, inputs = found.values.shape
    integers, scales = np.empty((outputs, inputs), np.int8), np.empty_like(in_groups)
    step = max(1, _BLOCK_ELEMENTS // inputs)
    for at in range(0, outputs, step):
        values = found.values[at : at + step].reshape(-1, GROUP).astype(np.float32)
        scale = in_groups[at : at + step].reshape(-1)
        wide = values * scale.astype(np.float32)[:, None]
        best, best_scale = int4_rounding.rounded(wide)
        least = _squared(best * best_scale.astype(np.float32)[:, None] - wide)
        for sign in (-1, 1):
            clipped = np.clip(sign * values, -8, 7)
            error = _squared((sign * clipped - values) * scale.astype(np.float32)[:, None])
            is_better = error <= least
            best = np.where(is_better[:, None], clipped, best).astype(np.int8)
            best_scale = np.where(is_better, sign * scale, best_scale)
            least = np.minimum(error, least)
        integers[at : at + step] = best.reshape(-1, inputs)
        scales[at : at + step] = best_scale.reshape(-1, in_groups.shape[1])
    return int4_words.packed(integers), int4_words.packed_scales(scales)


def _squared(errors: Values) -> Values:
    found: Values = np.einsum("ij,ij->i", errors, errors)
    return found


def _in_groups(found: Integers) -> Values | None:
    """Return the scale of each 32 inputs in float16, which must hold it; None: groups are others."""
    groups, inputs = found.scales.shape[-1], found.values.shape[-1]
    with np.errstate(over="ignore"):
        scales = found.scales.astype(np.float16)
    fits = inputs % groups == 0 and inputs // groups % GROUP == 0 and found.values.ndim == 2
    is_equal = np.array_equal(scales.astype(np.float32), found.scales)
    if not (fits and is_equal and np.isfinite(scales).all()):  # rows refuse what is infinite
        return None
    return np.repeat(scales, inputs // groups // GROUP, axis=1)
