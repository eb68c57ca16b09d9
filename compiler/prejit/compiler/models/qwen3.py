"""Qwen 3: a Llama whose queries and keys are normalized along the head, with windows in some layers if asked.

Sources: Yang et al. 2025, arXiv 2505.09388; transformers 5, models/qwen3/modeling_qwen3.py, with which the
logits agree.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from prejit.compiler.models import blocks, rope
from prejit.compiler.models.blocks import NAMING
from prejit.compiler.models.decoder import DecoderConfig

__all__ = ["NAMING", "build", "describe"]


def describe(config: Any) -> DecoderConfig:
    """The sizes of a Qwen 3.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    blocks.windows(config)
    rope.frequencies(config, blocks.head_size(config))
    return blocks.describe(config)


def build(config: Any, context: int | None) -> blocks.RotaryDecoder:
    """A Qwen 3 for contexts up to `context`; None: as long as it was made for."""
    rotary = rope.frequencies(config, blocks.head_size(config), context=context)
    norm = partial(blocks.RMSNorm, epsilon=config.rms_norm_eps)
    width, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias

    def block(window: int | None) -> blocks.Block:
        heads = blocks.Heads.of(config, rotary, window)
        attention = blocks.Attention(width, heads, bias=bias, output_bias=bias, head_norm=norm)
        return blocks.Block(config, attention, blocks.GatedMLP(width, inner, config.hidden_act))

    return blocks.RotaryDecoder(config, [block(window) for window in blocks.windows(config)])
