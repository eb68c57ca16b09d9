"""Layers with a state: prompts are read by chunks as token by token, and padding leaves the state alone."""

from __future__ import annotations

import jax
import numpy as np

from prejit.compiler.models.layers import mamba2

COUNT = 2 * mamba2.CHUNK + 3


def mamba2_inputs(count: int) -> list[np.ndarray]:
    """The inputs of two rows of four heads in two groups, with steps from none to very large."""
    random = np.random.default_rng(count)
    shapes = ((2, count, 4, 3), (2, count, 4), (2, count, 2, 5), (2, count, 2, 5), (2, 4, 3, 5))
    x, decay, *others = (random.standard_normal(shape, dtype=np.float32) for shape in shapes)
    return [x, -np.exp(3 * decay), *others]


def test_mamba2_reads_chunks_as_token_by_token() -> None:
    x, decay, into, out, state = mamba2_inputs(COUNT)
    found, after = jax.jit(mamba2.scan)(x, decay, into, out, state)
    h = state.astype(np.float64)
    into, out = (np.repeat(each, 2, axis=2).astype(np.float64) for each in (into, out))
    for t in range(COUNT):
        h = np.exp(decay[:, t].astype(np.float64))[..., None, None] * h
        h = h + x[:, t, :, :, None] * into[:, t, :, None]
        expected = (h * out[:, t, :, None]).sum(-1)
        assert np.abs(found[:, t] - expected).max() < 1e-4
    assert np.abs(after - h).max() < 1e-4


def test_padding_leaves_a_state_exactly_as_it_is() -> None:
    x, decay, into, out, state = mamba2_inputs(COUNT)
    x[1, 20:], decay[1, 20:] = 0, 0
    together = jax.jit(mamba2.scan)(x, decay, into, out, state)
    x, decay, into, out, state = (each[1:] for each in (x, decay, into, out, state))
    short = (each[:, :32] for each in (x, decay, into, out))
    alone = jax.jit(mamba2.scan)(*short, state)
    assert np.array_equal(together[1][1:], alone[1])
    idle = jax.jit(mamba2.scan)(0 * x, 0 * decay, into, out, state)
    assert np.array_equal(idle[1], state)
