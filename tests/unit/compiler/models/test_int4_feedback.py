"""Rounding to int4 by the inputs of a text, beside the paper's algorithm, column by column in float64."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.models import int4_feedback, int4_rounding
from prejit.compiler.models.layers import int4_words
from prejit.runtime.errors import CheckpointError


def inputs_like_those_of_layers(rng, rows, count):
    """Inputs that go together, a few of them large, and one that is always zero."""
    x = rng.standard_normal((rows, count)) @ rng.standard_normal((count, count))
    x *= np.exp(rng.standard_normal(count))
    x[:, count // 3] = 0
    return x.astype(np.float32)


def by_column(matrix, products, damping, groups):
    """Algorithm 1 of Frantar et al. 2022, column by column, with the scales that the build chooses."""
    left, count = matrix.astype(np.float64), matrix.shape[1]
    damped = products.astype(np.float64) + damping * np.diag(products).mean() * np.eye(count)
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T
    found = np.zeros_like(left)
    zeros = np.zeros(len(matrix))
    for at in range(count):
        if at % groups.size == 0:
            part = slice(at, at + groups.size)
            group = left[:, part].astype(np.float32)
            if groups.zeros:
                _, scales, zeros = int4_rounding.rounded_with_zeros(group)
            else:
                weights = 1 / np.diag(factor)[part] ** 2 / np.diag(products).mean()
                _, scales = int4_rounding.rounded(group, weights.astype(np.float32))
            scales, zeros = scales.astype(np.float64), zeros.astype(np.float64)
        divided = left[:, at] / np.where(scales == 0, 1, scales) * (scales != 0)
        found[:, at] = (np.clip(np.rint(divided + zeros), -8, 7) - zeros) * scales
        error = (left[:, at] - found[:, at]) / factor[at, at]
        left[:, at + 1 :] -= np.outer(error, factor[at, at + 1 :])
    return found


def loss(found, matrix, products):
    """The summed squared differences of results."""
    error = (found - matrix).astype(np.float64)
    return np.einsum("oi,ij,oj->", error, products.astype(np.float64), error)


@pytest.mark.thorough
@settings(deadline=None, derandomize=True, max_examples=examples(15, 100))
@given(
    outputs=st.integers(1, 20),
    count=st.integers(1, 3),
    groups=st.builds(Groups, st.sampled_from([32, 64, 128]), st.booleans()),
    rows=st.integers(1, 600),
)
def test_it_is_another_loss_than_that_of_the_paper_column_by_column(outputs, count, groups, rows):
    rng = np.random.default_rng([outputs, count, rows])
    inputs = count * groups.size
    x = inputs_like_those_of_layers(rng, rows, inputs)
    matrix = rng.standard_normal((outputs, inputs)).astype(np.float32)
    products = int4_feedback.squares(x)
    np.testing.assert_allclose(products, x.T @ x, rtol=1e-3, atol=1e-4 * np.abs(products).max())
    known = int4_feedback.inputs_of(products, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int4_feedback, "_improve", lambda *arguments: None)
        first = int4_feedback.quantized(matrix, known, "w", groups)
    first, found = (
        int4_words.unpacked(*each, outputs)
        for each in (first, int4_feedback.quantized(matrix, known, "w", groups))
    )
    damping = max(0.01, inputs / rows / 16)
    damped = products + damping * np.diag(products).mean() * np.eye(inputs)
    expected = loss(by_column(matrix, products, damping, groups), matrix, damped)
    assert loss(first, matrix, damped) == pytest.approx(expected, rel=0.03)
    assert loss(found, matrix, damped) < (0.99 if outputs > 8 else 1.01) * expected
    alone = int4_words.unpacked(*int4_rounding.quantized(matrix, 1, "w", groups), outputs)
    if outputs > 8:
        assert loss(found, matrix, damped) < loss(alone, matrix, damped)


def test_equal_integers_far_from_ties_and_many_blocks_of_outputs(monkeypatch):
    monkeypatch.setattr(int4_feedback, "_improve", lambda *arguments: None)
    rng = np.random.default_rng(1)
    x = inputs_like_those_of_layers(rng, 2000, 160)
    matrix = rng.standard_normal((600, 160)).astype(np.float32)
    products = int4_feedback.squares(x)
    known = int4_feedback.inputs_of(products, len(x))
    words, scales = int4_feedback.quantized(matrix, known, "w", GROUPS_OF_32)
    expected = by_column(matrix, products, 0.01, GROUPS_OF_32)
    same = (int4_words.unpacked(words, scales, 600) == expected).all(axis=1)
    assert same.mean() > 0.95


def test_inputs_that_say_nothing_and_values_that_float16_cannot_scale():
    for products in (np.zeros((64, 64)), np.full((64, 64), np.inf), np.full((64, 64), np.nan)):
        assert int4_feedback.inputs_of(products.astype(np.float32), 8) is None
    x = inputs_like_those_of_layers(np.random.default_rng(2), 300, 64)
    known = int4_feedback.inputs_of(int4_feedback.squares(x), 300)
    with pytest.raises(CheckpointError, match=r"h\.weight: expected values up to 390,000"):
        int4_feedback.quantized(np.full((64, 64), 1e7, np.float32), known, "h.weight", GROUPS_OF_32)
    zeros = np.zeros((20, 64), np.float32)
    words, scales = int4_feedback.quantized(zeros, known, "w", GROUPS_OF_32)
    assert not int4_words.unpacked(words, scales, 20).any()


def test_products_are_those_of_the_cpu_in_every_thread(monkeypatch):
    """The default device of a thread is a GPU where there is one, whose products may be TF32."""
    cpu, used, product = jax.local_devices(backend="cpu")[0], set(), int4_feedback.lax.dot_general

    def dot_general(*operands):
        used.add(jax.config.jax_default_device)
        return product(*operands)

    monkeypatch.setattr(int4_feedback.lax, "dot_general", dot_general)
    x = inputs_like_those_of_layers(np.random.default_rng(3), 300, 256)
    known = int4_feedback.inputs_of(int4_feedback.squares(x), 300)
    int4_feedback.quantized(x[:64], known, "w", GROUPS_OF_32)
    assert used == {cpu}
