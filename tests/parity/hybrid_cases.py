"""Small random checkpoints of the decoders with layers that keep a state (see sibling_cases.py)."""

from __future__ import annotations

import numpy as np

from .cases import Config, pick
from .sibling_cases import (
    ATTENTION,
    BOTH,
    HYBRID_REFERENCE,
    REMOVED,
    Family,
    Sibling,
    cases_of,
    combined,
    experts,
    given,
    layer_norm,
    multipliers,
)

REFERENCE = HYBRID_REFERENCE


def cases() -> tuple[Sibling, ...]:
    """All of them, in a fixed order."""
    return cases_of(FAMILIES, _SEEDS)


def _mamba2(number: int, random: np.random.Generator, config: Config) -> Config:
    """Heads of Mamba-2 in one, two or as many groups as attention has heads."""
    heads = config["num_attention_heads"]
    return {
        "mamba_n_heads": 2 * heads,
        "mamba_d_head": ["auto", config["hidden_size"] // heads][number % 2],
        "mamba_n_groups": [1, 2, heads][number],
        "mamba_d_state": [5, 8, 3][number],
        "mamba_d_conv": [4, 2, 3][number],
        "mamba_expand": 2,
        "mamba_conv_bias": number != 2,
        "mamba_proj_bias": number == 1,
        **({"time_step_limit": [0.5, 0.9]} if number == 1 else {}),
    }


def _granite4(number: int, random: np.random.Generator, config: Config) -> Config:
    """Mamba-2 in the first layer, in the last one, and in between; the first without experts."""
    layers = [["mamba", "attention"], ["attention", "mamba"], ["mamba", "attention", "mamba"]]
    return {
        "model_type": "granitemoehybrid",
        "layer_types": layers[number],
        "num_hidden_layers": len(layers[number]),
        "shared_intermediate_size": [9, 6, 16][number],
        "position_embedding_type": ["rope", "nope", "nope"][number],
        **({} if number else {"num_local_experts": 0}),
    }


def _falcon_h1(number: int, random: np.random.Generator, config: Config) -> Config:
    keys = ("key", "attention_in", "attention_out", "ssm_in", "ssm_out", "embedding", "lm_head")
    return {
        **{f"{key}_multiplier": pick(random, [0.5, 0.75, 1.25, 1.5]) for key in keys},
        "mlp_multipliers": [[0.75, 1.5], [1.0, 1.0], [1.25, 0.5]][number],
        "ssm_multipliers": [0.75, 1.25, 0.5, 1.5, 0.75],
        "mamba_d_ssm": [2 * config["hidden_size"], None, 4 * config["num_attention_heads"]][number],
        "mamba_d_head": ["auto", "auto", 2][number],
        "mamba_rms_norm": number != 0,
        "mamba_norm_before_gate": number == 1,
        "projectors_bias": number == 2,
    }


def _mamba2_alone(number: int, random: np.random.Generator, config: Config) -> Config:
    of_attention = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    of_rope = ("max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling")
    heads = config["num_attention_heads"]
    return {
        **dict.fromkeys((*of_attention, *of_rope, "rms_norm_eps"), REMOVED),
        "num_heads": 2 * heads,
        "head_dim": config["hidden_size"] // heads,
        "n_groups": [1, 2, heads][number],
        "state_size": [5, 8, 3][number],
        "conv_kernel": [4, 2, 3][number],
        "use_bias": number == 1,
        "use_conv_bias": number != 2,
    }


FAMILIES: dict[str, Family] = {
    "bamba": (
        "Bamba",
        combined(
            BOTH,
            given(num_hidden_layers=[2, 3, 2], attn_layer_indices=[[1], [0, 2], None]),
            lambda number, random, config: {"hidden_size": 8 * config["num_attention_heads"]},
            _mamba2,
        ),
    ),
    "falcon_h1": ("FalconH1", combined(BOTH, _mamba2, _falcon_h1)),
    "granite4": (
        "GraniteMoeHybrid",
        combined(ATTENTION, multipliers, experts("num_local_experts"), _granite4, _mamba2),
    ),
    "mamba2": (
        "Mamba2",
        combined(
            layer_norm,
            _mamba2_alone,
            given(layer_norm_eps=REMOVED, layer_norm_epsilon=[1e-5, 1e-3, 1e-5]),
        ),
    ),
}
"""The class of transformers, and what a configuration has, for each family."""

MODEL_TYPES = {str(case.config["model_type"]) for case in cases_of(FAMILIES, {})}

_SEEDS: dict[str, int] = {}
"""Of cases where, with another seed, rounding would decide a token: see record.py."""
