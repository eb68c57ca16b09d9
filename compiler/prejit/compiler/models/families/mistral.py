"""Mistral: a Llama without biases, in which every token sees a window of the tokens before it.

Sources: Jiang et al. 2023, arXiv 2310.06825; transformers 5, models/mistral/modeling_mistral.py, with which
the logits agree.
"""

from __future__ import annotations

from typing import Any

from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.layers.rotary_decoder import (
    NAMING,
    RotaryDecoder,
    build_llama,
    describe_llama,
    window,
)

__all__ = ["NAMING", "build", "describe"]


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a Mistral.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    window(config)
    return describe_llama(config)


def build(config: Any, context: int | None) -> RotaryDecoder:
    """Return a Mistral for contexts up to `context`, or as long as it was made for if None."""
    return build_llama(config, context, [window(config)] * config.num_hidden_layers)
