"""The kernel that chooses tokens, against the same in XLA's operations (lowering/sampling_programs.py)."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.compiler.lowering import sampling_programs as programs

from . import kernel_frames
from .kernel_frames import KernelError


def run(library, logits, bias, options, position):
    token = np.full(len(logits), -7, np.int32)
    arguments = [logits, bias, *options.values(), position]
    kernel_frames.call(library, "choose", arguments, [token])
    return token.tolist()


@jax.jit
def in_xla(logits, bias, options, position):
    inputs = programs.sampling_shapes(*logits.shape)._replace(**options)
    return programs._choose(logits + bias, inputs, position)


@jax.jit
def noisy(logits, bias, options, position):
    """Return the sums whose largest XLA chooses. Noise of the kernel may differ in its last bits."""
    inputs = programs.sampling_shapes(*logits.shape)._replace(**options)
    noise = programs._gumbel(inputs.seed, position, logits.shape[1])
    return programs._kept(logits + bias, inputs) + noise


def options_of(random, rows, choices):
    def drawn(name, dtype):
        return random.choice(choices[name], rows).astype(dtype)

    return {
        "temperature": drawn("temperature", np.float32),
        "top_k": drawn("top_k", np.int32),
        "top_p": drawn("top_p", np.float32),
        "min_p": drawn("min_p", np.float32),
        "seed": random.integers(0, 1 << 32, (rows, 2), np.uint32),
    }


CHOICES = {
    "temperature": [0.0, 0.05, 0.8, 1.0, 50.0, 2e-38],
    "top_k": [0, 0, 1, 2, 40, 1 << 30],
    "top_p": [1.0, 1.0, 1e-9, 0.5, 0.95],
    "min_p": [0.0, 0.0, 0.05, 1.0],
}
SPECIAL = [np.inf, -np.inf, np.nan, 9.0, -0.0]


@settings(deadline=None, max_examples=examples(60, 300))
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 70) | st.sampled_from([8191, 8192, 8193, 50257]),
    levels=st.sampled_from([2, 1 << 20]),
    special=st.lists(st.tuples(st.integers(0, 1 << 30), st.sampled_from(SPECIAL)), max_size=4),
    forbidden=st.sampled_from([0.0, 0.5, 1.0]),
    position=st.integers(0, (1 << 31) - 1),
    seed=st.integers(0, 1 << 16),
)
def test_a_token_is_that_of_xla_or_as_good(
    kernels, rows, width, levels, special, forbidden, position, seed
):
    random = np.random.default_rng(seed)
    logits = (8 * random.integers(0, levels, (rows, width)) / levels).astype(np.float32)
    bias = np.where(random.random((rows, width)) < forbidden, -np.inf, 0).astype(np.float32)
    for place, value in special:
        logits.flat[place % logits.size] = value
    options = options_of(random, rows, CHOICES)
    at = np.full(rows, position, np.int32)
    found = run(kernels, logits, bias, options, at)
    wanted = np.asarray(in_xla(logits, bias, options, at)).tolist()
    different = [row for row in range(rows) if found[row] != wanted[row]]
    if not different:
        return
    # Sums for top-p, and the last bits of noise, may be others: then both tokens are as good.
    assert all(found[row] >= 0 <= wanted[row] and options["temperature"][row] for row in different)
    sums = np.asarray(noisy(logits, bias, options, at))
    for row in different:
        token, other = sums[row, found[row]], sums[row, wanted[row]]
        assert abs(token - other) < 1e-5 or options["top_p"][row] < 1, (row, token, other)


def test_draws_follow_their_distribution(kernels):
    """20,000 positions of one seed, with top-p: the share of each token is its probability."""
    count = 20_000
    logits = np.tile(np.log(np.array([4, 1, 3, 2], np.float32) / 10), (count, 1))
    one = {"temperature": 1.0, "top_k": 0, "top_p": 0.85, "min_p": 0.0}
    options = options_of(np.random.default_rng(1), count, {k: [v] for k, v in one.items()})
    options["seed"][:] = 7
    found = run(kernels, logits, np.zeros_like(logits), options, np.arange(count, dtype=np.int32))
    shares = np.bincount(found, minlength=4) / count
    np.testing.assert_allclose(shares, np.array([4, 0, 3, 2]) / 9, atol=0.015)


def test_shapes_must_fit(kernels):
    logits = np.zeros((2, 3), np.float32)
    options = options_of(np.random.default_rng(1), 2, CHOICES)
    position = np.zeros(2, np.int32)
    with pytest.raises(KernelError, match="as many rows as the logits"):
        run(kernels, logits, logits[:1], options, position)
    with pytest.raises(KernelError, match="a bias for each logit"):
        run(kernels, logits, logits[:, :2].copy(), options, position)
