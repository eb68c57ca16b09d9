"""The table of decoders with layers that keep a state in place of keys and values (see decoder_table.py).

Sources:

bamba       IBM, Princeton, CMU and UIUC 2024, Bamba 9B
falcon_h1   Falcon LLM Team 2025, arXiv 2507.22448; attention and Mamba-2 read the same x in each layer
granitemoehybrid    IBM 2025, Granite 4; with and without experts, Mamba-2 and rotary positions
mamba2      Dao and Gu 2024, arXiv 2405.21060; no layer has attention or an MLP
"""

from __future__ import annotations

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
from prejit.compiler.models.families.decoder_table import MULTIPLIERS, rotary
from prejit.compiler.models.families.decoders import TextDecoder
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.families.mixture_table import GRANITE_SHARED, GRANITE_SHARED_UP
from prejit.compiler.models.layers.config_checks import checks_of
from prejit.compiler.models.layers.layer_config import Naming, require, unsupported
from prejit.compiler.models.layers.mamba2 import Mamba2, Mamba2Settings

_ATTENTION = ("full_attention", "attention")
"""The kinds of layers with attention; the second name is that of older files."""
_STATE = ("linear_attention", "mamba")

_MAMBA2_KEYS = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    *("mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
)


def _mamba2(config: Any, **changes: Any) -> Mamba2:
    """Return the layer of a hybrid."""
    return Mamba2(replace(_mamba2_settings(config), **changes))


def _mamba2_settings(config: Any) -> Mamba2Settings:
    low, high = config.time_step_limit
    return Mamba2Settings(
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


def _mamba2_alone(config: Any) -> Mamba2:
    low, high = config.time_step_limit
    return Mamba2(
        Mamba2Settings(
            width=config.hidden_size,
            heads=config.num_heads,
            head_size=config.head_dim,
            groups=config.n_groups,
            states=config.state_size,
            taps=config.conv_kernel,
            epsilon=config.layer_norm_epsilon,
            activation=config.hidden_act,
            limits=(float(low), float(high)),
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
        )
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


def _in_groups(heads: str, groups: str, family: DecoderFamily) -> Callable[[Any], None]:
    """Return the check that groups divide heads of a state."""

    def check(config: Any) -> None:
        count, by = getattr(config, heads), getattr(config, groups)
        if count % by:
            raise unsupported(
                config, f"{heads}: expected a multiple of {groups} = {by}, found {count}"
            )
        family.heads(config)

    return check


def _check_granite(config: Any) -> None:
    for kind in config.layer_types:
        require(config, "layer_types", kind, [*_ATTENTION, *_STATE])
    _in_groups("mamba_n_heads", "mamba_n_groups", _GRANITE_HYBRID)(config)


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
    output_bias="attention_bias",
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

HYBRIDS: Mapping[str, Family] = {
    "bamba": replace(
        rotary(_BAMBA, *_MAMBA2_KEYS, "attn_layer_indices", "layer_types"),
        check=_in_groups("mamba_n_heads", "mamba_n_groups", _BAMBA),
    ),
    "falcon_h1": replace(
        rotary(
            _FALCON_H1,
            *(*_MAMBA2_KEYS, "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"),
            *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
            *("ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers", "mlp_multipliers"),
            *("embedding_multiplier", "lm_head_multiplier", "layer_types"),
        ),
        check=_in_groups("mamba_n_heads", "mamba_n_groups", _FALCON_H1),
    ),
    "granitemoehybrid": replace(
        rotary(
            _GRANITE_HYBRID,
            *(*MULTIPLIERS, *_MAMBA2_KEYS, "layer_types"),
            position_embedding_type=("rope", "nope", None),
        ),
        check=_check_granite,
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
        check=_in_groups("num_heads", "n_groups", _MAMBA2),
        positions=lambda config: 2**31 - 1,  # a state has no end
    ),
}
"""The hybrids, by model_type."""
