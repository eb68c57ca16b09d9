"""The norm kernel against NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prejit.compiler.models.layers import forms

pytestmark = pytest.mark.usefixtures("with_kernels")


def expected(x: Any, weight: Any, bias: Any, epsilon: float, offset: float) -> Any:
    """Layer norm where there is a bias, else RMS norm."""
    wide = x.astype(np.float64)
    if bias is not None:
        wide = wide - wide.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(np.square(wide).mean(-1, keepdims=True) + epsilon)
    return wide * scale * (weight + np.float64(offset)) + (0 if bias is None else bias)


@settings(deadline=None)  # each shape is a program to compile
@given(
    rows=st.integers(0, 70),
    width=st.integers(1, 70) | st.sampled_from([768, 769, 2048]),
    mean=st.sampled_from([0.0, 30.0]),
    centred=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1 << 16),
)
def test_rows_are_normalized_whatever_their_width(
    rows: int, width: int, mean: float, centred: bool, offset: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x = (random.standard_normal((rows, width)) + mean).astype(np.float32)
    weight, bias = random.standard_normal((2, width)).astype(np.float32)
    shift = bias if centred else None
    found = forms.norm(
        jax.numpy.asarray(x),
        jax.numpy.asarray(weight),
        None if shift is None else jax.numpy.asarray(shift),
        epsilon=1e-3,
        centred=centred,
        offset=offset,
    )
    wanted = expected(x, weight, shift, 1e-3, offset)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=2e-5, atol=2e-4)


def test_a_number_that_is_none_stays_in_its_row() -> None:
    x = np.ones((3, 20), np.float32)
    x[1, 7] = np.nan
    found = np.asarray(forms.norm(jax.numpy.asarray(x), jax.numpy.ones(20), epsilon=1e-6))
    assert np.isnan(found).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(found[[0, 2]]).all()
