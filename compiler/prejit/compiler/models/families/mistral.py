"""Mistral: a Llama without biases, in which every token sees a window of the tokens before it.

Sources: Jiang et al. 2023, arXiv 2310.06825; transformers 5, models/mistral/modeling_mistral.py, with which
the logits agree.
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
    window,
)

__all__ = ["NAMING", "build", "describe"]


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a Mistral.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    window(config)
    rope.frequencies(config, head_size(config))
    return rotary_decoder.describe(config)


def build(config: Any, context: int | None) -> RotaryDecoder:
    """Return a Mistral for contexts up to `context`, or as long as it was made for if None."""
    rotary = rope.frequencies(config, head_size(config), context=context)
    heads = Heads.of(config, rotary, window(config))
    width, inner = config.hidden_size, config.intermediate_size

    def block() -> Block:
        mlp = GatedMLP(width, inner, config.hidden_act)
        return Block(config, Attention(width, heads), mlp)

    return RotaryDecoder(config, [block() for _ in range(config.num_hidden_layers)])
