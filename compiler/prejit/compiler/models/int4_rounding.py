"""Values of matrices in four bits: integers from -8 to 7, and a scale for each group of inputs.

The scale of a group is the one of a few with the least sum of squared errors. Each candidate puts the value
of the largest magnitude at -6.4 to -9.6, so that some clip it, takes the scale that fits the integers best,
and rounds it to float16. The sign of a scale is free: the integers reach further down than up. The error of
normal numbers is 8.09 % (root of the mean square); that of llama.cpp's Q4_0, of the same size, is 8.59 %.

With zero points each candidate puts the range of a group at so many steps, rounds, and takes the scale and
the zero point that fit the integers best.

With a text (`quantized_for`) values are chosen for the results on it: each input makes up for those before
it. Rounding one weight of an output changes its results by the error times that input. Inputs of a text go
together, so the weights that are rounded later can take back a part of it. Inputs are rounded in their order;
each gets the errors of all earlier ones, times coefficients that leave the least expected squared difference
of the results. A group chooses its scale when its first input is reached, by errors that are weighted with
what no later input can take back. A second pass gives each scale and each integer its best value beside all
others.

Sources: Frantar et al. 2022 (GPTQ), arXiv 2210.17323; in the form of Chee et al. 2023 (QuIP), arXiv
2307.13304, section 3, which needs one factor of the products of inputs and no inverse.

Results do not depend on the number of threads: NumPy's products of matrices do, those of XLA:CPU do not in
the forms that stand here.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax

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


_LEAST_DAMPING = 0.01
"""Minimum part of the mean square of all inputs that is added to the square of each."""
_SAMPLED = 1 / 16
"""The same part where a text has as many tokens as there are inputs: what a sample says is uncertain."""
_INPUTS = 128
"""Inputs whose errors are passed on one by one, before one product passes them to all later ones."""
_OUTPUTS = 512
"""Outputs that a thread rounds at a time, and rows of a product of inputs with inputs."""


def squares(x: Values) -> Values:
    """Return the products of inputs with inputs, summed over rows: float32 [R, in] to [in, in]."""
    by_input = np.ascontiguousarray(x.T)
    parts = range(0, len(by_input), _OUTPUTS)
    return np.concatenate([_product(by_input[at : at + _OUTPUTS], x) for at in parts])


@dataclass(frozen=True)
class Inputs:
    """How the inputs of a matrix go together on a text: U D U^T is the damped products of inputs with inputs.

    Attributes:
        passed: U without the ones on its diagonal, float32 [in, in], zeros below it: the part of the error
            of the input of a row that the input of a column gets.
        remaining: D, float32 [in]: the mean square of an input, less what the later ones say about it.
        products: the damped products, float32 [in, in].
    """

    passed: Values
    remaining: Values
    products: Values


def inputs_of(products: Values, rows: int) -> Inputs | None:
    """Return what inputs are, from their `squares` over so many rows; None: zeros, or not finite."""
    mean = float(np.diagonal(products).mean(dtype=np.float64))
    if not (np.isfinite(mean) and mean > np.finfo(np.float32).tiny and np.isfinite(products).all()):
        return None
    damping = max(_LEAST_DAMPING, _SAMPLED * len(products) / rows)
    return _factored(products / np.float32(mean), damping)


def quantized_for(
    matrix: Values, inputs: Inputs, name: str, groups: Groups
) -> tuple[Values, Values]:
    """Return the words and scales of a matrix, float32 [out, in], finite, in such groups of inputs.

    `name` is its name, for the error.

    Raises:
        CheckpointError: float16 cannot hold a scale.
    """

    def part(at: int) -> tuple[Values, ...]:
        return _rounded_for(matrix[at : at + _OUTPUTS].T, inputs, name, groups)

    with ThreadPoolExecutor(cpus()) as pool:
        parts = list(pool.map(part, range(0, len(matrix), _OUTPUTS)))
    integers, *found = (np.concatenate(each) for each in zip(*parts, strict=True))
    return int4_words.packed(integers), int4_words.packed_scales(*found)


def _factored(left: Values, damping: float) -> Inputs:
    """Return U and D of products, float32 [in, in], which it overwrites; damping is added on the diagonal."""
    count, least = len(left), np.float32(damping)
    left[np.diag_indices(count)] += least
    products = left.copy()
    factor, remaining = np.zeros_like(left), np.empty(count, np.float32)
    for end in range(count, 0, -_INPUTS):
        start = max(0, end - _INPUTS)
        panel = np.array(left[start:end, :end])  # symmetric, so that rows are columns
        for row in range(end - 1, start - 1, -1):
            column = panel[row - start, : row + 1]
            remaining[row] = max(column[row], least)
            factor[row, :row] = column[:row] / remaining[row]
            earlier = panel[: row - start, : row + 1]
            earlier -= np.outer(factor[row, start:row], column)
        scaled = factor[start:end, :start]
        if start:
            weighed = scaled * remaining[start:end, None]
            left[:start, :start] -= _product(np.ascontiguousarray(scaled.T), weighed)
    return Inputs(factor.T, remaining, products)


def _rounded_for(weights: Values, inputs: Inputs, name: str, groups: Groups) -> tuple[Values, ...]:
    """Return the integers, scales and zero points of outputs, from their weights [in, R]."""
    count, size = len(weights), groups.size
    integers, errors = np.empty(weights.shape, np.int8), np.empty(weights.shape, np.float32)
    found: list[list[Values]] = []
    scale, zero = np.zeros((2, weights.shape[1]), np.float32)
    for start in range(0, count, _INPUTS):
        end = min(start + _INPUTS, count)
        passed = inputs.passed[:end, start:end]
        wanted = np.array(weights[start:end], np.float32)
        if start:
            wanted += _product(np.ascontiguousarray(passed[:start].T), errors[:start])
        for at in range(start, end):
            place = at - start
            if at % size == 0:
                best = _before_rounding(
                    weights[at : at + size], wanted[place : place + size], passed[at:, place:]
                ).T
                if groups.zeros:
                    _, *chosen = rounded_with_zeros(best)
                    zero = chosen[1].astype(np.float32)
                else:
                    _, *chosen = rounded(best, inputs.remaining[at : at + size])
                require_finite(chosen, name)
                scale = chosen[0].astype(np.float32)
                found.append(chosen)
            divided = wanted[place] / np.where(scale == 0, 1, scale) * (scale != 0)
            nearest = np.clip(np.rint(divided + zero), -8, 7)
            integers[at], errors[at] = nearest, weights[at] - (nearest - zero) * scale
            later = wanted[place + 1 :]
            later += np.outer(passed[at, place + 1 :], errors[at])
    scales, *zeros = (np.stack(each) for each in zip(*found, strict=True))
    _improve(inputs.products, integers, errors, scales, zeros[0] if zeros else None, size)
    require_finite([scales], name)
    return integers.T, *(each.T for each in (scales, *zeros))


def _improve(
    products: Values,
    integers: Values,
    errors: Values,
    scales: Values,
    zeros: Values | None,
    size: int,
) -> None:
    """Change each scale, and then each of its integers, to the best one beside all others as they are.

    Integers and errors are [in, R], scales and zero points float16 [groups, R].
    """
    for start in range(0, len(errors), _INPUTS):
        block = np.ascontiguousarray(products[start : start + _INPUTS])
        slopes = np.array(_product(block, errors))
        for at in range(start, start + len(block), size):
            group, here = slice(at, at + size), slice(at - start, at - start + size)
            levels = integers[group].astype(np.float32)
            zero = 0 if zeros is None else zeros[at // size].astype(np.float32)
            levels -= zero
            inner = np.ascontiguousarray(block[here, group])
            square = np.einsum("ij,ij->j", levels, _product(inner, levels))
            step = np.einsum("ij,ij->j", levels, slopes[here]) / np.where(square > 0, square, 1)
            scale = scales[at // size].astype(np.float32)
            with np.errstate(over="ignore"):
                scales[at // size] = scale + step * (square > 0)
            changed = levels * (scales[at // size].astype(np.float32) - scale)
            errors[group] -= changed
            slopes -= _product(np.ascontiguousarray(block[:, group]), changed)
            scale = scales[at // size].astype(np.float32)
            divisor = np.where(scale == 0, 1, scale)
            for row in range(at, at + size):
                place = row - start
                better = np.rint(integers[row] + slopes[place] / (block[place, row] * divisor))
                better = np.clip(np.where(scale == 0, 0, better), -8, 7)
                changed = (better - integers[row]) * scale
                integers[row] = better
                errors[row] -= changed
                slopes[place + 1 :] -= np.outer(block[place + 1 :, row], changed)


def _before_rounding(weights: Values, wanted: Values, passed: Values) -> Values:
    """Return the best weights of a group [G, R] while none of it is rounded.

    They differ from those `wanted`, because an input that is not rounded takes all that it gets.
    """
    changes = wanted - weights
    for row in range(len(changes) - 1):
        changes[row + 1 :] -= np.outer(passed[row, row + 1 : len(changes)], changes[row])
    return weights + changes


def _product(a: Values, b: Values) -> Values:
    """Return the product of [R, n] and [n, C], both contiguous, on the CPU: a GPU may round to TF32."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # which is that of one thread
        return np.asarray(lax.dot_general(a, b, (((1,), (0,)), ((), ()))))
