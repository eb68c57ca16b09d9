"""Mamba-2: a state of constant size for each head, which decays and takes in each token.

With x, B, C and a step d > 0 of a token the state h [P, N] of a head becomes exp(d A) h + (d x) B^T, and its
result is h C + D x. A decode step does just that. A prompt is read by chunks: within a chunk the results are
those of attention whose weights decay, and the state is added once for each chunk.

ms of CPU time for a prompt of 512 tokens, one layer of 48 heads, P = 64, N = 128:

    by token    43
    by chunk    of 8: 15    of 16: 11    of 32: 11    of 64: 18

A token that is padding has the step 0: then h stays as it is, exactly.

Source: Dao and Gu 2024, arXiv 2405.21060, listing 1; transformers 5, models/mamba2/modeling_mamba2.py, and
bamba, falcon_h1, granitemoehybrid and nemotron_h.

Shapes: B rows, T new tokens, D width, H heads of P channels, G groups of heads, N states, K taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prejit.compiler.models.layers.attention import LayerCache, NewTokens
from prejit.compiler.models.layers.causal_convolution import CausalConvolution
from prejit.compiler.models.layers.linear import ACTIVATIONS, Linear

CHUNK = 32
"""Maximum number of tokens of a chunk."""


@dataclass(frozen=True)
class Mamba2Settings:
    """The settings of a layer.

    Attributes:
        width: D.
        heads: H.
        head_size: P.
        groups: G, which divides H.
        states: N.
        taps: K of the convolution of x, B and C.
        epsilon: that of the norm.
        activation: what follows the convolution.
        limits: least and largest step of a token.
        bias: whether the first product has a bias.
        conv_bias: whether the convolution has a bias.
        gate: whether the gate comes before the norm, after it, or without a norm.
        input_factor: factor of what the layer reads.
        factors: factors of the gate, x, B, C and the step.
    """

    width: int
    heads: int
    head_size: int
    groups: int
    states: int
    taps: int
    epsilon: float
    activation: str
    limits: tuple[float, float]
    bias: bool
    conv_bias: bool
    gate: Literal["before norm", "after norm", "no norm"] = "before norm"
    input_factor: float = 1.0
    factors: tuple[float, ...] = (1.0,) * 5

    @property
    def inner(self) -> int:
        """The number of channels, H * P."""
        return self.heads * self.head_size


class Mamba2(nnx.Module):
    """A layer without its last product (see decoder_family.StateLayer)."""

    def __init__(self, settings: Mamba2Settings) -> None:
        self.settings = settings
        inner, heads = settings.inner, settings.heads
        self.outputs = inner
        mixed = inner + 2 * settings.groups * settings.states
        self.in_proj = Linear(settings.width, inner + mixed + heads, bias=settings.bias)
        self.conv1d = CausalConvolution(mixed, settings.taps, bias=settings.conv_bias)
        self.dt_bias = nnx.Param(jnp.zeros(heads))
        self.A_log = nnx.Param(jnp.zeros(heads))
        self.D = nnx.Param(jnp.zeros(heads))
        if settings.gate != "no norm":
            self.norm = GroupedNorm(inner, settings.groups, settings.epsilon)

    def make_cache(self, rows: int) -> LayerCache:
        """See StateLayer. The state stays float32: it adds up the whole text."""
        of = self.settings
        state = jnp.zeros((rows, of.heads, of.head_size, of.states))
        return self.conv1d.empty(rows), state

    def __call__(
        self, x: jax.Array, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """See StateLayer."""
        of, (before, state) = self.settings, layer
        inner, groups = of.inner, of.groups * of.states
        x = x if of.input_factor == 1 else x * of.input_factor
        ends = (inner, 2 * inner, 2 * inner + groups, 2 * inner + 2 * groups)
        parts = jnp.split(self.in_proj(x), ends, axis=-1)
        pairs = zip(parts, of.factors, strict=True)
        gate, *mixed, step = (part if factor == 1 else part * factor for part, factor in pairs)
        joined, before = self.conv1d(jnp.concatenate(mixed, axis=-1), new, before)
        joined = ACTIVATIONS[of.activation](joined)
        x, into, out = jnp.split(joined, [inner, inner + groups], axis=-1)
        x = x.reshape(*x.shape[:2], of.heads, of.head_size)
        into, out = (part.reshape(*x.shape[:2], of.groups, of.states) for part in (into, out))
        step = jnp.clip(jax.nn.softplus(step + self.dt_bias[...]), *of.limits)
        step = jnp.where(new.are_valid[..., None], step, 0)
        y, state = scan(x * step[..., None], step * -jnp.exp(self.A_log[...]), into, out, state)
        y = (y + x * self.D[...][:, None]).reshape(*x.shape[:2], inner)
        if last:
            y, gate = new.wanted(y), new.wanted(gate)
        return self._gated(y, gate), (before, state)

    def _gated(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        gate = jax.nn.silu(gate)
        if self.settings.gate == "no norm":
            return y * gate
        if self.settings.gate == "after norm":
            return self.norm(y) * gate
        return self.norm(y * gate)


class GroupedNorm(nnx.Module):
    """RMSNorm of each of several equal parts of a vector."""

    def __init__(self, width: int, groups: int, epsilon: float) -> None:
        self.weight = nnx.Param(jnp.ones(width))
        self.groups, self.epsilon = groups, epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the norm of x [..., width]."""
        parts = x.reshape(*x.shape[:-1], self.groups, -1)
        mean_square = jnp.square(parts).mean(-1, keepdims=True)
        return (parts * lax.rsqrt(mean_square + self.epsilon)).reshape(x.shape) * self.weight[...]


