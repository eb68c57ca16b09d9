"""The gated delta rule: a state for each head that forgets, and corrects what it holds for a key.

With q, k and v of a token, a decay g <= 0 and a share b of it the state S [K, V] of a head becomes
S' = exp(g) S + k (b (v - exp(g) S^T k))^T, and its result is S'^T q. A decode step does just that. A prompt
is read by chunks: within a chunk the corrections depend on those before them, which is a triangular system.
Its inverse is made of inverses of half the size; powers of the matrix would be of no use for equal keys.

ms of CPU time for a prompt of 512 tokens, one layer of 16 heads of keys and 32 of values of 128:

    by token    101
    by chunk    of 16: 31    of 32: 29    of 64: 40    of 128: 81

A token that is padding has g = 0 and b = 0: then S stays as it is, exactly.

Sources: Yang et al. 2024, arXiv 2412.06464; transformers 5, models/qwen3_next/modeling_qwen3_next.py.

Shapes: B rows, T new tokens, D width, G heads of queries and keys, R heads of values for each, K and V their
sizes, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prejit.compiler.models.layers.attention import LayerCache, NewTokens
from prejit.compiler.models.layers.causal_convolution import CausalConvolution
from prejit.compiler.models.layers.linear import ACTIVATIONS, Linear, RMSNorm
from prejit.compiler.models.layers.mamba2 import by_chunk, decayed

CHUNK = 32
"""Number of tokens of a chunk, a power of two."""
_EPSILON = 1e-6
"""Added to the squares of queries and keys: a constant in the code of the reference."""


@dataclass(frozen=True)
class GatedDeltaSettings:
    """The settings of a layer.

    Attributes:
        width: D.
        key_heads: G.
        value_heads: the number of heads of values, G * R.
        key_size: K.
        value_size: V.
        taps: taps of the convolution of queries, keys and values.
        epsilon: that of the norm.
        activation: what follows the convolution.
        is_joined: whether one matrix holds queries, keys, values and gate of the first head of keys, then of
            the next, and another one b and g in the same way.
    """

    width: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    epsilon: float
    activation: str
    is_joined: bool


class GatedDelta(nnx.Module):
    """A layer without its last product (see decoder_family.StateLayer)."""

    def __init__(self, settings: GatedDeltaSettings) -> None:
        self.settings = of = settings
        keys, values = of.key_heads * of.key_size, of.value_heads * of.value_size
        self.outputs = values
        if of.is_joined:
            self.in_proj_qkvz = Linear(of.width, 2 * keys + 2 * values, bias=False)
            self.in_proj_ba = Linear(of.width, 2 * of.value_heads, bias=False)
        else:
            self.in_proj_qkv = Linear(of.width, 2 * keys + values, bias=False)
            self.in_proj_z = Linear(of.width, values, bias=False)
            self.in_proj_b = Linear(of.width, of.value_heads, bias=False)
            self.in_proj_a = Linear(of.width, of.value_heads, bias=False)
        self.conv1d = CausalConvolution(2 * keys + values, of.taps, bias=False)
        self.dt_bias = nnx.Param(jnp.zeros(of.value_heads))
        self.A_log = nnx.Param(jnp.zeros(of.value_heads))
        self.norm = RMSNorm(of.value_size, of.epsilon)

    def make_cache(self, rows: int) -> LayerCache:
        """See StateLayer. The state stays float32: it adds up the whole text."""
        of = self.settings
        state = jnp.zeros((rows, of.value_heads, of.key_size, of.value_size))
        return self.conv1d.empty(rows), state

    def __call__(
        self, x: jax.Array, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """See StateLayer."""
        of, (before, state), shape = self.settings, layer, x.shape[:2]
        mixed, gate, share, step = self._projected(x)
        mixed, before = self.conv1d(mixed, new, before)
        mixed = ACTIVATIONS[of.activation](mixed)
        keys = of.key_heads * of.key_size
        parts = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        query, key = (_unit(part.reshape(*shape, of.key_heads, -1)) for part in parts[:2])
        value = parts[2].reshape(*shape, of.key_heads, -1, of.value_size)
        decay = -jnp.exp(self.A_log[...]) * jax.nn.softplus(step + self.dt_bias[...])
        share, decay = (
            jnp.where(new.are_valid[..., None], each, 0).reshape(*shape, of.key_heads, -1)
            for each in (jax.nn.sigmoid(share), decay)
        )
        y, state = scan(query * of.key_size**-0.5, key, value, decay, share, state)
        y = y.reshape(*shape, of.value_heads, of.value_size)
        gate = gate.reshape(y.shape)
        if last:
            y, gate = new.wanted(y), new.wanted(gate)
        y = self.norm(y) * jax.nn.silu(gate)
        return y.reshape(*y.shape[:2], -1), (before, state)

    def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return what the convolution reads, the gate, and what becomes b and g: each [B, T, ...]."""
        if not self.settings.is_joined:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        of, shape = self.settings, (*x.shape[:2], self.settings.key_heads, -1)
        of_values = of.value_heads // of.key_heads * of.value_size
        ends = (of.key_size, 2 * of.key_size, 2 * of.key_size + of_values)
        by_head = jnp.split(self.in_proj_qkvz(x).reshape(shape), ends, axis=-1)
        share_step = jnp.split(self.in_proj_ba(x).reshape(shape), 2, axis=-1)
        *mixed, gate, share, step = (
            part.reshape(*x.shape[:2], -1) for part in (*by_head, *share_step)
        )
        return jnp.concatenate(mixed, axis=-1), gate, share, step


