"""Values of matrices in four bits: integers from -8 to 7, and a scale for each group of inputs.

The scale of a group is the one of a few with the least sum of squared errors. Each candidate puts the value
of the largest magnitude at -6.4 to -9.6, so that some clip it, takes the scale that fits the integers best,
and rounds it to float16. The sign of a scale is free: the integers reach further down than up. The error of
normal numbers is 8.09 % (root of the mean square); that of llama.cpp's Q4_0, of the same size, is 8.59 %.

With zero points each candidate puts the range of a group at so many steps, rounds, and takes the scale and
the zero point that fit the integers best.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.models.layers import int4_words
from prejit.compiler.models.layers.int4_words import GROUP, IN_WORD, TILE
from prejit.runtime.base.process_facts import cpus
from prejit.runtime.errors import CheckpointError

Values = np.ndarray[Any, Any]

LEAST_INPUTS = 2 * GROUP
"""Minimum inputs of a matrix in four bits."""
LEAST_ELEMENTS = 1 << 12
"""Minimum elements of a matrix in four bits: a smaller one would save less than 2 KB."""
_PLACES = tuple(-place / 5 for place in range(32, 49, 2))
"""The places of the largest value that are tried."""
_STEPS = (14.0, 14.7, 15.4, 16.1, 16.8, 17.5)
"""The numbers of steps from the least to the greatest value that are tried, with zero points."""
_LEAST_STEP = 1 / 32
"""Minimum scale, as a share of the range: two values do not make a smaller one."""
_NARROWEST = 1 / 64
"""Minimum range of a group, as a share of its largest value, so that float16 holds the zero point."""
_BLOCK_ELEMENTS = 1 << 18
"""Elements that a thread rounds at a time: their arrays, some 10 MB, stay in a processor's cache."""
_MOST_THREADS = 8
"""Maximum threads that round a matrix: more would wait for the disk, and take memory."""


