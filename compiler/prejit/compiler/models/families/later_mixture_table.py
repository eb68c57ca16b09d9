"""The table of more decoders with mixtures of experts (see mixture_table.py).

Sources:

llama4      Meta 2025, Llama 4 (Scout and Maverick); of a model that also reads images, the text model
afmoe       Arcee AI 2025, Trinity
cohere2_moe Cohere 2026, Command A with experts
granitemoe_swa    IBM 2026, Granite with windows and sinks
phimoe      Li et al. 2025, arXiv 2506.18349 (Phi-mini-MoE and Phi-tiny-MoE); Phi-3.5-MoE turns by LongRoPE,
            which transformers scales in a way of its own, and is refused
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prejit.compiler.models.families.decoder_family import DecoderFamily, DecoderNames, Experts
from prejit.compiler.models.families.decoder_table import (
    COHERE2,
    HEAD_NORMS,
    MULTIPLIERS,
    NAMING,
    TEXT_PART,
    in_sliding_layers,
    rotary,
)
from prejit.compiler.models.families.decoders import TextDecoder
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.further_decoder_table import with_sinks
from prejit.compiler.models.families.mixture_table import (
    DENSE_OR_SPARSE,
    GRANITE_SHARED,
    MIXTRAL,
    PROJECTIONS,
    WITH_SHARED,
    stacked_experts,
    without_weight,
)
from prejit.compiler.models.layers.config_checks import check_config, checks_of
from prejit.compiler.models.layers.experts import Routing
from prejit.compiler.models.layers.layer_config import Converted, require, unsupported
from prejit.compiler.models.layers.linear import LayerNorm, RMSNorm
from prejit.compiler.models.layers.rope import Rotary

_GRANITE_SWA = with_sinks(
    replace(
        GRANITE_SHARED,
        names=replace(
            GRANITE_SHARED.names,
            router="block_sparse_moe.router",
            experts_up=MIXTRAL.names.experts_up,
            experts_down=MIXTRAL.names.experts_down,
        ),
    )
)
_AFMOE = DecoderFamily(
    replace(
        WITH_SHARED,
        head_norms=HEAD_NORMS,
        attention_gate="self_attn.gate_proj",
        after_attention="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        router="mlp.router.gate",
        after_mlp="post_mlp_layernorm",
    ),
    bias="attention_bias",
    turns_layer=in_sliding_layers,
    windows="by type",
    embedding_scale=lambda config: config.hidden_size**0.5 if config.mup_enabled else 1.0,
    experts=Experts(
        *("num_experts", "moe_intermediate_size"),
        shared=lambda config: config.moe_intermediate_size * config.num_shared_experts,
        routing=lambda config: Routing(
            config.num_experts_per_tok,
            factor=float(config.route_scale),
            is_corrected=True,
            added=1e-20,
        ),
        layers=lambda config, layer: layer >= config.num_dense_layers,
    ),
)
_AFMOE_NAMING = stacked_experts(_AFMOE.names, *PROJECTIONS)
_CORRECTION = (".mlp.expert_bias", ".mlp.router.gate.e_score_correction_bias")
_COHERE2_MOE = replace(
    COHERE2,
    names=replace(WITH_SHARED, mlp_norm=""),
    inner=lambda config, layer: config.prefix_dense_intermediate_size or config.intermediate_size,
    turns_layer=lambda config, layer: (
        in_sliding_layers(config, layer)
        or (
            config.mlp_layer_types[layer] == "dense"
            and config.prefix_dense_sliding_window_pattern == 1
        )
    ),
    experts=Experts(
        "num_experts",
        shared=lambda config: config.intermediate_size * config.num_shared_experts,
        routing=lambda config: Routing(
            config.num_experts_per_tok,
            is_normalized=config.expert_selection_fn == "softmax" or config.norm_topk_prob,
            is_sigmoid=config.expert_selection_fn == "sigmoid",
        ),
        layers=lambda config, layer: config.mlp_layer_types[layer] == "sparse",
        averages=lambda config: config.shared_expert_combination_strategy == "average",
    ),
)


def _cohere2_moe(config: Any, context: int | None) -> TextDecoder:
    """Return a decoder with the norms for which config.json has an epsilon."""
    family = _COHERE2_MOE
    if config.rms_norm_eps is not None:
        family = replace(family, norm=RMSNorm, epsilon="rms_norm_eps")
    return TextDecoder(family, config, context)


def _check_cohere2_moe(config: Any) -> None:
    if config.rms_norm_eps is not None:
        check_config(Path(config.name_or_path, "config.json"), config, checks_of("rms_norm_eps"))
    _COHERE2_MOE.heads(config)


_LLAMA4 = DecoderFamily(
    DecoderNames(
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        experts_up="feed_forward.experts.gate_up_proj",
        experts_down="feed_forward.experts.down_proj",
        shared_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
        shared_down="feed_forward.shared_expert.down_proj",
    ),
    inner="intermediate_size_mlp",
    bias="attention_bias",
    norms_turned=lambda config, layer: bool(config.use_qk_norm and config.no_rope_layers[layer]),
    growth=lambda config: (
        Rotary(
            (), growth=float(config.attn_scale), growth_positions=config.floor_scale, growth_start=1
        )
        if config.attn_temperature_tuning
        else None
    ),
    turns_layer=lambda config, layer: bool(config.no_rope_layers[layer]),
    is_interleaved=True,
    chunks=lambda config, layer: (
        config.attention_chunk_size if config.layer_types[layer] == "chunked_attention" else None
    ),
    experts=Experts(
        shared=lambda config: config.intermediate_size,
        routing=lambda config: Routing(
            config.num_experts_per_tok, is_normalized=False, is_sigmoid=True, scales_inputs=True
        ),
        layers=lambda config, layer: layer in config.moe_layers,
    ),
)


def _check_llama4(config: Any) -> None:
    if "chunked_attention" in config.layer_types and config.attention_chunk_size is None:
        raise unsupported(
            config,
            'attention_chunk_size: expected a number, as layer_types has "chunked_attention", found null',
        )
    _LLAMA4.heads(config)


_PHIMOE = replace(
    MIXTRAL,
    norm=LayerNorm,
    bias="attention_bias",
    head_bias="lm_head_bias",
    experts=Experts(routing=lambda config: Routing(2, margin=2 * config.router_jitter_noise)),
)


def _check_phimoe(config: Any) -> None:
    """Check what transformers reads otherwise than for other families."""
    kind = config.rope_parameters.get("rope_type")
    require(config, "rope_parameters.rope_type", kind, ["default"])
    if config.lm_head_bias:  # a table of embeddings that is the head, too, has no bias
        require(config, "tie_word_embeddings", config.tie_word_embeddings, [False])
    _PHIMOE.heads(config)


LATER_MIXTURES: Mapping[str, Family] = {
    "afmoe": rotary(
        _AFMOE,
        *("num_shared_experts", "route_scale", "num_dense_layers", "mup_enabled"),
        naming=replace(_AFMOE_NAMING, renamed=(*_AFMOE_NAMING.renamed, _CORRECTION)),
    ),
    "cohere2_moe": rotary(
        _COHERE2_MOE,
        *("logit_scale", "mlp_layer_types", "norm_topk_prob", "num_shared_experts"),
        *("prefix_dense_intermediate_size", "prefix_dense_sliding_window_pattern"),
        naming=stacked_experts(_COHERE2_MOE.names, *PROJECTIONS),
        build=_cohere2_moe,
        check=_check_cohere2_moe,
        mlp_layer_types=DENSE_OR_SPARSE,
        expert_selection_fn=("softmax", "sigmoid"),
        shared_expert_combination_strategy=("average", "sum"),
    ),
    "granitemoe_swa": rotary(
        _GRANITE_SWA,
        *(*MULTIPLIERS, "shared_intermediate_size", "layer_rope_theta"),
        naming=replace(NAMING, renamed=without_weight(_GRANITE_SWA.names)),
    ),
    "llama4_text": rotary(
        _LLAMA4,
        *("intermediate_size", "no_rope_layers", "layer_types", "attention_chunk_size"),
        *("moe_layers", "use_qk_norm", "attn_temperature_tuning", "floor_scale", "attn_scale"),
        naming=replace(
            TEXT_PART,
            ignored=(*TEXT_PART.ignored, "model.vision_model."),
            converted=tuple(
                Converted(f".{name}.weight", (f".{name}",), "in out", is_interleaved=False)
                for name in (_LLAMA4.names.experts_up, _LLAMA4.names.experts_down)
            ),
        ),
        sliding_window=(None,),
        layer_types=("full_attention", "chunked_attention"),
        check=_check_llama4,
    ),
    "phimoe": rotary(
        _PHIMOE,
        "router_jitter_noise",
        naming=stacked_experts(_PHIMOE.names, "w1", "w3", "w2"),
        num_experts_per_tok=(2,),
        check=_check_phimoe,
    ),
}
"""More mixtures of experts, by model_type."""
