"""The kernel that chooses a greedy token, against NumPy: the same place, whatever threads do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from . import kernel_frames
from .kernel_frames import KernelError


def run(library, values, bias):
    found = np.full(len(values), -7, np.int32)
    kernel_frames.call(library, "first_largest", [values, bias], [found])
    return found.tolist()


def expected(values, bias):
    sums, width = values + bias, values.shape[1]
    if width == 0:
        return [0] * len(values)
    largest = sums.max(-1)  # NaN if one is
    return np.where(np.isfinite(largest), sums.argmax(-1), width).tolist()


@settings(deadline=None, max_examples=examples(60, 300))
@given(
    rows=st.integers(0, 9),
    width=st.integers(0, 70) | st.sampled_from([16383, 16384, 16385, 50257]),
    levels=st.sampled_from([2, 1 << 20]),
    special=st.lists(
        st.tuples(
            *(st.integers(0, 1 << 30), st.sampled_from([np.inf, -np.inf, np.nan, 9.0, -0.0]))
        ),
        max_size=4,
    ),
    forbidden=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1 << 16),
)
def test_the_first_of_the_largest_sums_is_found(
    kernels, rows, width, levels, special, forbidden, seed
):
    random = np.random.default_rng(seed)
    values = (random.integers(0, levels, (rows, width)) / levels).astype(np.float32)
    bias = np.where(random.random((rows, width)) < forbidden, -np.inf, 0).astype(np.float32)
    for place, value in special if values.size else ():
        values.flat[place % values.size] = value
    with np.errstate(invalid="ignore"):
        wanted = expected(values, bias)
    assert run(kernels, values, bias) == wanted


def test_shapes_must_fit(kernels):
    values = np.zeros((2, 3), np.float32)
    with pytest.raises(KernelError, match="values and bias of one shape"):
        run(kernels, values, values[:1])