class Rows(Protocol):
    """An array whose rows may be read when they are used. A NumPy array is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        ...

    def __getitem__(self, part: slice, /) -> Values:
        """Return a slice of the first axis."""
        ...


def fits(inputs: int, outputs: int) -> bool:
    """Return whether a matrix is stored in four bits: whole groups, and large enough."""
    large = inputs >= LEAST_INPUTS and inputs * outputs >= LEAST_ELEMENTS
    return inputs % GROUP == 0 and large


def rounded(groups: Values, weights: Values | None = None) -> tuple[Values, Values]:
    """Return the integers (int8) and scales (float16, without the last axis) of groups, float32 [..., G].

    Scales beyond float16 are infinite. An error is half a scale at most, or that of a value which is clipped.
    `weights` are those of the squared errors, float32 [G]; None: they count alike.
    """
    # One order of sums for any block.
    flat = np.ascontiguousarray(groups).reshape(-1, groups.shape[-1])
    largest = np.take_along_axis(flat, np.abs(flat).argmax(1)[:, None], 1)
    largest = np.where(np.abs(largest) < np.finfo(np.float32).tiny, 1, largest)
    found, best = np.zeros((2, len(flat)), np.float32)
    unit = flat / largest  # of a size whose squares float32 can hold
    for place in _PLACES:
        integers = np.clip(np.rint(unit * place), -8, 7)
        weighed = integers if weights is None else integers * weights
        products, total = (np.einsum("ij,ij->i", each, weighed) for each in (unit, integers))
        fitting = products / np.where(total > 0, total, 1)
        gained = products * fitting  # the sum of squares minus that of the errors
        is_better = gained > best
        best, found = np.where(is_better, gained, best), np.where(is_better, fitting, found)
    with np.errstate(over="ignore"):
        scales = (found * largest[:, 0]).astype(np.float16)
    wide = scales.astype(np.float32)[:, None]
    divided = flat / np.where(wide == 0, 1, wide) * (wide != 0)
    integers = np.clip(np.rint(divided), -8, 7).astype(np.int8)
    return integers.reshape(groups.shape), scales.reshape(groups.shape[:-1])


def rounded_with_zeros(groups: Values) -> tuple[Values, Values, Values]:
    """Return integers, scales and zero points (float16) of groups: as `rounded`."""
    flat = np.ascontiguousarray(groups).reshape(-1, groups.shape[-1])
    size, least = np.float32(flat.shape[1]), flat.min(1)
    peak = np.maximum(np.abs(least), np.abs(flat.max(1)))
    width = np.maximum(flat.max(1) - least, peak * np.float32(_NARROWEST))
    width = np.where(width < np.finfo(np.float32).tiny, 1, width)
    unit = (flat - least[:, None]) / width[:, None]
    total = unit.sum(1)
    found, offset = np.full(len(flat), 1 / 15, np.float32), np.zeros(len(flat), np.float32)
    best = np.zeros(len(flat), np.float32)
    for steps in _STEPS:
        integers = np.clip(np.rint((unit - np.float32(0.5)) * steps + np.float32(7.5)), 0, 15)
        first, second = integers.sum(1), np.einsum("ij,ij->i", integers, integers)
        products = np.einsum("ij,ij->i", unit, integers)
        spread = size * second - first * first
        divisor = np.where(spread > 0, spread, 1)
        scale = (size * products - first * total) / divisor
        added = (second * total - first * products) / divisor
        gained = scale * products + added * total  # the sum of squares minus that of the errors
        is_better = (gained > best) & (spread > 0) & (scale > _LEAST_STEP)
        best = np.where(is_better, gained, best)
        found, offset = np.where(is_better, scale, found), np.where(is_better, added, offset)
    with np.errstate(over="ignore"):
        scales = (found * width).astype(np.float16)
    wide = scales.astype(np.float32)
    divisor = np.where(wide == 0, 1, wide)
    with np.errstate(over="ignore", invalid="ignore"):
        zeros = (-8 - (offset * width + least) / divisor).astype(np.float16)
        divided = flat / divisor[:, None] * (wide != 0)[:, None] + zeros.astype(np.float32)[:, None]
        integers = np.clip(np.rint(divided), -8, 7).astype(np.int8)
    shape = groups.shape[:-1]
    return integers.reshape(groups.shape), scales.reshape(shape), zeros.reshape(shape)


def quantized(
    values: Rows, contracted: int, name: str, groups: Groups = GROUPS_OF_32
) -> tuple[Values, Values]:
    """Return the words and the scales of a matrix (layers/int4_words.py).

    Args:
        values: float32 [out, in], or [in, out]; finite. It is read by blocks of rows.
        contracted: the axis of the inputs.
        name: its name, for the error.
        groups: the groups of its inputs.

    Raises:
        CheckpointError: float16 cannot hold a scale.
    """
    inputs, outputs = values.shape[contracted], values.shape[1 - contracted]
    words = np.zeros(int4_words.word_shape(inputs, outputs), np.uint32)
    scales = np.zeros(int4_words.scale_shape(inputs, outputs, groups), np.float16)
    size = groups.size
    unit, others = (TILE, inputs) if contracted else (size, outputs)
    step = max(1, _BLOCK_ELEMENTS // (unit * others)) * unit

    def fill(at: int) -> None:
        part = values[at : min(at + step, values.shape[0])]
        part = part if contracted else part.T
        grouped = part.reshape(len(part), -1, size)
        integers, *found = rounded_with_zeros(grouped) if groups.zeros else rounded(grouped)
        require_finite(found, name)
        into = (
            (slice(at // TILE, -(-(at + len(part)) // TILE)), slice(None))
            if contracted
            else (slice(None), slice(at // IN_WORD, (at + part.shape[1]) // IN_WORD))
        )
        words[into] = int4_words.packed(integers.reshape(part.shape))
        into = (
            into if contracted else (slice(None), slice(at // size, at // size + grouped.shape[1]))
        )
        scales[into] = int4_words.packed_scales(*found)

    with ThreadPoolExecutor(min(cpus(), _MOST_THREADS)) as pool:  # NumPy computes without the GIL
        list(pool.map(fill, range(0, values.shape[0], step)))
    return words, scales


def require_finite(found: Sequence[Values], name: str) -> None:
    """Check the scales and zero points of a matrix.

    Raises:
        CheckpointError: float16 cannot hold one.
    """
    if not all(np.isfinite(each).all() for each in found):
        raise CheckpointError(
            f"{name}: expected values up to 390,000, as four bits with a float16 scale can hold, "
            "found a larger one",
            hint='build it with dtype = "int8"',
        )


def quantized_experts(values: Rows, name: str) -> tuple[Values, Values]:
    """Return the words and the scales of the matrices of experts, [E, out, in], read one by one.

    `name` and errors are as for `quantized`.
    """
    each = [quantized(values[e : e + 1][0], 1, name) for e in range(values.shape[0])]
    return np.stack([words for words, _ in each]), np.stack([scales for _, scales in each])


@dataclass(frozen=True)
class WidenedExperts:
    """The matrices of experts in four bits, whose rows are float32 [out, in]; `words`, `scales` as stored."""

    words: Values
    scales: Values
    outputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the published matrices."""
        return (len(self.words), self.outputs, self.words.shape[2] * IN_WORD)

    def __getitem__(self, part: slice) -> Values:
        """Return a slice of the experts."""
        found = zip(self.words[part], self.scales[part], strict=True)
        matrices = [int4_words.unpacked(words, scales, self.outputs) for words, scales in found]
        return np.stack(matrices) if matrices else np.zeros((0, *self.shape[1:]), np.float32)


@dataclass(frozen=True)
class WidenedWords:
    """A matrix in four bits whose rows are float32, as those of the published one.

    Attributes:
        words, scales: the matrix as it is stored.
        outputs: its outputs; the last tile may have more.
        contracted: the axis of the inputs in the published matrix.
    """

    words: Values
    scales: Values
    outputs: int
    contracted: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the published matrix."""
        inputs = self.words.shape[1] * IN_WORD
        return (self.outputs, inputs) if self.contracted else (inputs, self.outputs)

    def __getitem__(self, part: slice) -> Values:
        """Return a slice of the first axis."""
        start, end, _ = part.indices(self.shape[0])
        group = int4_words.groups_of(self.words.shape, self.scales.shape).size
        unit = TILE if self.contracted else group
        first, last = start // unit, -(-end // unit)
        if self.contracted:
            wide = int4_words.unpacked(
                self.words[first:last], self.scales[first:last], (last - first) * TILE
            )
            return wide[start - first * unit : end - first * unit]
        steps = slice(first * group // IN_WORD, last * group // IN_WORD)
        words = np.ascontiguousarray(self.words[:, steps])
        wide = int4_words.unpacked(words, self.scales[:, first:last], self.outputs).T
        return wide[start - first * unit : end - first * unit]
