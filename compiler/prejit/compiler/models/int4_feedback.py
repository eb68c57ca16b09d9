"""Values of a matrix in four bits, chosen for the results on a text: each input makes up for those before it.

Rounding one weight of an output changes its results by the error times that input. Inputs of a text go
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

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from prejit.compiler.base.stored_dtypes import Groups
from prejit.compiler.models import int4_rounding
from prejit.compiler.models.int4_rounding import Values
from prejit.compiler.models.layers import int4_words
from prejit.runtime.base.process_facts import cpus


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


def quantized_for(matrix: Values, inputs: Inputs, name: str, groups: Groups) -> tuple[Values, Values]:
    """Return the words and scales of a matrix, float32 [out, in], finite, in such groups of inputs.

    `name` is its name, for the error.

    Raises:
        CheckpointError: float16 cannot hold a scale.
    """

    def part(at: int) -> tuple[Values, ...]:
        return _rounded(matrix[at : at + _OUTPUTS].T, inputs, name, groups)

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


def _rounded(weights: Values, inputs: Inputs, name: str, groups: Groups) -> tuple[Values, ...]:
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
                    _, *chosen = int4_rounding.rounded_with_zeros(best)
                    zero = chosen[1].astype(np.float32)
                else:
                    _, *chosen = int4_rounding.rounded(best, inputs.remaining[at : at + size])
                int4_rounding.require_finite(chosen, name)
                scale = chosen[0].astype(np.float32)
                found.append(chosen)
            divided = wanted[place] / np.where(scale == 0, 1, scale) * (scale != 0)
            nearest = np.clip(np.rint(divided + zero), -8, 7)
            integers[at], errors[at] = nearest, weights[at] - (nearest - zero) * scale
            later = wanted[place + 1 :]
            later += np.outer(passed[at, place + 1 :], errors[at])
    scales, *zeros = (np.stack(each) for each in zip(*found, strict=True))
    _improve(inputs.products, integers, errors, scales, zeros[0] if zeros else None, size)
    int4_rounding.require_finite([scales], name)
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
