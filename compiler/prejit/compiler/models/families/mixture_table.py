"""The table of decoders with mixtures of experts (see decoder_table.py).

Sources:

gpt_oss     OpenAI 2025, arXiv 2508.10925
granitemoe, granitemoeshared    IBM 2024, Granite 3.0 Language Models
granitemoehybrid    IBM 2025, Granite 4; the models without Mamba layers, with and without experts
mixtral     Jiang et al. 2024, arXiv 2401.04088
olmoe       Muennighoff et al. 2024, arXiv 2409.02060
qwen2_moe   Yang et al. 2024, arXiv 2407.10671
qwen3_moe   Yang et al. 2025, arXiv 2505.09388
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prejit.compiler.models.families.decoder_family import DecoderFamily, DecoderNames, Experts
from prejit.compiler.models.families.decoder_table import (
    GRANITE,
    HEAD_NORMS,
    MULTIPLIERS,
    NAMING,
    QWEN2,
    QWEN3,
    QWEN_KEYS,
    rotary,
)
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.layers.layer_config import Converted, Naming, Stacked, require

_MIXTURE = DecoderNames(
    router="mlp.gate", experts_up="mlp.experts.gate_up_proj", experts_down="mlp.experts.down_proj"
)
_MIXTRAL = DecoderFamily(
    DecoderNames(
        router="block_sparse_moe.gate",
        experts_up="block_sparse_moe.experts.gate_up_proj",
        experts_down="block_sparse_moe.experts.down_proj",
    ),
    windows="each",
    experts=Experts(),
)
_QWEN3_MOE_EXPERTS = Experts(
    "num_experts",
    "moe_intermediate_size",
    is_normalized="norm_topk_prob",
    layers=lambda config, layer: (
        layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    ),
)
_QWEN3_MOE = replace(
    QWEN3,
    names=replace(_MIXTURE, head_norms=HEAD_NORMS),
    windows="each",
    experts=_QWEN3_MOE_EXPERTS,
)
_OLMOE = DecoderFamily(
    replace(_MIXTURE, head_norms=HEAD_NORMS),
    bias="attention_bias",
    output_bias="attention_bias",
    norms_heads="all",
    experts=Experts("num_experts", is_normalized="norm_topk_prob"),
)
_GRANITE_MOE = replace(
    GRANITE,
    names=DecoderNames(
        router="block_sparse_moe.router.layer",
        experts_up="block_sparse_moe.input_linear",
        experts_down="block_sparse_moe.output_linear",
    ),
    mlp_bias=False,
    experts=Experts(),
)


_SHARED = ("shared_mlp.input_linear",)
_GRANITE_SHARED = replace(
    _GRANITE_MOE,
    names=replace(_GRANITE_MOE.names, shared_up=_SHARED, shared_down="shared_mlp.output_linear"),
    experts=Experts(shared="shared_intermediate_size"),
)
_GRANITE_HYBRID = replace(
    _GRANITE_SHARED,
    names=replace(_GRANITE_SHARED.names, up=_SHARED, down="shared_mlp.output_linear"),
    inner="shared_intermediate_size",
    turns_layer=lambda config, layer: config.position_embedding_type == "rope",
    experts=Experts(
        shared="shared_intermediate_size",
        layers=lambda config, layer: config.num_local_experts > 0,
    ),
)
_QWEN2_MOE = replace(
    QWEN2,
    names=replace(
        _MIXTURE,
        shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down="mlp.shared_expert.down_proj",
        shared_gate="mlp.shared_expert_gate",
    ),
    bias="qkv_bias",
    experts=replace(_QWEN3_MOE_EXPERTS, shared="shared_expert_intermediate_size"),
)


def _check_granite_hybrid(config: Any) -> None:
    for kind in config.layer_types:
        require(config, "layer_types", kind, ["full_attention", "attention"])
    _GRANITE_HYBRID.heads(config)


def _stacked(names: DecoderNames, gate: str, up: str, down: str) -> Naming:
    """Return the naming of checkpoints in which each matrix of each expert is a tensor."""
    experts = names.experts_up.rpartition(".")[0]
    return replace(
        NAMING,
        renamed=tuple(
            (f".{name}", f".{name}.weight") for name in (names.experts_up, names.experts_down)
        ),
        stacked=(
            Stacked(
                f".{names.experts_up}.weight", f".{experts}.", (f".{gate}.weight", f".{up}.weight")
            ),
            Stacked(f".{names.experts_down}.weight", f".{experts}.", (f".{down}.weight",)),
        ),
    )


_GPT_OSS = DecoderFamily(
    replace(_MIXTURE, router="mlp.router", sinks="self_attn.sinks"),
    bias="attention_bias",
    output_bias="attention_bias",
    windows="by type",
    experts=Experts(has_biases=True, swiglu=(("swiglu_alpha", 1.702), ("swiglu_limit", 7.0))),
)
_UP, _DOWN = (f".mlp.experts.{name}_proj" for name in ("gate_up", "down"))
_GPT_OSS_NAMING = replace(
    NAMING,
    renamed=((f"{_DOWN}_bias", f"{_DOWN}.bias"),),
    converted=(
        Converted(f"{_UP}.bias", (f"{_UP}_bias",), "vector", is_interleaved=True),
        *(
            Converted(f"{name}.weight", (name,), "in out", is_interleaved=name == _UP)
            for name in (_UP, _DOWN)
        ),
        *(
            Converted(
                f"{name}.weight",
                (f"{name}_blocks", f"{name}_scales"),
                "mxfp4",
                is_interleaved=name == _UP,
            )
            for name in (_UP, _DOWN)
        ),
    ),
)
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

MIXTURES: Mapping[str, Family] = {
    "gpt_oss": replace(rotary(_GPT_OSS, naming=_GPT_OSS_NAMING), quantized=("mxfp4",)),
    "granitemoe": rotary(_GRANITE_MOE, *MULTIPLIERS),
    "granitemoehybrid": replace(
        rotary(
            _GRANITE_HYBRID,
            *(*MULTIPLIERS, "layer_types"),
            position_embedding_type=("rope", "nope", None),
        ),
        check=_check_granite_hybrid,
    ),
    "granitemoeshared": rotary(_GRANITE_SHARED, *MULTIPLIERS),
    "mixtral": rotary(_MIXTRAL, naming=_stacked(_MIXTRAL.names, "w1", "w3", "w2")),
    "olmoe": rotary(_OLMOE, naming=_stacked(_OLMOE.names, *_PROJECTIONS), clip_qkv=(None,)),
    "qwen2_moe": rotary(
        _QWEN2_MOE,
        *(*QWEN_KEYS, "decoder_sparse_step", "mlp_only_layers"),
        naming=_stacked(_QWEN2_MOE.names, *_PROJECTIONS),
    ),
    "qwen3_moe": rotary(
        _QWEN3_MOE,
        *("use_sliding_window", "decoder_sparse_step", "mlp_only_layers"),
        naming=_stacked(_QWEN3_MOE.names, *_PROJECTIONS),
    ),
}
"""The mixtures of experts, by model_type."""
