"""Products of tokens with their experts have the bits of a linear layer of each expert, on every level."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.compiler.models.layers import int4_words

from . import kernel_frames
from .kernel_frames import KernelError

INT4 = "int4"
PLAIN = {"bias": 0, "gated": 0, "activation": 0}


def stored(rng, dtype, outputs, inputs):
    """Return the arrays of a matrix."""
    if dtype == INT4:
        integers = rng.integers(-8, 8, (outputs, inputs)).astype(np.int8)
        scales = rng.standard_normal((outputs, inputs // int4_words.GROUP)).astype(np.float16)
        return [int4_words.packed(integers), int4_words.packed_scales(scales)]
    if dtype == np.int8:
        scale = rng.uniform(0.001, 0.02, outputs).astype(np.float32)
        return [rng.integers(-128, 128, (outputs, inputs)).astype(np.int8), scale]
    return [rng.standard_normal((outputs, inputs), np.float32).astype(dtype)]


def one(library, x, matrix, bias, *, gated, activation, usual):
    """Return the product of a row with one matrix, as a linear layer computes it among so many rows."""
    each = [np.split(array, 2) if gated else [array] for array in [*matrix, bias]]
    arrays = [np.ascontiguousarray(array) for part in zip(*each, strict=True) for array in part]
    out = np.full((usual, bias.size // (1 + gated)), np.nan, np.float32)
    flags = {"bias": 1, "gated": gated, "residual": 0, "activation": activation, "many_rows": 0}
    rows = np.repeat(x[None], usual, axis=0)
    kernel_frames.call(library, "linear", [rows, *arrays], [out], **flags)
    return out[0]


@settings(max_examples=examples(25, 100), deadline=None)
@given(data=st.data())
def test_a_token_gets_other_bits_than_from_a_linear_layer_of_its_expert(kernels, data):
    draw = data.draw
    dtype = draw(st.sampled_from((np.float32, ml_dtypes.bfloat16, np.int8, INT4)))
    gated, has_bias, by_pair = (draw(st.booleans()) for _ in range(3))
    experts, inputs = draw(st.integers(1, 6)), draw(st.integers(1, 90))
    outputs = draw(st.integers(1, 40) | st.integers(120, 400))
    if dtype == INT4:
        inputs = -(-inputs // 32) * 32
        outputs = -(-outputs // 16) * 16 if gated else outputs
    rows, chosen = draw(st.integers(0, 12) | st.integers(260, 300)), draw(st.integers(1, experts))
    flags = {"gated": gated, "activation": draw(st.integers(0, 4))}
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    matrices = [stored(rng, dtype, outputs * (1 + gated), inputs) for _ in range(experts)]
    biases = rng.standard_normal((experts, outputs * (1 + gated)), np.float32) * has_bias
    x = rng.standard_normal((rows, chosen, inputs) if by_pair else (rows, inputs), np.float32)
    # the first expert is the only one of many tokens
    order = [rng.permutation(experts) if row % 3 else np.arange(experts) for row in range(rows)]
    numbers = np.array(order, np.int32).reshape(rows, experts)[:, :chosen].copy()
    y = np.full((rows, chosen, outputs), np.nan, np.float32)
    stacked = [np.stack(arrays) for arrays in zip(*matrices, strict=True)]
    arguments = [x, numbers, *stacked, *([biases] if has_bias else [])]
    kernel_frames.call(kernels, "experts", arguments, [y], bias=has_bias, **flags)
    usual = max(1, rows * chosen // experts)
    for row, place in [(r, c) for r in range(rows) for c in range(chosen)][:: max(1, rows // 4)]:
        expert = numbers[row, place]
        token = x[row, place] if by_pair else x[row]
        expected = one(kernels, token, matrices[expert], biases[expert], usual=usual, **flags)
        np.testing.assert_array_equal(y[row, place], expected)


def test_floats_of_four_bits_are_others_than_mxfp4s(kernels):
    rng = np.random.default_rng(0)
    sizes = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([sizes, -sizes])
    elements = rng.integers(0, 16, (2, 24, 64)).astype(np.int8)
    elements[0, 0, :16] = np.arange(16)
    scales = np.exp2(rng.integers(-30, 20, (2, 24, 2))).astype(ml_dtypes.bfloat16)
    wide = values[elements] * np.repeat(scales.astype(np.float32), 32, axis=2)
    words = np.stack([*map(int4_words.packed, elements)])
    factors = np.stack([*map(int4_words.packed_scales, scales)])
    x = rng.standard_normal((3, 64)).astype(ml_dtypes.bfloat16).astype(np.float32)
    chosen, y = np.array([[0, 1]] * 3, np.int32), np.full((3, 2, 24), np.nan, np.float32)
    kernel_frames.call(kernels, "experts", [x, chosen, words, factors], [y], **PLAIN)
    expected = np.einsum("rk,enk->ren", x.astype(np.float64), wide)
    error = np.abs(y - expected) / np.einsum("rk,enk->ren", np.abs(x), np.abs(wide))
    assert error.max() < 2e-6


def test_wrong_arguments_are_an_error_and_no_crash(kernels):
    x, chosen = np.ones((2, 32), np.float32), np.array([[0, 1], [2, 0]], np.int32)
    right, words = np.ones((3, 6, 32), np.float32), np.zeros((3, 1, 4, 16), np.uint32)
    y = np.zeros((2, 2, 6), np.float32)
    kernel_frames.call(kernels, "experts", [x, chosen, right], [y], **PLAIN)
    assert (y == 32).all()
    factors = np.ones((3, 1, 1, 16), np.float16)
    for arrays, flags, message in (
        ([x, chosen + 1, right], {}, "numbers of experts that there are"),
        ([x, chosen - 1, right], {}, "numbers of experts that there are"),
        ([x[:1], chosen, right], {}, "for each token"),
        ([x, chosen, right[:, :5]], {}, r"\[experts, outputs, inputs\]"),
        ([x, chosen, right], {"gated": 1}, r"\[experts, outputs, inputs\]"),
        ([x, chosen, right[0]], {}, "a matrix for each expert"),
        ([x, chosen, right.astype(np.int16)], {}, "another dtype"),
        ([x, chosen, right.astype(np.int8)], {}, "factor for each output"),
        ([x, chosen, right], {"bias": 1}, "bias for each output"),
        ([x, chosen, right, y], {}, "fewer arguments"),
        ([x, chosen, words[:, :, :3]], {}, "expected words"),
        ([x, chosen, words, factors[:2]], {}, "expected factors"),
        ([x, chosen, words, factors], {"gated": 1}, "whole tiles"),
        ([x, chosen, right], {"activation": 5}, "activation of 0 to 4"),
    ):
        given = [np.ascontiguousarray(array) for array in arrays]
        with pytest.raises(KernelError, match=message):
            kernel_frames.call(kernels, "experts", given, [y], **{**PLAIN, **flags})
