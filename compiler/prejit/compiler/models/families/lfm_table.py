"""The table of Liquid AI's hybrids (see decoder_table.py): gated convolutions in most layers.

Sources:

lfm2        Liquid AI 2025, arXiv 2511.23404
lfm2_moe    Liquid AI 2025, LFM2-8B-A1B
lfm3        Liquid AI 2026, LFM3; windows in some layers with attention, a gate for each head
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prejit.compiler.models.families.decoder_family import (
    DecoderFamily,
    DecoderNames,
    Experts,
    States,
)
from prejit.compiler.models.families.decoder_table import HEAD_NORMS, rotary
from prejit.compiler.models.families.decoders import TextDecoder
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.mixture_table import stacked_experts
from prejit.compiler.models.layers.causal_convolution import ShortConvolution
from prejit.compiler.models.layers.experts import Routing


def _inner(config: Any, layer: int) -> int:
    """Return the width of LFM2's MLP, which its settings may round."""
    inner, step = int(config.intermediate_size), config.block_multiple_of
    if not config.block_auto_adjust_ff_dim:
        return inner
    inner = int(config.block_ffn_dim_multiplier * int(2 * inner / 3))
    return int(step * ((inner + step - 1) // step))


_KINDS = ("full_attention", "conv")
_LFM2 = DecoderFamily(
    DecoderNames(
        norm="embedding_norm",
        attention_norm="operator_norm",
        head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        output="self_attn.out_proj",
        mlp_norm="ffn_norm",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        state="conv",
        state_output="conv.out_proj",
    ),
    epsilon="norm_eps",
    activation="",
    inner=_inner,
    states=States(
        lambda config: ShortConvolution(
            config.hidden_size, config.conv_L_cache, bias=config.conv_bias
        ),
        layers=lambda config, layer: bool(config.layer_types[layer] == "conv"),
        bias="conv_bias",
    ),
)


def _routing(config: Any) -> Routing:
    return Routing(
        config.num_experts_per_tok,
        is_normalized=config.norm_topk_prob,
        factor=float(config.routed_scaling_factor),
        is_corrected=True,
        added=1e-6,
    )


_LFM2_MOE = replace(
    _LFM2,
    names=replace(
        _LFM2.names,
        router="feed_forward.gate",
        experts_up="feed_forward.experts.gate_up_proj",
        experts_down="feed_forward.experts.down_proj",
    ),
    inner="intermediate_size",
    experts=Experts(
        "num_experts",
        "moe_intermediate_size",
        routing=_routing,
        layers=lambda config, layer: layer >= config.num_dense_layers,
    ),
)
_LFM2_MOE_NAMING = stacked_experts(_LFM2_MOE.names, "w1", "w3", "w2")
_LFM3 = replace(
    _LFM2,
    names=replace(
        _LFM2.names,
        head_norms=HEAD_NORMS,
        output="self_attn.o_proj",
        attention_gate="self_attn.gate_proj",
        after_attention="post_operator_norm",
        after_mlp="post_ffn_norm",
    ),
    bias="attention_bias",
    inner="intermediate_size",
    turns="by type",
    windows="by type",
    gates_heads=True,
)


def _lfm3(config: Any, context: int | None) -> TextDecoder:
    """Return LFM3, whose gates and norms of what is added are options."""
    names = _LFM3.names
    if not config.use_attention_gate:
        names = replace(names, attention_gate="")
    if not config.use_sandwich_norm:
        names = replace(names, after_attention="", after_mlp="")
    return TextDecoder(replace(_LFM3, names=names), config, context)


_CONVOLUTION = ("layer_types", "conv_L_cache")

LFMS: Mapping[str, Family] = {
    "lfm2": rotary(
        _LFM2,
        *(*_CONVOLUTION, "intermediate_size", "block_multiple_of"),
        *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier"),
        layer_types=_KINDS,
    ),
    "lfm2_moe": rotary(
        _LFM2_MOE,
        *(*_CONVOLUTION, "num_dense_layers", "norm_topk_prob", "routed_scaling_factor"),
        naming=replace(
            _LFM2_MOE_NAMING,
            renamed=(
                *_LFM2_MOE_NAMING.renamed,
                (".feed_forward.expert_bias", ".feed_forward.gate.e_score_correction_bias"),
            ),
        ),
        use_expert_bias=(True,),
        layer_types=_KINDS,
    ),
    "lfm3": rotary(
        _LFM3,
        *(*_CONVOLUTION, "use_attention_gate", "use_sandwich_norm"),
        build=_lfm3,
        layer_types=("sliding_attention", *_KINDS),
    ),
}
"""The models of Liquid AI, by model_type."""
