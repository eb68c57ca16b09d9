"""The kernel of row adapters against NumPy in float64, and the bits of rows without one, on every level."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from . import kernel_frames
from .kernel_frames import KernelError


def run(library, x, y, slots, down, up, layer=0, activation=0):
    out = np.full(y.shape, np.nan, np.float32)
    arguments = [x, y, np.asarray(slots, np.int32), down, up]
    flags = {"layer": layer, "activation": activation}
    kernel_frames.call(library, "row_adapters", arguments, [out], **flags)
    return out


def drawn(seed, slots, rows, positions, inputs, outputs, rank, layers=2):
    random = np.random.default_rng(seed)
    shapes = (
        *((rows, positions, inputs), (rows, positions, outputs)),
        *((slots, layers, rank, inputs), (slots, layers, rank, outputs)),
    )
    x, y, down, up = (random.standard_normal(shape, np.float32) for shape in shapes)
    return x, y, random.integers(0, slots + 1, rows), down, up


@settings(deadline=None, max_examples=examples(40, 200))
@given(
    rows=st.integers(0, 9),
    positions=st.integers(0, 6) | st.just(33),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 90) | st.sampled_from([256, 700]),
    rank=st.integers(1, 9) | st.just(16),
    layer=st.integers(0, 1),
    seed=st.integers(0, 1 << 16),
)
def test_each_row_adds_the_change_of_its_own_adapter(
    kernels, rows, positions, inputs, outputs, rank, layer, seed
):
    x, y, slots, down, up = drawn(seed, 3, rows, positions, inputs, outputs, rank)
    found = run(kernels, x, y, slots, down, up, layer)
    for row, slot in enumerate(slots):
        if slot == 0:
            np.testing.assert_array_equal(found[row], y[row])
            continue
        a, b = (stack[slot - 1, layer].astype(np.float64) for stack in (down, up))
        size = np.abs(x[row]) @ np.abs(a).T @ np.abs(b) + np.abs(y[row])
        assert (np.abs(found[row] - (y[row] + x[row] @ a.T @ b)) <= 1e-6 * size).all()
        # The bits are those of each position alone.
        alone = (x[row, :1], y[row, :1]) if positions else (x[row], y[row])
        each = run(kernels, *(part[None] for part in alone), [slot], down, up, layer)
        np.testing.assert_array_equal(each[0], found[row, : len(each[0])])


@pytest.mark.parametrize("activation", range(5))
def test_a_row_without_an_adapter_has_the_bits_of_its_plain_product(kernels, activation):
    random = np.random.default_rng(activation)
    x, weight = (random.standard_normal((rows, 40), np.float32) for rows in (5, 300))
    scale, bias = (0.02 * random.standard_normal((2, 300))).astype(np.float32)
    plain, fused = (np.empty((5, 300), np.float32) for _ in range(2))
    for number, out in ((0, plain), (activation, fused)):
        arrays = [x, (40 * weight).astype(np.int8), scale, bias]
        flags = {"bias": 1, "gated": 0, "residual": 0, "activation": number, "many_rows": 0}
        kernel_frames.call(kernels, "linear", arrays, [out], **flags)
    stacks = drawn(1, 1, 5, 1, 40, 300, 3)[3:]
    each = (x[:, None], plain[:, None], [0, 0, 1, 0, 0], *stacks)
    is_same = (run(kernels, *each, activation=activation)[:, 0] == fused).all(1)
    assert is_same.tolist() == [True, True, False, True, True]


def test_a_nan_stays_in_its_row_and_wrong_arguments_are_an_error(kernels):
    x, y, _, down, up = drawn(3, 2, 4, 2, 20, 30, 5)
    x[2, 1, 7] = np.nan
    found = run(kernels, x, y, [1, 0, 1, 2], down, up, activation=4)
    assert np.isnan(found).any(-1).tolist() == [[False, False]] * 2 + [[False, True], [False] * 2]
    for changed, message in (
        ({"slots": [0, 1, 3, 0]}, "slots that there are"),
        ({"slots": [0, -1, 0, 0]}, "slots that there are"),
        ({"slots": [0, 1]}, "of the same rows"),
        ({"layer": 2}, "number of a layer"),
        ({"activation": 5}, "an activation"),
        ({"up": np.ascontiguousarray(up.swapaxes(2, 3))}, r"B \[slots, L, rank, out\]"),
    ):
        given_ = {"x": x, "y": y, "slots": [0] * 4, "down": down, "up": up} | changed
        with pytest.raises(KernelError, match=message):
            run(kernels, **given_)
