"""The table of decoders with mixtures of experts (see decoder_table.py); later_mixture_table.py has more.

Sources:

deepseek_v2, deepseek_v3    DeepSeek-AI 2024, arXiv 2405.04434 and 2412.19437
dots1       rednote-hilab 2025, arXiv 2506.05767
ernie4_5_moe    Baidu 2025, ERNIE 4.5 Technical Report
exaone_moe  LG AI Research 2026, K-EXAONE
flex_olmo   Shi et al. 2025, arXiv 2507.07024
glm4_moe, glm4_moe_lite    GLM Team 2025, arXiv 2508.06471 (GLM 4.5 and 4.6; GLM 4.7 Flash)
gpt_oss     OpenAI 2025, arXiv 2508.10925
granitemoe, granitemoeshared    IBM 2024, Granite 3.0 Language Models
hunyuan_v1_moe  Tencent 2025, Hunyuan-A13B
minimax_m2  MiniMax 2025, MiniMax-M2
mixtral     Jiang et al. 2024, arXiv 2401.04088
mellum      JetBrains 2026, Mellum 2
olmoe       Muennighoff et al. 2024, arXiv 2409.02060
qwen2_moe   Yang et al. 2024, arXiv 2407.10671
qwen3_moe   Yang et al. 2025, arXiv 2505.09388
sarvam_mla, sarvam_moe  Sarvam AI 2026, Sarvam 105B and 30B
solar_open  Upstage 2026, Solar Open
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from prejit.compiler.models.families import latent_attention
from prejit.compiler.models.families.decoder_family import DecoderFamily, DecoderNames, Experts
from prejit.compiler.models.families.decoder_table import (
    ERNIE,
    EXAONE4,
    GRANITE,
    HEAD_NORMS,
    HUNYUAN,
    MULTIPLIERS,
    NAMING,
    NORMED_AFTER,
    QWEN2,
    QWEN3,
    QWEN_KEYS,
    normed_if_large,
    rotary,
)
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.layers.experts import Routing
from prejit.compiler.models.layers.layer_config import (
    Converted,
    Naming,
    Stacked,
    require,
    unsupported,
)

_MIXTURE = DecoderNames(
    router="mlp.gate", experts_up="mlp.experts.gate_up_proj", experts_down="mlp.experts.down_proj"
)
MIXTRAL = DecoderFamily(
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
    norms_heads="all",
    experts=Experts("num_experts", is_normalized="norm_topk_prob"),
)
_FLEX_OLMO = replace(
    _OLMOE,
    names=replace(
        NORMED_AFTER,
        router=_MIXTURE.router,
        experts_up=_MIXTURE.experts_up,
        experts_down=_MIXTURE.experts_down,
    ),
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


GRANITE_SHARED_UP = ("shared_mlp.input_linear",)
GRANITE_SHARED = replace(
    _GRANITE_MOE,
    names=replace(
        _GRANITE_MOE.names, shared_up=GRANITE_SHARED_UP, shared_down="shared_mlp.output_linear"
    ),
    experts=Experts(shared=lambda config: config.shared_intermediate_size),
)
QWEN2_MOE = replace(
    QWEN2,
    names=replace(
        _MIXTURE,
        shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down="mlp.shared_expert.down_proj",
        shared_gate="mlp.shared_expert_gate",
    ),
    bias="qkv_bias",
    experts=replace(
        _QWEN3_MOE_EXPERTS, shared=lambda config: config.shared_expert_intermediate_size
    ),
)


def without_weight(names: DecoderNames) -> tuple[tuple[str, str], ...]:
    """Return the published names of the matrices of experts, which lack the end `.weight`."""
    matrices = (names.experts_up, names.experts_down)
    return tuple((f".{name}", f".{name}.weight") for name in matrices)


def stacked_experts(names: DecoderNames, gate: str, up: str, down: str) -> Naming:
    """Return the naming of checkpoints in which each matrix of each expert is a tensor."""
    experts = names.experts_up.rpartition(".")[0]
    return replace(
        NAMING,
        renamed=without_weight(names),
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
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _greedy(config: Any) -> Routing:
    """Return the routing of DeepSeek V2."""
    chosen, factor = config.num_experts_per_tok, float(config.routed_scaling_factor)
    if config.topk_method == "greedy":
        return Routing(chosen, is_normalized=False, factor=factor)
    groups, kept = config.n_group, config.topk_group
    return Routing(chosen, is_normalized=False, factor=factor, groups=groups, kept=kept)


def corrected(config: Any) -> Routing:
    """Return the routing of DeepSeek V3."""
    return Routing(
        config.num_experts_per_tok,
        is_normalized=config.norm_topk_prob,
        factor=float(config.routed_scaling_factor),
        is_corrected=True,
        groups=config.n_group,
        kept=config.topk_group,
        added=1e-20,
    )


DENSE_OR_SPARSE = ("dense", "sparse")
"""The kinds of MLPs of layers."""


def _is_sparse(config: Any, layer: int) -> bool:
    return bool(config.mlp_layer_types[layer] == "sparse")


def _one_for_all_layers(config: Any) -> int:
    """Return the number of experts for each token, which files of Hunyuan may say for each layer."""
    chosen = config.moe_topk
    return int(chosen[0] if isinstance(chosen, list) else chosen)


_MELLUM = replace(
    _QWEN3_MOE,
    turns="by type",
    windows="by type",
    experts=replace(_QWEN3_MOE_EXPERTS, layers=_is_sparse),
)
_DEEPSEEK_EXPERTS = Experts(
    "n_routed_experts",
    "moe_intermediate_size",
    shared=lambda config: config.moe_intermediate_size * config.n_shared_experts,
    routing=_greedy,
    layers=lambda config, layer: layer >= config.first_k_dense_replace,
)
WITH_SHARED = replace(
    _MIXTURE,
    shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)
"""The names of a mixture with an MLP beside its experts."""
_DEEPSEEK2 = DecoderFamily(
    WITH_SHARED,
    output_bias="attention_bias",
    is_interleaved=True,
    scale=lambda config, layer: latent_attention.scale(config),
    experts=_DEEPSEEK_EXPERTS,
    is_latent=True,
)
_CORRECTED_EXPERTS = replace(_DEEPSEEK_EXPERTS, routing=corrected)
_DEEPSEEK3 = replace(_DEEPSEEK2, is_interleaved="rope_interleave", experts=_CORRECTED_EXPERTS)
_GLM4_MOE_LITE = replace(_DEEPSEEK3, experts=replace(_CORRECTED_EXPERTS, layers=_is_sparse))
_DOTS1 = replace(
    QWEN3, names=replace(_DEEPSEEK2.names, head_norms=HEAD_NORMS), experts=_DEEPSEEK3.experts
)
_GLM4_MOE = DecoderFamily(
    _DEEPSEEK2.names,
    bias="attention_bias",
    output_bias=False,
    turns="part",
    experts=_DEEPSEEK3.experts,
)
_QKV = "self_attn.query_key_value"
_SARVAM_MOE = replace(_GLM4_MOE, names=replace(_GLM4_MOE.names, qkv=(_QKV,)))
_SARVAM_RENAMED = (
    *((f".attention.query_key_value.{end}", f".{_QKV}.{end}") for end in ("weight", "bias")),
    (".attention.dense.weight", ".self_attn.o_proj.weight"),
    (".attention.query_layernorm.weight", ".self_attn.q_norm.weight"),
    (".attention.key_layernorm.weight", ".self_attn.k_norm.weight"),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
_MINIMAX_M2 = replace(
    MIXTRAL,
    names=replace(MIXTRAL.names, head_norms=HEAD_NORMS),
    norms_heads="all",
    turns="part",
    windows="",
    experts=Experts(routing=lambda config: Routing(config.num_experts_per_tok, is_corrected=True)),
)
_EXAONE_MOE = replace(
    EXAONE4,
    names=_DOTS1.names,
    experts=replace(
        _CORRECTED_EXPERTS,
        count="num_experts",
        shared=lambda config: config.moe_intermediate_size * config.num_shared_experts,
        layers=_is_sparse,
    ),
)
_SOLAR_OPEN = replace(
    _GLM4_MOE,
    turns="whole",
    inner="moe_intermediate_size",
    experts=replace(_CORRECTED_EXPERTS, layers=lambda config, layer: True),
)
_ERNIE_MOE = replace(
    ERNIE,
    names=_DEEPSEEK2.names,
    bias=False,
    mlp_bias=False,
    experts=Experts(
        "moe_num_experts",
        "moe_intermediate_size",
        "moe_k",
        shared=lambda config: config.moe_intermediate_size * config.moe_num_shared_experts,
        routing=lambda config: Routing(config.moe_k, is_corrected=True, is_softmax=True),
        layers=lambda config, layer: (
            config.moe_layer_start_index <= layer <= config.moe_layer_end_index
            and (layer + 1) % config.moe_layer_interval == 0
        ),
    ),
)
_HUNYUAN_MOE = replace(
    HUNYUAN,
    names=replace(
        _MIXTURE,
        head_norms=HUNYUAN.names.head_norms,
        router="mlp.gate.wg",
        shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
    ),
    experts=Experts(
        "num_experts", chosen=_one_for_all_layers, shared=lambda config: config.intermediate_size
    ),
)


def _check_hunyuan(config: Any) -> None:
    first = _one_for_all_layers(config)
    for chosen in config.moe_topk if isinstance(config.moe_topk, list) else ():
        require(config, "moe_topk", chosen, [first])
    _HUNYUAN_MOE.heads(config)


def check_groups(family: DecoderFamily, routing_of: Callable[[Any], Routing], config: Any) -> None:
    """Check what the keys of groups say together."""
    assert family.experts is not None
    key = family.experts.count
    routing, count = routing_of(config), getattr(config, key)
    if routing.groups is None or routing.kept is None:
        raise unsupported(config, "n_group and topk_group: expected numbers, found null")
    size, kept = count // routing.groups, routing.kept
    fewest = 2 if routing.is_corrected and routing.groups > 1 else 1
    if count % routing.groups or kept > routing.groups or size < fewest:
        raise unsupported(
            config,
            f"n_group: expected a divisor of {key} = {count}, at least topk_group = {kept}, that "
            f"leaves {fewest} or more experts in a group; found {routing.groups}",
        )
    if routing.chosen > size * kept:
        raise unsupported(
            config,
            f"num_experts_per_tok: expected at most {size * kept}, the experts of topk_group groups, found "
            f"{routing.chosen}",
        )
    family.heads(config)


def _deepseek(
    family: DecoderFamily, routing: Callable[[Any], Routing], *keys: str, **allowed: Any
) -> Family:
    drafts = "num_nextn_predict_layers"
    dense = () if "mlp_layer_types" in keys else ("first_k_dense_replace",)
    of_experts = ("n_shared_experts", *dense, "routed_scaling_factor", drafts)
    of_attention = latent_attention.KEYS if family.is_latent else ()
    made = rotary(
        family,
        *(*of_attention, *of_experts, "n_group", "topk_group", *keys),
        naming=replace(stacked_experts(family.names, *PROJECTIONS), drafts=drafts),
        **allowed,
    )
    return replace(made, check=partial(check_groups, family, routing))


def _glm4_moe(family: DecoderFamily) -> Family:
    """Return a family whose larger models have norms of heads."""
    made = _deepseek(family, corrected, "norm_topk_prob", use_qk_norm=(False, True))
    return replace(made, build=partial(normed_if_large, family))


def _sarvam_moe() -> Family:
    made = _glm4_moe(_SARVAM_MOE)
    moved = (("model.word_embeddings.", "model.embed_tokens."),)
    renamed = (*made.naming.renamed, *_SARVAM_RENAMED)
    return replace(made, naming=replace(made.naming, moved=moved, renamed=renamed))


def _with_correction(naming: Naming, published: str, router: str, *ignored: str) -> Naming:
    """Return the naming of checkpoints that hold the correction of a router elsewhere."""
    end = "e_score_correction_bias"
    renamed = (*naming.renamed, (f".{published}.{end}", f".{router}.{end}"))
    return replace(naming, renamed=renamed, ignored=ignored)


_ROUTING_KEYS = ("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob")

MIXTURES: Mapping[str, Family] = {
    "deepseek_v2": _deepseek(
        _DEEPSEEK2,
        _greedy,
        topk_method=("greedy", "group_limited_greedy"),
        norm_topk_prob=(False,),
        mlp_bias=(False,),
    ),
    **dict.fromkeys(
        ("deepseek_v3", "sarvam_mla"), _deepseek(_DEEPSEEK3, corrected, "norm_topk_prob")
    ),
    "dots1": _deepseek(_DOTS1, corrected, "norm_topk_prob", "max_window_layers"),
    "ernie4_5_moe": rotary(
        _ERNIE_MOE,
        *("intermediate_size", "moe_num_shared_experts", "moe_layer_interval"),
        *("moe_layer_start_index", "moe_layer_end_index"),
        naming=_with_correction(
            stacked_experts(_ERNIE_MOE.names, *PROJECTIONS),
            "mlp.moe_statics",
            "mlp.gate",
            # layers that draft tokens
            *("model.mtp_", "mtp_"),
        ),
        use_bias=(False,),
        moe_norm_min=(1e-12,),
    ),
    "exaone_moe": rotary(
        _EXAONE_MOE,
        *("num_shared_experts", "mlp_layer_types", *_ROUTING_KEYS),
        naming=_with_correction(
            stacked_experts(_EXAONE_MOE.names, *PROJECTIONS), "mlp", "mlp.gate", "mtp."
        ),
        mlp_layer_types=DENSE_OR_SPARSE,
        check=partial(check_groups, _EXAONE_MOE, corrected),
    ),
    "flex_olmo": rotary(_FLEX_OLMO, naming=stacked_experts(_FLEX_OLMO.names, *PROJECTIONS)),
    "glm4_moe": _glm4_moe(_GLM4_MOE),
    "glm4_moe_lite": _deepseek(
        _GLM4_MOE_LITE,
        corrected,
        *("norm_topk_prob", "mlp_layer_types"),
        mlp_layer_types=DENSE_OR_SPARSE,
    ),
    "gpt_oss": replace(rotary(_GPT_OSS, naming=_GPT_OSS_NAMING), quantized=("mxfp4",)),
    "granitemoe": rotary(_GRANITE_MOE, *MULTIPLIERS),
    "granitemoeshared": rotary(GRANITE_SHARED, *MULTIPLIERS, "shared_intermediate_size"),
    "hunyuan_v1_moe": rotary(
        _HUNYUAN_MOE,
        "moe_topk",
        naming=stacked_experts(_HUNYUAN_MOE.names, *PROJECTIONS),
        check=_check_hunyuan,
    ),
    "mellum": rotary(
        _MELLUM,
        "mlp_layer_types",
        naming=replace(stacked_experts(_MELLUM.names, *PROJECTIONS), ignored=("mtp.",)),
        mlp_layer_types=DENSE_OR_SPARSE,
    ),
    "minimax_m2": rotary(
        _MINIMAX_M2,
        "rotary_dim",
        naming=_with_correction(
            stacked_experts(_MINIMAX_M2.names, "w1", "w3", "w2"),
            "block_sparse_moe",
            "block_sparse_moe.gate",
        ),
    ),
    "mixtral": rotary(MIXTRAL, naming=stacked_experts(MIXTRAL.names, "w1", "w3", "w2")),
    "olmoe": rotary(_OLMOE, naming=stacked_experts(_OLMOE.names, *PROJECTIONS), clip_qkv=(None,)),
    "qwen2_moe": rotary(
        QWEN2_MOE,
        *(*QWEN_KEYS, "decoder_sparse_step", "mlp_only_layers"),
        "shared_expert_intermediate_size",
        naming=stacked_experts(QWEN2_MOE.names, *PROJECTIONS),
    ),
    "qwen3_moe": rotary(
        _QWEN3_MOE,
        *("use_sliding_window", "decoder_sparse_step", "mlp_only_layers"),
        naming=stacked_experts(_QWEN3_MOE.names, *PROJECTIONS),
    ),
    "sarvam_moe": _sarvam_moe(),
    "solar_open": rotary(
        _SOLAR_OPEN,
        *("n_shared_experts", *_ROUTING_KEYS),
        naming=stacked_experts(_SOLAR_OPEN.names, *PROJECTIONS),
        check=partial(check_groups, _SOLAR_OPEN, corrected),
    ),
}
"""The mixtures of experts, by model_type."""
