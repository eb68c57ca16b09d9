"""Qwen 2 and 2.5: a Llama with biases on queries, keys and values, and windows in some layers if asked.

Sources: Yang et al. 2024, arXiv 2407.10671; transformers 5, models/qwen2/modeling_qwen2.py, with which the
logits agree.
"""

from __future__ import annotations

from typing import Any

from prejit.compiler.models import blocks, rope
from prejit.compiler.models.blocks import NAMING
from prejit.compiler.models.decoder import DecoderConfig

__all__ = ["NAMING", "build", "describe"]


def describe(config: Any) -> DecoderConfig:
    """The sizes of a Qwen 2.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    blocks.windows(config)
    rope.frequencies(config, blocks.head_size(config))
    return blocks.describe(config)


def build(config: Any, context: int | None) -> blocks.RotaryDecoder:
    """A Qwen 2 for contexts up to `context`; None: as long as it was made for."""
    rotary = rope.frequencies(config, blocks.head_size(config), context=context)
    width, inner = config.hidden_size, config.intermediate_size

    def block(window: int | None) -> blocks.Block:
        heads = blocks.Heads.of(config, rotary, window)
        mlp = blocks.GatedMLP(width, inner, config.hidden_act)
        return blocks.Block(config, blocks.Attention(width, heads, bias=True), mlp)

    return blocks.RotaryDecoder(config, [block(window) for window in blocks.windows(config)])
