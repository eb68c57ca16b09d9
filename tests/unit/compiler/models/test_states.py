"""Layers with a state: prompts are read by chunks as token by token, and padding leaves the state alone."""

import jax
import numpy as np
import pytest

from prejit.compiler.models.layers import gated_delta, mamba2

COUNT = 2 * mamba2.CHUNK + 3


def mamba2_inputs(count):
    """The inputs of two rows of four heads in two groups, with steps from none to very large."""
    random = np.random.default_rng(count)
    shapes = ((2, count, 4, 3), (2, count, 4), (2, count, 2, 5), (2, count, 2, 5), (2, 4, 3, 5))
    x, decay, *others = (random.standard_normal(shape, dtype=np.float32) for shape in shapes)
    return [x, -np.exp(3 * decay), *others]


def test_mamba2_reads_chunks_as_token_by_token():
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


def delta_inputs(count, *, equal):
    """The inputs of two rows of two heads of keys, with two of values each; all keys may be equal."""
    random = np.random.default_rng(count)
    shapes = ((2, count, 2, 5), (2, count, 2, 5), (2, count, 2, 2, 3), (2, count, 2, 2))
    query, key, value, decay = (random.standard_normal(s, dtype=np.float32) for s in shapes)
    if equal:
        key, decay = np.ones_like(key), np.full_like(decay, -20)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    share = random.uniform(0.9 if equal else 0, 1, decay.shape).astype(np.float32)
    state = random.standard_normal((2, 4, 5, 3), dtype=np.float32)
    return [query, key, value, -np.exp(3 * decay), share, state]


@pytest.mark.parametrize("equal", [False, True])
def test_the_delta_rule_reads_chunks_as_token_by_token(equal):
    query, key, value, decay, share, state = delta_inputs(COUNT, equal=equal)
    found, after = jax.jit(gated_delta.scan)(query, key, value, decay, share, state)
    s = state.astype(np.float64).reshape(2, 2, 2, 5, 3)
    for t in range(COUNT):
        s = s * np.exp(decay[:, t].astype(np.float64))[..., None, None]
        change = (value[:, t] - (s * key[:, t, :, None, :, None]).sum(-2)) * share[:, t, ..., None]
        s = s + key[:, t, :, None, :, None] * change[..., None, :]
        assert np.abs(found[:, t] - (s * query[:, t, :, None, :, None]).sum(-2)).max() < 1e-4
    assert np.abs(after - s.reshape(after.shape)).max() < 1e-4


def test_padding_leaves_a_state_exactly_as_it_is():
    for scan, inputs, steps in (
        (mamba2.scan, mamba2_inputs(COUNT), (0, 1)),
        (gated_delta.scan, delta_inputs(COUNT, equal=False), (3, 4)),
    ):
        call, (*tokens, state) = jax.jit(scan), inputs
        for step in steps:
            tokens[step][1, 20:] = 0
        _, together = call(*tokens, state)
        _, alone = call(*(each[1:, :32] for each in tokens), state[1:])
        assert np.array_equal(together[1:], alone)
        for step in steps:
            tokens[step][:] = 0
        assert np.array_equal(call(*tokens, state)[1], state)
