"""LFM2's short convolution: in some layers it takes the place of attention, and a few vectors that of keys.

Three products of x are B, C and z. What is kept of a text are the last K - 1 values of B * z; a convolution
over K of them, times C, is the result. Source: Liquid AI 2025, arXiv 2511.23404; transformers 5,
models/lfm2/modeling_lfm2.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.layers.attention import NewTokens
from prejit.compiler.models.layers.layer_config import LayerCache
from prejit.compiler.models.layers.linear import Linear


class ShortConvolution(nnx.Module):
    """A gated convolution along the text, without the last product."""

    def __init__(self, width: int, taps: int, *, bias: bool) -> None:
        self.in_proj = Linear(width, 3 * width, bias=bias)
        self.conv = _Taps(width, taps, bias=bias)

    def make_cache(self, rows: int) -> LayerCache:
        """Return the state of texts without a token: float32 [B, K - 1, D]."""
        width, _, taps = self.conv.weight.shape
        return (jnp.zeros((rows, taps - 1, width)),)

    def __call__(
        self, x: jax.Array, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, D], or [B, 1, D] if `last`; return it and the state after the tokens."""
        before, after, inner = jnp.split(self.in_proj(x), 3, axis=-1)
        values = jnp.concatenate([layer[0], before * inner], axis=1)
        y = after * self.conv(values, x.shape[1])
        kept = new.length[:, None] + jnp.arange(layer[0].shape[1])
        state = jnp.take_along_axis(values, kept[..., None], axis=1, mode="clip")
        return new.wanted(y) if last else y, (state,)


class _Taps(nnx.Module):
    """The convolution of each of D channels with K taps, as torch's Conv1d stores them: [D, 1, K]."""

    def __init__(self, width: int, taps: int, *, bias: bool) -> None:
        self.weight = nnx.Param(jnp.zeros((width, 1, taps)))
        self.bias = nnx.Param(jnp.zeros(width)) if bias else None

    def __call__(self, values: jax.Array, count: int) -> jax.Array:
        """Map [B, K - 1 + T, D] to [B, T, D]; the last tap is that of the token itself."""
        taps = self.weight[...][:, 0]
        each = (values[:, at : at + count] * taps[:, at] for at in range(taps.shape[1]))
        y: jax.Array = sum(each, jnp.zeros(()))
        return y if self.bias is None else y + self.bias[...]