def scan(
    x: jax.Array, decay: jax.Array, into: jax.Array, out: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Run the state over new tokens.

    Args:
        x: float32 [B, T, H, P], each times the token's step.
        decay: float32 [B, T, H], the logarithm of the factor of the state, at most 0.
        into: float32 [B, T, G, N].
        out: float32 [B, T, G, N].
        state: float32 [B, H, P, N].

    Returns:
        float32 [B, T, H, P]; the state.
    """
    batch, count, heads, size = x.shape
    groups = into.shape[2]
    # heads by groups: H = G * R
    state = state.reshape(batch, groups, -1, *state.shape[2:])
    x = x.reshape(batch, count, groups, -1, size)
    decay = decay.reshape(batch, count, groups, -1)
    if count == 1:
        added = x[:, 0, ..., None] * into[:, 0, :, None, None]
        state = state * jnp.exp(decay[:, 0, ..., None, None]) + added
        y = (state * out[:, 0, :, None, None]).sum(-1)[:, None]
    else:
        pieces = tuple(by_chunk(each, min(CHUNK, count)) for each in (x, decay, into, out))
        # A GPU would round the logarithms of decays, and the state, to the 11 bits of TF32.
        with jax.default_matmul_precision("highest"):
            state, y = lax.scan(_chunk, state, pieces)
        y = y.swapaxes(0, 1).reshape(batch, -1, heads, size)[:, :count]
    return y.reshape(batch, count, heads, size), state.reshape(batch, heads, size, -1)


def by_chunk(array: jax.Array, chunk: int) -> jax.Array:
    """Return an array [B, T, ...] as [chunks, B, chunk, ...], with zeros behind its end."""
    batch, count, *rest = array.shape
    missing = [(0, 0), (0, -count % chunk), *[(0, 0)] * len(rest)]
    return jnp.pad(array, missing).reshape(batch, -1, chunk, *rest).swapaxes(0, 1)


def _chunk(
    state: jax.Array, inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the state [B, G, R, P, N] after a chunk, and the results of its tokens."""
    x, decay, into, out = inputs  # [B, C, G, R, P], [B, C, G, R] and twice [B, C, G, N]
    by_head = decay.transpose(0, 2, 3, 1)  # [B, G, R, C]
    weights = decayed(by_head)
    total = jnp.exp(jnp.cumsum(by_head, axis=-1))
    shares = weights * jnp.einsum("bcgn,bsgn->bgcs", out, into)[:, :, None]
    y = jnp.einsum("bgrcs,bsgrp->bcgrp", shares, x)
    y = y + jnp.einsum("bcgn,bgrpn,bgrc->bcgrp", out, state, total)
    added = jnp.einsum("bcgrp,bcgn,bgrc->bgrpn", x, into, weights[..., -1, :])
    return state * total[..., -1, None, None] + added, y


def decayed(decay: jax.Array) -> jax.Array:
    """Return what is left at token c of what token s took in: float32 [..., C, C], 0 for s > c.

    `decay` is float32 [..., C], the logarithm of each token's factor. The sum between two tokens is made of
    the numbers between them: a difference of sums from the beginning would be of no use after a large number.
    """
    are_before = jnp.tril(jnp.ones((decay.shape[-1],) * 2, bool))
    after = jnp.where(are_before.T, 0, decay[..., :, None])  # of token k, if it follows s
    between = jnp.einsum("ck,...ks->...cs", are_before.astype(decay.dtype), after)
    return jnp.exp(jnp.where(are_before, between, -jnp.inf))
