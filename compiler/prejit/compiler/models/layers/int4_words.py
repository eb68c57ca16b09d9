"""Matrices in four bits: how words hold them, in NumPy and in XLA.

    words   uint32 [tiles, in / 8, 16]     8 inputs of one output in a word, 16 outputs beside each other
    scales  float16 [tiles, groups, 16]    one for each group of 32, 64 or 128 inputs of an output
            float16 [tiles, groups, 32]    the same, then the zero point of each group

    bits of a word    28..31  24..27  20..23  16..19  12..15   8..11    4..7    0..3
    input beside 8 n       7       5       3       1       6       4       2       0

Integers are -8 .. 7, in two's complement. A value is (integer - zero point) * scale; a published zero point
is an integer, one that the build chooses any number. An output that fills up the last tile is zeros.
Scales in bfloat16, powers of two, are those of MXFP4: values are 0, 0.5, 1, 1.5, 2, 3, 4, 6, or with a sign.

The order is that of the kernel (native/kernels/linear_int4.h): a load takes the same 8 inputs of 16 outputs,
and a mask leaves four bits in each byte, which are multiplied with x in bytes: of 32 x with one scale. An
integer has 4 bits and a scale 11, so that ways of computing a product differ in how they round x, and in the
order of the sums. A zero point is multiplied with the sum of x over 32 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups

GROUP = 32
"""Inputs that are summed before a scale: the smallest group."""
TILE = 16
"""Outputs beside each other."""
IN_WORD = 8
"""Inputs in a word."""
_SHIFTS = np.arange(IN_WORD, dtype=np.int32) // 2 * 4 + np.arange(IN_WORD, dtype=np.int32) % 2 * 16
"""The lowest bit of each input of a word."""
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

Values = np.ndarray[Any, Any]


def word_shape(inputs: int, outputs: int) -> tuple[int, int, int]:
    """Return the shape of the words of a matrix."""
    return -(-outputs // TILE), inputs // IN_WORD, TILE


def scale_shape(inputs: int, outputs: int, groups: Groups = GROUPS_OF_32) -> tuple[int, int, int]:
    """Return the shape of the scales of a matrix, whose inputs are whole groups."""
    return -(-outputs // TILE), inputs // groups.size, TILE * (1 + groups.zeros)


def groups_of(words: Sequence[int], scales: Sequence[int]) -> Groups:
    """Return the groups of a matrix by the shapes of its words and scales."""
    return Groups(words[1] * IN_WORD // max(1, scales[1]), scales[2] > TILE)


def packed(integers: Values) -> Values:
    """Return integers [out, in] from -8 to 7 as words."""
    tiles, steps, _ = shape = word_shape(integers.shape[1], integers.shape[0])
    words = np.zeros((tiles * TILE, steps), np.uint32)
    halves = (integers & 15).astype(np.uint32).reshape(len(integers), steps, IN_WORD)
    for place, shift in enumerate(_SHIFTS):
        words[: len(integers)] |= halves[:, :, place] << np.uint32(shift)
    return np.ascontiguousarray(words.reshape(tiles, TILE, steps).swapaxes(1, 2)).reshape(shape)


def packed_scales(scales: Values, zeros: Values | None = None) -> Values:
    """Return scales [out, groups], float16 or bfloat16, as a bundle stores them, and zero points."""
    if zeros is not None:
        return np.concatenate([packed_scales(scales), packed_scales(zeros)], axis=2)
    tiles, groups = -(-len(scales) // TILE), scales.shape[1]
    is_e2m1 = scales.dtype == ml_dtypes.bfloat16
    whole = np.zeros((tiles * TILE, groups), scales.dtype if is_e2m1 else np.float16)
    whole[: len(scales)] = scales
    return np.ascontiguousarray(whole.reshape(tiles, TILE, groups).swapaxes(1, 2))


def unpacked(words: Values, scales: Values, outputs: int) -> Values:
    """Return the matrix that words and scales hold, float32 [out, in]."""
    shifted = words.view(np.int32)[:, :, None, :] << (28 - _SHIFTS)[:, None]
    integers = shifted >> 28
    values = (
        _E2M1[integers & 15] if scales.dtype == ml_dtypes.bfloat16 else integers.astype(np.float32)
    )
    tiles, steps, tile = words.shape
    size = groups_of(words.shape, scales.shape).size
    wide = values.reshape(tiles, scales.shape[1], size, tile)
    if scales.shape[2] > TILE:
        wide -= scales[:, :, None, TILE:].astype(np.float32)
    wide *= scales[:, :, None, :TILE].astype(np.float32)
    by_output = wide.reshape(tiles, steps * IN_WORD, tile).swapaxes(1, 2)
    return by_output.reshape(tiles * tile, steps * IN_WORD)[:outputs]


def widened(words: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the matrix that words and scales hold, float32 [tiles, in, 16]."""
    tiles, steps, tile = words.shape
    groups = words.reshape(tiles, scales.shape[1], -1, 1, tile)
    wide, of_group = (
        _values(groups, _SHIFTS[:, None], scales),
        scales[:, :, None, None, :].astype(jnp.float32),
    )
    if scales.shape[2] > TILE:
        wide -= of_group[..., TILE:]
    wide *= of_group[..., :TILE]
    return wide.reshape(tiles, steps * IN_WORD, tile)


