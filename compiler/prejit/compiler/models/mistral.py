"""Mistral: a Llama without biases, of which every token sees a window of those before it.

Sources: Jiang et al. 2023, arXiv 2310.06825; transformers 5, models/mistral/modeling_mistral.py, with which
the logits agree.
"""

from __future__ import annotations

from typing import Any

from prejit.compiler.models import blocks, rope
from prejit.compiler.models.blocks import NAMING
from prejit.compiler.models.decoder import DecoderConfig

__all__ = ["NAMING", "build", "describe"]


def describe(config: Any) -> DecoderConfig:
    """The sizes of a Mistral.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    blocks.window(config)
    rope.frequencies(config, blocks.head_size(config))
    return blocks.describe(config)


def build(config: Any, context: int | None) -> blocks.RotaryDecoder:
    """A Mistral for contexts up to `context`; None: as long as it was made for."""
    rotary = rope.frequencies(config, blocks.head_size(config), context=context)
    heads = blocks.Heads.of(config, rotary, blocks.window(config))
    width, inner = config.hidden_size, config.intermediate_size

    def block() -> blocks.Block:
        mlp = blocks.GatedMLP(width, inner, config.hidden_act)
        return blocks.Block(config, blocks.Attention(width, heads), mlp)

    return blocks.RotaryDecoder(config, [block() for _ in range(config.num_hidden_layers)])
