"""Qwen 2 and 2.5: a Llama with biases on queries, keys and values, and optional windows in some layers.

Sources: Yang et al. 2024, arXiv 2407.10671; transformers 5, models/qwen2/modeling_qwen2.py, with which the
logits agree.
"""

from __future__ import annotations

from typing import Any

from prejit.compiler.models.layers import rope, rotary_decoder
from prejit.compiler.models.layers.config import DecoderConfig
from prejit.compiler.models.layers.rotary_decoder import (
    NAMING,
    Attention,
    Block,
    GatedMLP,
    Heads,
    RotaryDecoder,
    head_size,
    windows,
)

__all__ = ["NAMING", "build", "describe"]


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a Qwen 2.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    windows(config)
    rope.frequencies(config, head_size(config))
    return rotary_decoder.describe(config)


def build(config: Any, context: int | None) -> RotaryDecoder:
    """Return a Qwen 2 for contexts up to `context`, or as long as it was made for if None."""
    rotary = rope.frequencies(config, head_size(config), context=context)
    width, inner = config.hidden_size, config.intermediate_size

    def block(window: int | None) -> Block:
        heads = Heads.of(config, rotary, window)
        mlp = GatedMLP(width, inner, config.hidden_act)
        return Block(config, Attention(width, heads, bias=True), mlp)

    return RotaryDecoder(config, [block(window) for window in windows(config)])
