"""The table of decoders with layers that keep a state in place of keys and values (see decoder_table.py).

Sources:

bamba       IBM, Princeton, CMU and UIUC 2024, Bamba 9B
falcon_h1   Falcon LLM Team 2025, arXiv 2507.22448; attention and Mamba-2 read the same x in each layer
granitemoehybrid    IBM 2025, Granite 4; with and without experts, Mamba-2 and rotary positions
mamba2      Dao and Gu 2024, arXiv 2405.21060; no layer has attention or an MLP
nemotron_h  NVIDIA 2025, arXiv 2504.03624 and Nemotron 3; a layer is Mamba-2, attention, an MLP or experts
qwen3_5_text, qwen3_5_moe_text  Qwen Team 2026, Qwen3.5; of a model that also reads images, the text model
qwen3_next  Qwen Team 2025, Qwen3-Next; the gated delta rule, and in some layers attention with a gate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from prejit.compiler.models.families.decoder_family import (
    DecoderFamily,
    DecoderNames,
    Experts,
    Factors,
    States,
)
from prejit.compiler.models.families.decoder_table import (
    HEAD_NORMS,
    MULTIPLIERS,
    TEXT_PART,
    rotary,
)
from prejit.compiler.models.families.decoders import TextDecoder
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.mixture_table import (
    GRANITE_SHARED,
    GRANITE_SHARED_UP,
    PROJECTIONS,
    QWEN2_MOE,
    check_groups,
    corrected,
    stacked_experts,
)
from prejit.compiler.models.layers.config_checks import checks_of
from prejit.compiler.models.layers.gated_delta import GatedDelta, GatedDeltaSettings
from prejit.compiler.models.layers.layer_config import Naming, Stacked
from prejit.compiler.models.layers.linear import ACTIVATIONS, RMSNorm
from prejit.compiler.models.layers.mamba2 import Mamba2, Mamba2Settings

_ATTENTION = ("full_attention", "attention")
"""The kinds of layers with attention; the second name is that of older files."""
_STATE = ("linear_attention", "mamba")
_KINDS = (*_ATTENTION, *_STATE, "hybrid")

_MAMBA2_KEYS = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    *("mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
)
_MAMBA2_GROUPS = (("mamba_n_heads", "mamba_n_groups"),)


def _mamba2(config: Any, **changes: Any) -> Mamba2:
    """Return the layer of a hybrid."""
    low, high = config.time_step_limit
    settings = Mamba2Settings(
        width=config.hidden_size,
        heads=config.mamba_n_heads,
        head_size=config.mamba_d_head,
        groups=config.mamba_n_groups,
        states=config.mamba_d_state,
        taps=config.mamba_d_conv,
        epsilon=config.rms_norm_eps,
        activation=config.hidden_act,
        limits=(float(low), float(high)),
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
    )
    return Mamba2(replace(settings, **changes))


def _falcon_h1_state(config: Any) -> Mamba2:
    gate: Literal["no norm", "after norm", "before norm"] = "no norm"
    if config.mamba_rms_norm:
        gate = "after norm" if config.mamba_norm_before_gate else "before norm"
    return _mamba2(
        config,
        gate=gate,
        input_factor=float(config.ssm_in_multiplier),
        factors=tuple(map(float, config.ssm_multipliers)),
    )


def _own_mamba2(config: Any, **sizes: Any) -> Mamba2:
    """Return the layer of a family whose other keys are those of Mamba-2 itself."""
    return Mamba2(
        Mamba2Settings(
            width=config.hidden_size,
            groups=config.n_groups,
            taps=config.conv_kernel,
            epsilon=config.layer_norm_epsilon,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            **sizes,
        )
    )


def _mamba2_alone(config: Any) -> Mamba2:
    low, high = config.time_step_limit
    return _own_mamba2(
        config,
        heads=config.num_heads,
        head_size=config.head_dim,
        states=config.state_size,
        activation=config.hidden_act,
        limits=(float(low), float(high)),
    )


def _nemotron_state(config: Any) -> Mamba2:
    return _own_mamba2(
        config,
        heads=config.mamba_num_heads,
        head_size=config.mamba_head_dim,
        states=config.ssm_state_size,
        activation=config.mamba_hidden_act,
        limits=(float(config.time_step_min), math.inf),  # transformers reads no other limit
    )


def _falcon_h1_factors(config: Any) -> Factors:
    gate, down = config.mlp_multipliers
    return Factors(
        attention=float(config.attention_out_multiplier),
        state=float(config.ssm_out_multiplier),
        mlp=float(down),
        attended=float(config.attention_in_multiplier),
        key=float(config.key_multiplier),
        gate=float(gate),
    )


def _gated_delta(config: Any, *, is_joined: bool) -> GatedDelta:
    return GatedDelta(
        GatedDeltaSettings(
            width=config.hidden_size,
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_size=config.linear_key_head_dim,
            value_size=config.linear_value_head_dim,
            taps=config.linear_conv_kernel_dim,
            epsilon=config.rms_norm_eps,
            activation=config.hidden_act,
            is_joined=is_joined,
        )
    )


_GRANITE_HYBRID = replace(
    GRANITE_SHARED,
    names=replace(GRANITE_SHARED.names, up=GRANITE_SHARED_UP, down="shared_mlp.output_linear"),
    inner="shared_intermediate_size",
    turns_layer=lambda config, layer: config.position_embedding_type == "rope",
    experts=Experts(
        shared=lambda config: config.shared_intermediate_size,
        layers=lambda config, layer: config.num_local_experts > 0,
    ),
    states=States(
        _mamba2, lambda config, layer: config.layer_types[layer] in _STATE, bias="mamba_proj_bias"
    ),
)
_BAMBA = DecoderFamily(
    DecoderNames(
        norm="final_layernorm",
        mlp_norm="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    ),
    bias="attention_bias",
    mlp_bias="mlp_bias",
    turns="part",
    states=States(
        _mamba2,
        lambda config, layer: layer not in (config.attn_layer_indices or ()),
        bias="mamba_proj_bias",
    ),
)
_FALCON_H1 = replace(
    _BAMBA,
    turns="whole",
    attends=lambda config, layer: True,
    states=States(_falcon_h1_state, bias="projectors_bias"),
    factors=_falcon_h1_factors,
    embedding_scale=lambda config: float(config.embedding_multiplier),
    logit_scale=lambda config: float(config.lm_head_multiplier),
)
_MAMBA2 = DecoderFamily(
    DecoderNames(
        model="backbone",
        embedding="embeddings",
        norm="norm_f",
        attention_norm="norm",
        state="mixer",
        state_output="mixer.out_proj",
    ),
    epsilon="layer_norm_epsilon",
    turns="",
    states=States(_mamba2_alone, bias="use_bias"),
    feeds=lambda config, layer: False,
)


def _is_kind(*kinds: str) -> Callable[[Any, int], bool]:
    return lambda config, layer: config.layer_types[layer] in kinds


_NEMOTRON_H = DecoderFamily(
    DecoderNames(
        model="backbone",
        embedding="embeddings",
        norm="norm_f",
        attention_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        mlp_norm="norm",
        up=("mixer.up_proj",),
        down="mixer.down_proj",
        state="mixer",
        state_output="mixer.out_proj",
        router="mixer.gate",
        experts_up="mixer.experts.up_proj",
        experts_down="mixer.experts.down_proj",
        shared_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
        latent_in="mixer.fc1_latent_proj",
        latent_out="mixer.fc2_latent_proj",
    ),
    epsilon="layer_norm_epsilon",
    activation="mlp_hidden_act",
    is_gated=False,
    turns="",
    states=States(_nemotron_state, _is_kind(*_STATE), bias="use_bias"),
    attends=_is_kind(*_ATTENTION),
    feeds=_is_kind("mlp", "moe"),
    experts=Experts(
        "n_routed_experts",
        "moe_intermediate_size",
        shared=lambda config: config.moe_shared_expert_intermediate_size,
        routing=corrected,
        layers=_is_kind("moe"),
        is_gated=False,
        latent=lambda config: config.moe_latent_size,
    ),
)


_NEMOTRON_MATRICES = (_NEMOTRON_H.names.experts_up, _NEMOTRON_H.names.experts_down)


_DELTA = States(
    partial(_gated_delta, is_joined=False),
    lambda config, layer: config.layer_types[layer] in _STATE,
)
_QWEN3_5 = DecoderFamily(
    DecoderNames(head_norms=HEAD_NORMS, state="linear_attn", state_output="linear_attn.out_proj"),
    norm=partial(RMSNorm, offset=1.0),  # scales are published minus 1
    bias="attention_bias",
    turns="part",
    gates_attention=True,
    states=_DELTA,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    names=replace(
        QWEN2_MOE.names,
        head_norms=HEAD_NORMS,
        state="linear_attn",
        state_output="linear_attn.out_proj",
    ),
    experts=Experts(
        "num_experts",
        "moe_intermediate_size",
        shared=lambda config: config.shared_expert_intermediate_size,
    ),
)
_QWEN3_NEXT = replace(
    _QWEN3_5_MOE,
    experts=QWEN2_MOE.experts,
    states=replace(_DELTA, make=partial(_gated_delta, is_joined=True)),
)
_DELTA_KEYS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "layer_types"),
)


def _qwen(family: DecoderFamily, *keys: str) -> Family:
    experts = Naming("", "", "")
    if family.experts is not None:
        experts = stacked_experts(family.names, *PROJECTIONS)
    naming = replace(
        TEXT_PART,
        # layers that draft tokens, and the part that reads images
        ignored=("mtp.", "model.visual.", "visual."),
        renamed=experts.renamed,
        stacked=experts.stacked,
    )
    return rotary(
        family,
        *_DELTA_KEYS,
        *keys,
        naming=naming,
        multiples=(("linear_num_value_heads", "linear_num_key_heads"),),
        layer_types=_KINDS,
    )


HYBRIDS: Mapping[str, Family] = {
    "bamba": rotary(
        _BAMBA,
        *_MAMBA2_KEYS,
        "attn_layer_indices",
        "layer_types",
        multiples=_MAMBA2_GROUPS,
        layer_types=_KINDS,
    ),
    "falcon_h1": rotary(
        _FALCON_H1,
        *(*_MAMBA2_KEYS, "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"),
        *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
        *("ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers", "mlp_multipliers"),
        *("embedding_multiplier", "lm_head_multiplier", "layer_types"),
        multiples=_MAMBA2_GROUPS,
        layer_types=_KINDS,
    ),
    "granitemoehybrid": rotary(
        _GRANITE_HYBRID,
        *(*MULTIPLIERS, *_MAMBA2_KEYS, "layer_types"),
        position_embedding_type=("rope", "nope", None),
        multiples=_MAMBA2_GROUPS,
        layer_types=_KINDS,
    ),
    "mamba2": Family(
        partial(TextDecoder, _MAMBA2),
        Naming(
            prefix="backbone.",
            head="lm_head.weight",
            embedding="backbone.embeddings.weight",
            moved=(("backbone.embedding.", "backbone.embeddings."),),
        ),
        checks_of(
            *("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings"),
            *("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "expand"),
            *("use_bias", "use_conv_bias", "time_step_limit", "hidden_act", "layer_types"),
            "layer_norm_epsilon",
        ),
        allowed={"layer_types": _KINDS},
        multiples=(("num_heads", "n_groups"),),
        check=_MAMBA2.heads,
        positions=lambda config: 2**31 - 1,  # a state has no end
    ),
    "nemotron_h": Family(
        partial(TextDecoder, _NEMOTRON_H),
        Naming(
            prefix="backbone.",
            head="lm_head.weight",
            embedding="backbone.embeddings.weight",
            ignored=("mtp.",),
            moved=(("model.", "backbone."),),
            renamed=tuple((f".{name}", f".{name}.weight") for name in _NEMOTRON_MATRICES),
            stacked=tuple(
                Stacked(f".{name}.weight", ".mixer.experts.", (f".{last}.weight",))
                for name in _NEMOTRON_MATRICES
                for last in [name.rpartition(".")[2]]
            ),
        ),
        checks_of(
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "max_position_embeddings", "layer_types"),
            *("intermediate_size", "mlp_hidden_act", "layer_norm_epsilon", "tie_word_embeddings"),
            *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
            *("mamba_hidden_act", "time_step_min", "use_bias", "use_conv_bias"),
            *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
            *("moe_shared_expert_intermediate_size", "moe_latent_size", "routed_scaling_factor"),
            *("n_group", "topk_group", "norm_topk_prob"),
        ),
        activation=_NEMOTRON_H.activation,
        allowed={
            "mlp_bias": (False,),
            "tie_word_embeddings": (False,),
            "layer_types": (*_ATTENTION, *_STATE, "mlp", "moe"),
            "mamba_hidden_act": tuple(ACTIVATIONS),
        },
        multiples=(("num_attention_heads", "num_key_value_heads"), ("mamba_num_heads", "n_groups")),
        check=partial(check_groups, _NEMOTRON_H, corrected),
    ),
    "qwen3_5_moe_text": _qwen(_QWEN3_5_MOE, "shared_expert_intermediate_size"),
    "qwen3_5_text": _qwen(_QWEN3_5),
    "qwen3_next": _qwen(
        _QWEN3_NEXT, *("decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size")
    ),
}
"""The hybrids, by model_type."""
