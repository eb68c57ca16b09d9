"""Phi-3, 3.5 and 4: a Llama with fused projections, which may turn only a part of each head.

Sources: Abdin et al. 2024, arXiv 2404.14219; transformers 5, models/phi3/modeling_phi3.py, with which the
logits agree. For LongRoPE see rope.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.layers import rope
from prejit.compiler.models.layers.attention import NewTokens
from prejit.compiler.models.layers.layer_config import DecoderConfig, LayerCache
from prejit.compiler.models.layers.linear import ACTIVATIONS, Linear, split
from prejit.compiler.models.layers.rotary_decoder import (
    NAMING,
    Block,
    Heads,
    RotaryDecoder,
    Turns,
    describe_llama,
    head_size,
    window,
)

__all__ = ["NAMING", "build", "describe"]


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a Phi-3.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    window(config)
    return describe_llama(config, partial=True)


def build(config: Any, context: int | None) -> RotaryDecoder:
    """Return a Phi-3 for contexts up to `context`, or as long as it was made for if None."""
    rotary = rope.frequencies(config, head_size(config), context=context, partial=True)
    heads = Heads.of(config, rotary, window(config))
    width, inner = config.hidden_size, config.intermediate_size

    def block() -> Block:
        return Block(config, Attention(width, heads), MLP(width, inner, config.hidden_act))

    return RotaryDecoder(config, [block() for _ in range(config.num_hidden_layers)])


class Attention(nnx.Module):
    """Grouped-query self-attention over the cache, from one projection."""

    def __init__(self, width: int, heads: Heads) -> None:
        self.heads = heads
        self.qkv_proj = Linear(width, (heads.queries + 2 * heads.keys) * heads.size, bias=False)
        self.o_proj = Linear(heads.queries * heads.size, width, bias=False)

    def __call__(
        self,
        x: jax.Array,
        turns: Turns,
        new: NewTokens,
        layer: LayerCache,
        *,
        last: bool,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """See SelfAttention."""
        size, queries, keys = self.heads.size, self.heads.queries, self.heads.keys
        ends = [queries * size, (queries + keys) * size]
        query, key, value = (
            split(part.reshape(*x.shape[:2], -1, size), "data", None, "tensor")
            for part in _parts(self.qkv_proj(x), ends)
        )
        mixed, layer = self.heads.attend(query, key, value, turns, new, layer, last=last)
        return self.o_proj(mixed, residual=residual), layer


class MLP(nnx.Module):
    """A layer whose one half gates the other by its activation, and a second layer back to D."""

    def __init__(self, width: int, inner: int, activation: str) -> None:
        self.gate_up_proj = Linear(width, 2 * inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)
        self.activation = activation

    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Map x [B, T, D] to [B, T, D], plus a residual."""
        outputs = self.gate_up_proj(x)
        gate, up = (
            split(part, "data", None, "tensor")
            for part in _parts(outputs, [outputs.shape[-1] // 2])
        )
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up, residual=residual)


def _parts(outputs: jax.Array, ends: list[int]) -> list[jax.Array]:
    """Return the outputs of a fused layer, divided at these places; each part is whole on every device.

    A device's share of the outputs is no set of heads, nor a half with its other half. See
    gpt2.Attention.project.
    """
    gathered = split(split(outputs, "data", None, "tensor"), "data")
    return [split(part, "data") for part in jnp.split(gathered, ends, axis=-1)]
