"""Qwen 3: a Llama whose queries and keys are normalized along the head, with optional windows in some layers.

Sources: Yang et al. 2025, arXiv 2505.09388; transformers 5, models/qwen3/modeling_qwen3.py, with which the
logits agree.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.layers.norms import RMSNorm
from prejit.compiler.models.layers.rotary_decoder import (
    NAMING,
    RotaryDecoder,
    build_llama,
    describe_llama,
    windows,
)

__all__ = ["NAMING", "build", "describe"]


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a Qwen 3.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    windows(config)
    return describe_llama(config)


def build(config: Any, context: int | None) -> RotaryDecoder:
    """Return a Qwen 3 for contexts up to `context`, or as long as it was made for if None."""
    bias, norm = config.attention_bias, partial(RMSNorm, epsilon=config.rms_norm_eps)
    return build_llama(
        config, context, windows(config), bias=bias, output_bias=bias, head_norm=norm
    )
