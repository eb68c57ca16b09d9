"""Small random checkpoints of the decoders with layers that keep a state (see sibling_cases.py)."""

from .sibling_cases import (
    ATTENTION,
    BOTH,
    CONVOLUTIONS,
    EPSILONS,
    HYBRID_REFERENCE,
    KEPT,
    REMOVED,
    cases_of,
    experts,
    experts_in_groups,
    layer_norm,
    multipliers,
    of_head,
    one_of,
    part_turns,
    removed,
    times_heads,
)

REFERENCE = HYBRID_REFERENCE


def cases():
    return cases_of(FAMILIES, _SEEDS)


_OF_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_MAMBA2 = {
    **{"mamba_n_heads": times_heads(2), "mamba_d_head": ["auto", of_head, "auto"]},
    **{"mamba_n_groups": [1, 2, times_heads(1)], "mamba_d_state": [5, 8, 3]},
    **{"mamba_d_conv": [4, 2, 3], "mamba_expand": 2, "mamba_conv_bias": [True, True, False]},
    **{"mamba_proj_bias": [False, True, False], "time_step_limit": [KEPT, [0.5, 0.9], KEPT]},
}
"""Heads of Mamba-2 in one, two or as many groups as attention has heads."""

_GRANITE4_LAYERS = [["mamba", "attention"], ["attention", "mamba"], ["mamba", "attention", "mamba"]]
_GRANITE4 = {
    **{"model_type": "granitemoehybrid", "layer_types": _GRANITE4_LAYERS},
    **{"num_hidden_layers": [2, 2, 3], "shared_intermediate_size": [9, 6, 16]},
    **{"position_embedding_type": ["rope", "nope", "nope"], "num_local_experts": [0, KEPT, KEPT]},
}
"""Mamba-2 in the first layer, in the last one, and in between; the first without experts."""

_FACTORS = ("key", "attention_in", "attention_out", "ssm_in", "ssm_out", "embedding", "lm_head")
_FALCON_H1 = {
    **{f"{key}_multiplier": one_of(0.5, 0.75, 1.25, 1.5) for key in _FACTORS},
    "mlp_multipliers": [[0.75, 1.5], [1.0, 1.0], [1.25, 0.5]],
    "ssm_multipliers": [[0.75, 1.25, 0.5, 1.5, 0.75]] * 3,
    "mamba_d_ssm": [lambda random, config: 2 * config["hidden_size"], None, times_heads(4)],
    **{"mamba_d_head": ["auto", "auto", 2], "mamba_rms_norm": [False, True, True]},
    **{"mamba_norm_before_gate": [False, True, False], "projectors_bias": [False, False, True]},
}
_MAMBA2_ALONE = {
    **removed("num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps"),
    **removed("max_position_embeddings", *_OF_ROPE),
    **{"num_heads": times_heads(2), "head_dim": of_head, "n_groups": [1, 2, times_heads(1)]},
    **{"state_size": [5, 8, 3], "conv_kernel": [4, 2, 3], "use_bias": [False, True, False]},
    **{"use_conv_bias": [True, True, False], "layer_norm_epsilon": EPSILONS},
    "layer_norm_eps": REMOVED,
}
_LFM2_MOE = {
    **{"num_hidden_layers": [2, 3, 3], "layer_types": CONVOLUTIONS, "conv_L_cache": [3, 4, 2]},
    **{"conv_bias": [False, True, False], "num_dense_layers": [0, 1, 0], "use_expert_bias": True},
    **{"norm_topk_prob": [True, False, True], "routed_scaling_factor": [1.0, 2.5, 0.5]},
    **{"norm_eps": 1e-5, **removed("rms_norm_eps", "hidden_act")},
}
"""Convolutions, and a layer without experts, or none."""

