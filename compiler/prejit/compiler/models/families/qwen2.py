"""Qwen 2 and 2.5: a Llama with biases on queries, keys and values, and optional windows in some layers.

Sources: Yang et al. 2024, arXiv 2407.10671; transformers 5, models/qwen2/modeling_qwen2.py, with which the
logits agree.
"""

from __future__ import annotations

from typing import Any

from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.layers.rotary_decoder import (
    NAMING,
    RotaryDecoder,
    build_llama,
    describe_llama,
    windows,
)

__all__ = ["NAMING", "build", "describe"]


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a Qwen 2.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    windows(config)
    return describe_llama(config)


def build(config: Any, context: int | None) -> RotaryDecoder:
    """Return a Qwen 2 for contexts up to `context`, or as long as it was made for if None."""
    return build_llama(config, context, windows(config), bias=True)