def summed(x: jax.Array, words: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the product of x [R, in] with the matrix, float32 [R, tiles, 16], without a float32 copy of it.

    A loop takes 32 inputs at a time. XLA:CPU, two threads, ms of 1 row times 768 x 3072 and
    2048 x 8192 (this | one reduction over all inputs | the same of int8):

        0.21, 1.4 | 8.6, 184 | 0.6, 12.6
    """
    tiles, _, tile = words.shape
    in_group = GROUP // IN_WORD
    share = groups_of(words.shape, scales.shape).size // GROUP
    grouped = words.reshape(tiles, -1, in_group, tile)
    inputs = x.reshape(len(x), -1, in_group, IN_WORD)

    def add(group: jax.Array, total: jax.Array) -> jax.Array:
        word, of_x, scale = (
            lax.dynamic_index_in_dim(each, at, 1, keepdims=False)
            for each, at in ((grouped, group), (inputs, group), (scales, group // share))
        )
        part = sum(
            _values(word[:, step], shift, scales) * of_x[:, step, place, None, None]
            for step in range(in_group)
            for place, shift in enumerate(_SHIFTS)
        )
        scale = scale.astype(jnp.float32)
        if scales.shape[2] > TILE:
            part -= of_x.sum((1, 2))[:, None, None] * scale[:, TILE:]
        return total + part * scale[:, :TILE]

    return lax.fori_loop(0, grouped.shape[1], add, jnp.zeros((len(x), tiles, tile), jnp.float32))


def summed_at_once(x: jax.Array, words: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the same as `summed` by one reduction for each row, in place of a loop, for GPUs.

    H200, microseconds of 2048 x 8192: 1 row 9.2, 8 rows 26 (all rows in one reduction: 144; widened, then a
    dot: 53). In int8: 9.3 and 46.
    """
    size = groups_of(words.shape, scales.shape).size
    by_input = jnp.repeat(scales.astype(jnp.float32), size // IN_WORD, axis=1)

    def product(row: jax.Array) -> jax.Array:
        places = row.reshape(-1, IN_WORD)
        part = sum(
            _values(words, shift, scales) * places[:, place, None]
            for place, shift in enumerate(_SHIFTS)
        )
        if scales.shape[2] > TILE:
            part -= places.sum(1)[:, None] * by_input[..., TILE:]
        return (part * by_input[..., :TILE]).sum(1)

    return jnp.stack([product(row) for row in x])


def _values(words: jax.Array, shift: Any, scales: jax.Array) -> jax.Array:
    """Return the values, in float32, that begin at a bit of each word and have such scales."""
    if scales.dtype == jnp.bfloat16:
        return _e2m1(words >> jnp.asarray(shift, jnp.uint32))
    signed = lax.bitcast_convert_type(words, jnp.int32)
    return ((signed << (28 - shift)) >> 28).astype(jnp.float32)


def _e2m1(four: jax.Array) -> jax.Array:
    """Return the values of the low four bits: a sign, two bits of an exponent, one of a mantissa."""
    mantissa, exponent = four & 1, (four >> 1) & 3
    normal = (2 + mantissa) << (jnp.maximum(exponent, 1) - 1)
    size = jnp.where(exponent == 0, mantissa, normal).astype(jnp.float32) * 0.5
    return jnp.where(four & 8, -size, size)
