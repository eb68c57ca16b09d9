"""A mixture of experts, beside its definition in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.extent import one_in

from prejit.compiler.models import int4_rounding
from prejit.compiler.models.layers.experts import (
    ExpertGate,
    ExpertMatrices,
    Mixture,
    Router,
    Routing,
)
from prejit.compiler.models.layers.forms_while_tracing import using
from prejit.compiler.models.quantizing import quantized

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
