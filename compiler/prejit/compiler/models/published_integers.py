"""Keep the integers and scales of a matrix that was published in few bits, where a dtype can hold them.

A published matrix is integers, less the zero point of a group of inputs, times the scale of the group. It is
kept

    as int4     integers of 4 bits in groups of a multiple of 32 inputs, exactly if float16 holds the scales
                and zero points; else these are rounded to float16, by one part in 2,000 at most
    as int8     integers from -128 to 127, less the zero point, with one scale for each output: exactly

Any other matrix is rounded like one in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups, StoredDtype
from prejit.compiler.models.layers import int4_words
from prejit.runtime.errors import CheckpointError

Values = np.ndarray[Any, Any]
_ROUNDING = 2.0**-11
"""Largest error of the scales of a matrix in float16, as a share of them."""
_WORST_ROUNDING = 2.0**-6
"""Largest error of one scale, as a share of the largest of its output. Rounding all anew costs more."""
_LARGEST_ZERO = 1 << 14
"""Largest zero point that is kept: more would hide the integers."""


@dataclass(frozen=True)
class Integers:
    """A matrix, or matrices of experts, as integers and scales: a value is (integer - zero point) * scale.

    Attributes:
        values: int8 [..., out, in].
        scales: float32 [..., out, groups]. A group is in / groups inputs beside each other.
        zeros: zero points, float32 like scales; None: they are 0.
    """

    values: Values
    scales: Values
    zeros: Values | None = None

    def without_zeros(self) -> Integers | None:
        """Return it with integers that zero points were taken from; None: int8 does not hold them."""
        if self.zeros is None:
            return self
        size = self.values.shape[-1] // max(1, self.zeros.shape[-1])
        values = self.values - np.repeat(self.zeros, size, axis=-1)
        integers = np.clip(values, -128, 127).astype(np.int8)
        return Integers(integers, self.scales) if np.array_equal(integers, values) else None


def joined(parts: Sequence[Sequence[Integers | None]]) -> Integers | None:
    """Return matrices of experts, whose outputs are joined, as one; None: one is no such product."""
    rows = []
    for matrices in parts:
        plain = [matrix and matrix.without_zeros() for matrix in matrices]
        whole = [matrix for matrix in plain if matrix is not None]
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
        stored: the dtype; its elements are integers.
        contracted: the axis of the inputs in the module's matrix.
    """
    plain = found.without_zeros()
    first = found.scales[..., :1]
    are_equal = (found.scales == first).all() and np.isfinite(first).all()
    if stored.largest is None or plain is None or not are_equal:
        return None
    values = plain.values if contracted == plain.values.ndim - 1 else plain.values.swapaxes(-1, -2)
    return np.ascontiguousarray(values), np.ascontiguousarray(first[..., 0])


def kept_experts(found: Integers) -> tuple[Values, Values] | None:
    """Return the words and scales of matrices of experts; None: one must be rounded."""
    if (plain := found.without_zeros()) is None:
        return None
    each = []
    for values, scales in zip(plain.values, plain.scales, strict=True):
        if (one := kept_in_words(Integers(values, scales), GROUPS_OF_32)) is None:
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


def kept_in_words(found: Integers, groups: Groups) -> tuple[Values, Values] | None:
    """Return a matrix as words and scales in these groups; None: it must be rounded.

    A scale or zero point that float16 does not hold is rounded.
    """
    plain = found if found.zeros is None or groups.zeros else found.without_zeros()
    if plain is None or plain.values.ndim != 2:
        return None
    inputs, count = plain.values.shape[-1], plain.scales.shape[-1]
    if inputs % count or inputs // count % groups.size:
        return None
    if plain.values.min(initial=0) < -8 or plain.values.max(initial=0) > 7:
        return None
    zeros = np.zeros_like(plain.scales) if plain.zeros is None else plain.zeros
    with np.errstate(over="ignore", invalid="ignore"):
        scales = plain.scales.astype(np.float16)
        errors = scales - plain.scales
    # It is NaN if one is infinite.
    if not np.linalg.norm(errors) <= _ROUNDING * np.linalg.norm(plain.scales):
        return None
    broken = np.abs(errors) > _WORST_ROUNDING * np.abs(plain.scales).max(
        1, keepdims=True, initial=0
    )
    # In the norm of all scales those of a small output hide.
    if (broken & _has_values(plain)).any():
        return None
    if np.abs(zeros).max(initial=0) > _LARGEST_ZERO:
        return None
    repeats = inputs // count // groups.size
    stored = [np.repeat(each, repeats, axis=1) for each in (scales, zeros.astype(np.float16))]
    packed = int4_words.packed_scales(stored[0], stored[1] if groups.zeros else None)
    return int4_words.packed(plain.values), packed


def _has_values(plain: Integers) -> Values:
    """Return for each group whether one of its values is not 0: bool [out, groups]."""
    outputs, count = plain.scales.shape
    values = plain.values.reshape(outputs, count, -1)
    zeros = 0 if plain.zeros is None else plain.zeros[..., None]
    return (values != zeros).any(-1)
