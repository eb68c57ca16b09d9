"""Layers: rows of a cache in int8, states that are read by chunks, and mixtures of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.extent import one_in

from prejit.compiler.models import int4_rounding
from prejit.compiler.models.layers import gated_delta, mamba2
from prejit.compiler.models.layers.attention import attention, read_rows, row_width, stored_rows
from prejit.compiler.models.layers.experts import (
    ExpertGate,
    ExpertMatrices,
    Mixture,
    Router,
    Routing,
)
from prejit.compiler.models.layers.kernel_calls import using
from prejit.compiler.models.quantizing import quantized

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


EXPERTS, CHOSEN = 5, 3


def matrices(seed, inputs, outputs, dtype):
    """Return matrices in a stored dtype, and what they stand for."""
    wide = np.random.default_rng(seed).standard_normal((EXPERTS, outputs, inputs), np.float32)
    made = ExpertMatrices(EXPERTS, inputs, outputs)
    if dtype == "int8":
        stored, scale = quantized(wide, 2)
        made.weight = nnx.Param(jnp.asarray(stored))
        made.weight_scale = nnx.data(nnx.Param(jnp.asarray(scale)))
        return made, stored * scale[..., None]
    if dtype == "int4":
        words, scales = int4_rounding.quantized_experts(wide / 4, "w")
        made.weight = nnx.Param(jnp.asarray(words))
        made.weight_scale = nnx.data(nnx.Param(jnp.asarray(scales)))
        return made, int4_rounding.WidenedExperts(words, scales, outputs)[:]
    made.weight = nnx.Param(jnp.asarray(wide, jnp.dtype(dtype)))
    return made, np.asarray(made.weight[...], np.float32)


@pytest.mark.parametrize("dtype", one_in(2, ["float32", "bfloat16", "int8", "int4"]))
@pytest.mark.parametrize("has_kernels", [False, True])
def test_a_token_gets_its_experts_however_many_others_there_are(dtype, has_kernels, request):
    forms = request.getfixturevalue("with_kernels") if has_kernels else None
    width, inner = (64, 32) if dtype == "int4" else (19, 11)
    up, wide_up = matrices(1, width, 2 * inner, dtype)
    down, wide_down = matrices(2, inner, width, dtype)
    router = Router(width, EXPERTS)
    random = np.random.default_rng(3)
    router.weight = nnx.Param(jnp.asarray(random.standard_normal((EXPERTS, width), np.float32)))
    graph, state = nnx.split((up, down, router))

    @jax.jit
    def run(state, x):
        with using(forms):
            up, down, router = nnx.merge(graph, state)
            shares, experts = router(x, Routing(CHOSEN))
            return shares, experts, Mixture(up, down, ExpertGate("silu"))(x, shares, experts)

    x = random.standard_normal((41, width), np.float32)
    x[7:] = x[7]  # all these have the same experts, in more than one block
    shares, experts, found = (np.asarray(each) for each in run(state, x))
    assert np.allclose(shares.sum(1), 1)
    for row in range(9):
        right = np.zeros(width, np.float32)
        for share, expert in zip(shares[row], experts[row], strict=True):
            gate, of_up = np.split(wide_up[expert] @ x[row], 2)
            right += share * (wide_down[expert] @ (gate / (1 + np.exp(-gate)) * of_up))
        # beside kernels x is rounded to bfloat16 for a narrow matrix
        rounded = 0.0 if forms is None or dtype == "float32" else 0.02
        assert np.abs(found[row] - right).max() <= 1e-4 + rounded * np.abs(right).max()
        alone = np.asarray(run(state, x[row : row + 1])[2][0])
        assert np.abs(found[row] - alone).max() <= 1e-5 * np.abs(right).max() + 2e-5
    assert np.abs(found[7:] - found[7]).max() <= 1e-5 * np.abs(found[7]).max()


def test_a_sum_that_shares_are_divided_by_has_what_a_family_adds():
    """LFM2 adds 1e-6, which decides where all sigmoids are small; DeepSeek 1e-20: none divides by 0."""
    router = Router(1, 2, correction=(2,))
    router.weight[...] = jnp.array([[-14.0], [-200.0]])
    x = jnp.ones((1, 1))
    small = 1 / (1 + np.exp(14.0))
    for added, share in ((1e-6, small / (small + 1e-6)), (1e-20, 1.0)):
        routing = Routing(1, is_corrected=True, added=added)
        assert np.isclose(router(x, routing)[0][0, 0], share, rtol=1e-5)
    none = Routing(1, is_corrected=True, added=1e-20)
    assert router(jnp.full((1, 1), 20.0), none)[0][0, 0] == 0