def _unit(x: jax.Array) -> jax.Array:
    """Return vectors of length 1."""
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + _EPSILON)


def scan(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    share: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run the state over new tokens.

    Args:
        query: float32 [B, T, G, K].
        key: float32 [B, T, G, K].
        value: float32 [B, T, G, R, V].
        decay: float32 [B, T, G, R], the logarithm of the factor of the state, at most 0.
        share: float32 [B, T, G, R], how much of the correction the state takes in.
        state: float32 [B, G * R, K, V].

    Returns:
        float32 [B, T, G, R, V]; the state.
    """
    batch, count, groups = key.shape[:3]
    shape, state = state.shape, state.reshape(batch, groups, -1, *state.shape[2:])
    if count == 1:
        state = state * jnp.exp(decay[:, 0, ..., None, None])
        column = key[:, 0, :, None, :, None]  # [B, G, 1, K, 1]
        change = (value[:, 0] - (state * column).sum(-2)) * share[:, 0, ..., None]
        state = state + column * change[..., None, :]
        y = (state * query[:, 0, :, None, :, None]).sum(-2)[:, None]
    else:
        chunk = min(CHUNK, 1 << (count - 1).bit_length())
        pieces = tuple(by_chunk(each, chunk) for each in (query, key, value, decay, share))
        with jax.default_matmul_precision("highest"):
            state, y = lax.scan(_chunk, state, pieces)
        y = y.swapaxes(0, 1).reshape(batch, -1, *value.shape[2:])[:, :count]
    return y, state.reshape(shape)


def _chunk(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the state [B, G, R, K, V] after a chunk, and the results of its tokens [B, C, G, R, V]."""
    query, key, value, decay, share = inputs
    by_head = decay.transpose(0, 2, 3, 1)  # [B, G, R, C]
    weights, total = decayed(by_head), jnp.exp(jnp.cumsum(by_head, axis=-1))
    shares = share.transpose(0, 2, 3, 1)[..., None]
    alike = jnp.einsum("bcgk,bsgk->bgcs", key, key)[:, :, None] * weights * shares
    known = jnp.einsum("bcgk,bgrkv->bgrcv", key, state) * total[..., None]
    wanted = (value.transpose(0, 2, 3, 1, 4) - known) * shares
    change = jnp.einsum("bgrcs,bgrsv->bgrcv", _inverse(alike), wanted)
    seen = jnp.einsum("bcgk,bsgk->bgcs", query, key)[:, :, None] * weights
    y = jnp.einsum("bcgk,bgrkv->bgrcv", query, state) * total[..., None]
    y = y + jnp.einsum("bgrcs,bgrsv->bgrcv", seen, change)
    left = change * weights[..., -1, :, None]
    state = state * total[..., -1, None, None] + jnp.einsum("bsgk,bgrsv->bgrkv", key, left)
    return state, y.transpose(0, 3, 1, 2, 4)


def _inverse(below: jax.Array) -> jax.Array:
    """Return the inverse of the unit lower triangular matrices with these numbers below the diagonal.

    `below` is [..., C, C], C a power of two; what it has on the diagonal and above does not count. Step by
    step the blocks of twice the size get their lower left quarter: -Z A X for [[X^-1, 0], [A, Z^-1]].
    """
    size, at = below.shape[-1], jnp.arange(below.shape[-1])
    found, block = jnp.eye(size), 1
    while block < size:
        half = at // block
        is_quarter = (half[:, None] == half + 1) & (half % 2 == 0)
        quarters = jnp.where(is_quarter, below, 0)
        found = found - found @ quarters @ found
        block *= 2
    return jnp.broadcast_to(found, below.shape)
