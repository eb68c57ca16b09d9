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
from prejit.compiler.models.layers.causal_convolution import CausalConvolution
from prejit.compiler.models.layers.layer_config import LayerCache
from prejit.compiler.models.layers.linear import Linear


class ShortConvolution(nnx.Module):
    """A gated convolution along the text, without the last product (see decoder_family.StateLayer)."""

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