_BLOCKS = [
    *(KEPT, ["full_attention", "moe", "linear_attention"]),
    ["linear_attention", "mlp", "moe", "full_attention"],
]
_NEMOTRON_H = {
    **{"hybrid_override_pattern": ["ME*-M", KEPT, KEPT], "layers_block_type": _BLOCKS},
    **experts_in_groups,
    **removed("rms_norm_eps", "hidden_act", "num_hidden_layers", *_OF_ROPE),
    **removed("first_k_dense_replace", "n_shared_experts"),
    **{"norm_topk_prob": [True, False, True], "head_dim": [4, 6, 10]},
    **{"layer_norm_epsilon": EPSILONS, "mlp_hidden_act": ["relu2", "silu", "relu2"]},
    **{"mamba_num_heads": times_heads(2), "mamba_head_dim": [3, 5, 4]},
    **{"n_groups": [1, 2, times_heads(1)], "ssm_state_size": [5, 8, 3], "conv_kernel": [4, 2, 3]},
    **{"time_step_min": [0.001, 0.7, 0.001], "use_bias": [False, True, False]},
    **{"use_conv_bias": [True, True, False], "tie_word_embeddings": False},
    **{"moe_shared_expert_intermediate_size": [9, 6, 16], "moe_latent_size": [None, 7, None]},
}
"""Layers of every kind; the first by the pattern of older files."""

_DELTA_LAYERS = [
    *(["linear_attention", "full_attention"], ["full_attention", "linear_attention"]),
    ["linear_attention", "full_attention", "linear_attention"],
]
_DELTA = {
    **{"layer_types": _DELTA_LAYERS, "num_hidden_layers": [2, 2, 3], "hidden_act": "silu"},
    "rms_norm_eps": 1e-3,  # with others float32 does not determine norms of what is near 0
    **{"head_dim": [8, 16, 8], "linear_num_key_heads": [2, 1, 3]},
    **{"linear_num_value_heads": [4, 3, 3], "linear_key_head_dim": [5, 8, 6]},
    **{"linear_value_head_dim": [7, 4, 6], "linear_conv_kernel_dim": [4, 2, 3]},
}
"""The gated delta rule in the first layer, in the last one, and in between."""

_THREE_KINDS = {
    **{"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    **{"mrope_section": [1, 1, 0], "mrope_interleaved": True},
}
_MROPE = {
    "rope_parameters": [KEPT, KEPT, _THREE_KINDS],
    **{
        key: [KEPT, KEPT, REMOVED]
        for key in ("rope_theta", "rope_scaling", "partial_rotary_factor")
    },
}
"""Three kinds of positions, which are alike in a text."""

_EXPERTS = experts("num_experts", "moe_intermediate_size")
_SHARED = {"shared_expert_intermediate_size": [9, 6, 16]}

FAMILIES = {
    "bamba": (
        *("Bamba", BOTH, {"hidden_size": times_heads(8)}, _MAMBA2),
        {"num_hidden_layers": [2, 3, 2], "attn_layer_indices": [[1], [0, 2], None]},
    ),
    "falcon_h1": ("FalconH1", BOTH, _MAMBA2, _FALCON_H1),
    "granite4": (
        *("GraniteMoeHybrid", ATTENTION, multipliers, experts("num_local_experts")),
        *(_GRANITE4, _MAMBA2),
    ),
    "lfm2_moe": ("Lfm2Moe", _LFM2_MOE, _EXPERTS),
    "mamba2": ("Mamba2", layer_norm, _MAMBA2_ALONE),
    "nemotron_h": ("NemotronH", _NEMOTRON_H),
    "qwen3_5": (
        *("Qwen3_5", part_turns, ATTENTION, _DELTA, _MROPE, {"model_type": "qwen3_5_text"}),
    ),
    "qwen3_5_moe": (
        *("Qwen3_5Moe", part_turns, ATTENTION, _DELTA, _EXPERTS),
        {**_SHARED, "model_type": "qwen3_5_moe_text"},
    ),
    "qwen3_next": (
        *("Qwen3Next", part_turns, ATTENTION, _DELTA, _EXPERTS, _SHARED),
        {"norm_topk_prob": [True, False, True], "decoder_sparse_step": [1, 1, 2]},
        {"mlp_only_layers": [[], [0], []]},
    ),
}
"""transformers' class, and what changes a configuration, for each family."""

MODEL_TYPES = {str(case.config["model_type"]) for case in cases_of(FAMILIES, {})}

_SEEDS = {
    **{"qwen3_5-0": 5032, "qwen3_5-1": 5002, "qwen3_5-2": 5004},
    **{"qwen3_5_moe-0": 5079, "qwen3_5_moe-1": 5025, "qwen3_5_moe-2": 5006},
    **{"qwen3_next-0": 5076, "qwen3_next-1": 5038, "qwen3_next-2": 5004},
}
"""Of cases where, with another seed, rounding would decide a token: see record.py."""
