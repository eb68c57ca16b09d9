"""Gemma 3, its text model: Gemma 2 with norms of queries and keys instead of a bound of the scores.

Layers with a window turn their heads at one base frequency, layers without one at another. From a directory
of a model that also reads images (`gemma3`) only the text model is read.

Sources: Gemma Team 2025, arXiv 2503.19786; transformers 5, models/gemma3/modeling_gemma3.py, with which the
logits agree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prejit.compiler.models.families import gemma2
from prejit.compiler.models.layers import rope, rotary_decoder
from prejit.compiler.models.layers.layer_config import DecoderConfig, require
from prejit.compiler.models.layers.rotary_decoder import Attention, Heads, RotaryDecoder, windows

__all__ = ["NAMING", "build", "describe"]

_PARTS = ("vision_tower.", "multi_modal_projector.")

NAMING = replace(
    rotary_decoder.NAMING,
    ignored=(*_PARTS, *(f"model.{part}" for part in _PARTS)),
    # the names in which transformers 5, 4.52 and older saved models that read images
    moved=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
)


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a Gemma 3.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    both_ways = config.use_bidirectional_attention
    require(config, "use_bidirectional_attention", both_ways, [None, False])
    # transformers' text model has no bound of the scores, whatever the configuration holds
    require(config, "attn_logit_softcapping", config.attn_logit_softcapping, [None])
    windows(config)
    for layer_type in set(config.layer_types):
        rope.frequencies(config, config.head_dim, layer_type=layer_type)
    return rotary_decoder.describe(config, "hidden_activation")


def build(config: Any, context: int | None) -> RotaryDecoder:
    """Return a Gemma 3 for contexts up to `context`, or as long as it was made for if None."""
    size, norm = config.head_dim, gemma2.norm_of(config)

    def block(layer_type: str, window: int | None) -> gemma2.Block:
        rotary = rope.frequencies(config, size, context=context, layer_type=layer_type)
        scale = config.query_pre_attn_scalar**-0.5
        heads = replace(Heads.of(config, rotary, window), scale=scale)
        bias = config.attention_bias
        attention = Attention(
            config.hidden_size, heads, bias=bias, output_bias=bias, head_norm=norm
        )
        return gemma2.Block(config, attention)

    return RotaryDecoder(
        config,
        list(map(block, config.layer_types, windows(config))),
        norm=norm(config.hidden_size),
        embedding_scale=config.hidden_size**0.5,
        logit_cap=config.final_logit_softcapping,
    )
