"""Sampling on the device against a plain NumPy account of what transformers does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prejit.compiler.sampling import _filter, sample

V = 40
sampled = jax.jit(sample)


def kept_by_reference(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """Tokens that TopKLogitsWarper and then TopPLogitsWarper leave; logits without ties."""
    order = np.argsort(-logits)
    if top_k:
        order = order[:top_k]
    weights = np.exp(logits[order] - logits[order[0]])
    cumulative = np.cumsum(weights / weights.sum())
    count = int(np.searchsorted(cumulative, top_p)) + 1 if top_p < 1 else len(order)
    return set(order[:count].tolist())


def draw(logits: np.ndarray, **options: object) -> np.ndarray:
    rows = len(logits)
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    return np.asarray(
        sampled(
            jnp.asarray(logits),
            jnp.full(rows, given["temperature"], jnp.float32),
            jnp.full(rows, given["top_k"], jnp.int32),
            jnp.full(rows, given["top_p"], jnp.float32),
            jnp.asarray(
                given.get("seed", np.stack([np.zeros(rows), np.arange(rows)], 1)), jnp.uint32
            ),
            jnp.asarray(given.get("position", np.zeros(rows)), jnp.int32),
        )
    )


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    top_k=st.integers(0, V + 3),
    top_p=st.sampled_from([0.001, 0.3, 0.9, 0.999, 1.0]),
)
def test_filters_keep_what_transformers_keeps(
    seed: int, scale: float, top_k: int, top_p: float
) -> None:
    logits = (np.random.default_rng(seed).permutation(V) - V / 2).astype(np.float32) / V * scale
    kept = _filter(jnp.asarray(logits[None]), jnp.array([top_k]), jnp.array([top_p], jnp.float32))
    found = set(np.flatnonzero(np.isfinite(np.asarray(kept[0]))).tolist())
    expected = kept_by_reference(logits.astype(np.float64), top_k, top_p)
    # The sum of probabilities is rounded: at the very edge one token more or less is right.
    assert len(found ^ expected) <= 1
    assert int(np.argmax(logits)) in found


def test_greedy_rows_take_the_largest_logit_beside_sampled_rows() -> None:
    logits = np.random.default_rng(0).standard_normal((2, V)).astype(np.float32)
    tokens = sampled(
        jnp.asarray(logits),
        jnp.array([0.0, 1.0]),
        jnp.zeros(2, jnp.int32),
        jnp.ones(2),
        jnp.zeros((2, 2), jnp.uint32),
        jnp.zeros(2, jnp.int32),
    )
    assert int(tokens[0]) == int(np.argmax(logits[0]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = np.linspace(-2, 2, 8, dtype=np.float32)
    draws = draw(np.tile(logits, (20000, 1)), temperature=temperature)
    expected = np.exp(logits / temperature)
    expected /= expected.sum()
    counts = np.bincount(draws, minlength=8)
    chi_squared = ((counts - 20000 * expected) ** 2 / (20000 * expected)).sum()
    assert (
        chi_squared < 24.3
    )  # 7 degrees of freedom: one in a thousand by chance; the seeds are fixed


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = np.random.default_rng(1).standard_normal((5, V)).astype(np.float32)
    seeds = np.array([[7, row] for row in range(5)])
    together = draw(logits, seed=seeds, position=np.arange(5))
    alone = [
        int(draw(logits[row : row + 1], seed=seeds[row : row + 1], position=[row])[0])
        for row in range(5)
    ]
    assert together.tolist() == alone


def test_both_halves_of_the_seed_and_the_position_matter() -> None:
    logits = np.zeros((300, V), np.float32)
    base = np.zeros((300, 2))
    rows = np.arange(300)
    for change in (
        {"seed": np.add(base, [1, 0])},
        {"seed": np.add(base, [0, 1])},
        {"position": rows + 1000},
    ):
        same = {"seed": base, "position": rows}
        assert (draw(logits, **{**same, **change}) != draw(logits, **same)).mean() > 0.9
