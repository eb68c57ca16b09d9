"""Gemma 2: norms before and after attention and MLP, soft bounds of scores and logits, windows by layer.

Sources: Gemma Team 2024, arXiv 2408.00118; transformers 5, models/gemma2/modeling_gemma2.py, with which the
logits agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx

from prejit.compiler.models.layers import rope, rotary_decoder
from prejit.compiler.models.layers.attention import NewTokens
from prejit.compiler.models.layers.layer_config import DecoderConfig, LayerCache, require
from prejit.compiler.models.layers.norms import RMSNorm
from prejit.compiler.models.layers.rotary_decoder import (
    NAMING,
    Attention,
    GatedMLP,
    Heads,
    RotaryDecoder,
    SelfAttention,
    Turns,
    windows,
)

__all__ = ["NAMING", "Block", "build", "describe", "norm_of"]


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a Gemma 2.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    both_ways = config.use_bidirectional_attention
    require(config, "use_bidirectional_attention", both_ways, [None, False])
    windows(config)
    rope.frequencies(config, config.head_dim)
    return rotary_decoder.describe(config, "hidden_activation")


def build(config: Any, context: int | None) -> RotaryDecoder:
    """Return a Gemma 2 for contexts up to `context`, or as long as it was made for if None."""
    rotary = rope.frequencies(config, config.head_dim, context=context)

    def block(window: int | None) -> Block:
        heads = replace(
            Heads.of(config, rotary, window),
            scale=config.query_pre_attn_scalar**-0.5,
            cap=config.attn_logit_softcapping,
        )
        bias = config.attention_bias
        attention = Attention(config.hidden_size, heads, bias=bias, output_bias=bias)
        return Block(config, attention)

    return RotaryDecoder(
        config,
        [block(window) for window in windows(config)],
        norm=norm_of(config)(config.hidden_size),
        embedding_scale=config.hidden_size**0.5,
        logit_cap=config.final_logit_softcapping,
    )


def norm_of(config: Any) -> Callable[[int], RMSNorm]:
    """Return the function that makes a norm from its width. Scales are published minus 1."""
    return partial(RMSNorm, epsilon=config.rms_norm_eps, offset=1.0)


class Block(nnx.Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, config: Any, self_attn: SelfAttention) -> None:
        width, norm = config.hidden_size, norm_of(config)
        self.input_layernorm = norm(width)
        self.self_attn = self_attn
        self.post_attention_layernorm = norm(width)
        self.pre_feedforward_layernorm = norm(width)
        self.mlp = GatedMLP(width, config.intermediate_size, config.hidden_activation)
        self.post_feedforward_layernorm = norm(width)

    def __call__(
        self, x: jax.Array, turns: Turns, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """See RotaryBlock."""
        mixed, layer = self.self_attn(self.input_layernorm(x), turns, new, layer, last=last)
        x = (new.wanted(x) if last else x) + self.post_attention_layernorm(mixed)
        inner = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(inner), layer
