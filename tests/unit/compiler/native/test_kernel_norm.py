"""The norm kernel against NumPy in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from . import kernel_frames
from .kernel_frames import KernelError

EPSILON = 1e-3


def run(library, x, weight, bias, offset=0.0):
    """Layer norm where there is a bias, else RMS norm."""
    out = np.full(x.shape, np.nan, np.float32)
    arguments = [x, weight, *([] if bias is None else [bias])]
    flags = {"centred": bias is not None, "epsilon": EPSILON, "offset": offset}
    kernel_frames.call(library, "norm", arguments, [out], **flags)
    return out


def expected(x, weight, bias, offset):
    wide = x.astype(np.float64)
    if bias is not None:
        wide = wide - wide.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(np.square(wide).mean(-1, keepdims=True) + EPSILON)
    return wide * scale * (weight + np.float64(offset)) + (0 if bias is None else bias)


@settings(deadline=None, max_examples=examples(30, 100))
@given(
    rows=st.integers(0, 70),
    width=st.integers(1, 70) | st.sampled_from([768, 769, 2048]),
    mean=st.sampled_from([0.0, 30.0]),
    centred=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1 << 16),
)
def test_rows_of_any_width_are_normalized(kernels, rows, width, mean, centred, offset, seed):
    random = np.random.default_rng(seed)
    x = (random.standard_normal((rows, width)) + mean).astype(np.float32)
    weight, bias = random.standard_normal((2, width)).astype(np.float32)
    shift = bias if centred else None
    found = run(kernels, x, weight, shift, offset)
    np.testing.assert_allclose(found, expected(x, weight, shift, offset), rtol=2e-5, atol=2e-4)


def test_a_nan_stays_in_its_row_and_shapes_must_fit(kernels):
    x, weight = np.ones((3, 20), np.float32), np.ones(20, np.float32)
    x[1, 7] = np.nan
    found = run(kernels, x, weight, None)
    assert np.isnan(found).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(found[[0, 2]]).all()
    with pytest.raises(KernelError, match="a weight for each column"):
        run(kernels, x, weight[:19], None)
    with pytest.raises(KernelError, match="a float32 bias for each column"):
        run(kernels, x, weight, weight[:1])
