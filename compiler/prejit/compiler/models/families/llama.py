"""Llama 1 to 3 and models of the same form: rotary positions, RMSNorm, grouped-query attention, gated MLP.

Sources: Touvron et al. 2023 (Llama 2), arXiv 2307.09288; Grattafiori et al. 2024 (Llama 3),
arXiv 2407.21783; transformers 5, models/llama/modeling_llama.py, with which the logits agree.
"""

from __future__ import annotations

from typing import Any

from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.layers.rotary_decoder import (
    NAMING,
    RotaryDecoder,
    build_llama,
    describe_llama,
)

__all__ = ["NAMING", "build", "describe"]


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a Llama.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    return describe_llama(config)


def build(config: Any, context: int | None) -> RotaryDecoder:
    """Return a Llama for contexts up to `context`, or as long as it was made for if None."""
    bias = config.attention_bias
    return build_llama(config, context, bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)
