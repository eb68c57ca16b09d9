"""Rows of a KV cache in int8, and what attention makes of them."""

import jax
import numpy as np
import pytest

from prejit.compiler.models.layers.attention import attention
from prejit.compiler.models.layers.cache_rows import read_rows, row_width, stored_rows

BLOCK = 6


def widened(rows):
    integers, factors = read_rows(rows)
    assert factors is not None
    return np.asarray(integers, np.float32) * np.asarray(factors)[..., None]


def test_a_row_of_int8_is_within_half_a_step_and_hides_nothing():
    vectors = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    rows = jax.jit(stored_rows, static_argnums=1)(vectors, "int8")
    assert (rows.dtype, rows.shape) == (np.int8, (3, 5, row_width(64, "int8")))
    step = np.abs(vectors).max(-1, keepdims=True) / 127
    assert (np.abs(widened(rows) - vectors) <= step * 0.50001).all()
    # ties to even; the largest magnitude is 127
    ties = np.float32([127, 0.5, 1.5, -0.5, -2.5, 3])
    assert np.asarray(stored_rows(ties, "int8"))[:6].tolist() == [127, 0, 2, 0, -2, 3]
    for zeros in (np.zeros(4, np.float32), np.float32([1e-31, 0, -1e-40, 0])):
        assert (np.asarray(stored_rows(zeros, "int8")) == 0).all()
    most = np.finfo(np.float32).max
    assert np.allclose(widened(stored_rows(np.float32([most, -most]), "int8")), [most, -most])
    for broken in (np.inf, -np.inf, np.nan):
        assert np.isnan(widened(stored_rows(np.float32([1, broken, 2]), "int8"))).all()


@pytest.mark.parametrize("sinks", [False, True])
def test_attention_to_int8_is_attention_to_what_it_stands_for(sinks):
    random = np.random.default_rng(1)
    query = random.standard_normal((2, BLOCK, 4, 8)).astype(np.float32)
    vectors = random.standard_normal((2, 2, 2, 16, 8)).astype(np.float32)
    layer = tuple(stored_rows(each, "int8") for each in vectors)
    positions = np.array([[4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 15, 15]], np.int32)
    options = {"window": 5, "cap": 3.0}
    options["sinks"] = np.float32([0, 1, -1, 2]) if sinks else None
    found = attention(query, layer, positions, 0.5, **options)
    expected = attention(query, tuple(map(widened, layer)), positions, 0.5, **options)
    assert np.abs(found - expected).max() < 1e-5
    exact = attention(query, tuple(vectors), positions, 0.5, **options)
    assert 1e-5 < np.abs(found - exact).max() < 0.1
