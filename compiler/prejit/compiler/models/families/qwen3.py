"""Qwen 3: a Llama whose queries and keys are normalized along the head, with optional windows in some layers.

Sources: Yang et al. 2025, arXiv 2505.09388; transformers 5, models/qwen3/modeling_qwen3.py, with which the
logits agree.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from prejit.compiler.models.layers import rope, rotary_decoder
from prejit.compiler.models.layers.config import DecoderConfig
from prejit.compiler.models.layers.norms import RMSNorm
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
    """Return the sizes of a Qwen 3.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    windows(config)
    rope.frequencies(config, head_size(config))
    return rotary_decoder.describe(config)


def build(config: Any, context: int | None) -> RotaryDecoder:
    """Return a Qwen 3 for contexts up to `context`, or as long as it was made for if None."""
    rotary = rope.frequencies(config, head_size(config), context=context)
    norm = partial(RMSNorm, epsilon=config.rms_norm_eps)
    width, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias

    def block(window: int | None) -> Block:
        heads = Heads.of(config, rotary, window)
        attention = Attention(width, heads, bias=bias, output_bias=bias, head_norm=norm)
        return Block(config, attention, GatedMLP(width, inner, config.hidden_act))

    return RotaryDecoder(config, [block(window) for window in windows(config)])
