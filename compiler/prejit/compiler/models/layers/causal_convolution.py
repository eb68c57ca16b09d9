"""A convolution of each channel along the text, whose state is the last values before the new ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.layers.attention import LayerCache, NewTokens
from prejit.compiler.models.layers.linear import Linear


class CausalConvolution(nnx.Module):
    """The convolution of each of D channels with K taps, as torch's Conv1d stores them: [D, 1, K]."""

    def __init__(self, width: int, taps: int, *, bias: bool) -> None:
        self.weight = nnx.Param(jnp.zeros((width, 1, taps)))
        self.bias = nnx.Param(jnp.zeros(width)) if bias else None

    def empty(self, rows: int) -> jax.Array:
        """Return the state of texts without a token: float32 [B, K - 1, D]."""
        width, _, taps = self.weight.shape
        return jnp.zeros((rows, taps - 1, width))

    def __call__(
        self, x: jax.Array, new: NewTokens, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Map x [B, T, D] to [B, T, D]; return it and the state after the valid tokens.

        The last tap is that of the token itself.
        """
        values, taps = jnp.concatenate([state, x], axis=1), self.weight[...][:, 0]
        each = (values[:, at : at + x.shape[1]] * taps[:, at] for at in range(taps.shape[1]))
        y: jax.Array = sum(each, jnp.zeros(()))
        kept = new.length[:, None] + jnp.arange(state.shape[1])
        state = jnp.take_along_axis(values, kept[..., None], axis=1, mode="clip")
        return (y if self.bias is None else y + self.bias[...]), state


class ShortConvolution(nnx.Module):
    """LFM2's gated convolution in place of attention, without the last product (decoder_family.StateLayer).

    Three products of x are B, C and z. What is kept of a text are the last K - 1 values of B * z; a
    convolution over K of them, times C, is the result. Source: Liquid AI 2025, arXiv 2511.23404;
    transformers 5, models/lfm2/modeling_lfm2.py.
    """

    def __init__(self, width: int, taps: int, *, bias: bool) -> None:
        self.outputs = width
        self.in_proj = Linear(width, 3 * width, bias=bias)
        self.conv = CausalConvolution(width, taps, bias=bias)

    def make_cache(self, rows: int) -> LayerCache:
        """See StateLayer."""
        return (self.conv.empty(rows),)

    def __call__(
        self, x: jax.Array, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """See StateLayer."""
        before, after, inner = jnp.split(self.in_proj(x), 3, axis=-1)
        mixed, state = self.conv(before * inner, new, layer[0])
        y = after * mixed
        return new.wanted(y) if last else y, (state,)
