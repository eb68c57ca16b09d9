"""Small random checkpoints of the decoders with layers that keep a state (see sibling_cases.py)."""

from .cases import pick
from .sibling_cases import (
    ATTENTION,
    BOTH,
    HYBRID_REFERENCE,
    REMOVED,
    cases_of,
    experts,
    experts_in_groups,
    layer_norm,
    multipliers,
    part_turns,
)

REFERENCE = HYBRID_REFERENCE


def cases():
    return cases_of(FAMILIES, _SEEDS)


def _mamba2(number, random, config):
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


def _granite4(number, random, config):
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


def _falcon_h1(number, random, config):
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


def _mamba2_alone(number, random, config):
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


def _lfm2_moe(number, random, config):
    """Convolutions, and a layer without experts, or none."""
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    layers = [kinds[:2], kinds[:3], kinds[1:]][number]
    return {
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "conv_L_cache": [3, 4, 2][number],
        "conv_bias": number == 1,
        "num_dense_layers": number % 2,
        "use_expert_bias": True,
        "norm_topk_prob": number != 1,
        "routed_scaling_factor": [1.0, 2.5, 0.5][number],
        "norm_eps": 1e-5,
        **dict.fromkeys(("rms_norm_eps", "hidden_act"), REMOVED),
    }


def _nemotron_h(number, random, config):
    """Layers of every kind; the first by the pattern of older files."""
    mamba, attention, mlp, moe = "linear_attention", "full_attention", "mlp", "moe"
    layers = [
        {"hybrid_override_pattern": "ME*-M"},
        {"layers_block_type": [attention, moe, mamba]},
        {"layers_block_type": [mamba, mlp, moe, attention]},
    ][number]
    of_rope = ("rope_parameters", "rope_theta", "rope_scaling")
    removed = ("rms_norm_eps", "hidden_act", "num_hidden_layers", *of_rope)
    heads = config["num_attention_heads"]
    return {
        **dict.fromkeys(removed, REMOVED),
        **layers,
        **experts_in_groups(number, random, config),
        **dict.fromkeys(("first_k_dense_replace", "n_shared_experts"), REMOVED),
        "norm_topk_prob": number != 1,
        "head_dim": [4, 6, 10][number],
        "layer_norm_epsilon": [1e-5, 1e-3, 1e-5][number],
        "mlp_hidden_act": ["relu2", "silu", "relu2"][number],
        "mamba_num_heads": 2 * heads,
        "mamba_head_dim": [3, 5, 4][number],
        "n_groups": [1, 2, heads][number],
        "ssm_state_size": [5, 8, 3][number],
        "conv_kernel": [4, 2, 3][number],
        "time_step_min": [0.001, 0.7, 0.001][number],
        "use_bias": number == 1,
        "use_conv_bias": number != 2,
        "moe_shared_expert_intermediate_size": [9, 6, 16][number],
        "moe_latent_size": [None, 7, None][number],
        "tie_word_embeddings": False,
    }


def _delta(number, random, config):
    """The gated delta rule in the first layer, in the last one, and in between."""
    delta, attention = "linear_attention", "full_attention"
    layers = [[delta, attention], [attention, delta], [delta, attention, delta]][number]
    heads = [2, 1, 3][number]
    return {
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        # with others float32 does not determine norms of what is near 0
        "rms_norm_eps": 1e-3,
        "hidden_act": "silu",
        "head_dim": [8, 16, 8][number],
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * [2, 3, 1][number],
        "linear_key_head_dim": [5, 8, 6][number],
        "linear_value_head_dim": [7, 4, 6][number],
        "linear_conv_kernel_dim": [4, 2, 3][number],
    }


def _mrope(number, random, config):
    """Three kinds of positions, which are alike in a text."""
    parameters = {
        **{"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        **{"mrope_section": [1, 1, 0], "mrope_interleaved": True},
    }
    removed = dict.fromkeys(("rope_theta", "rope_scaling", "partial_rotary_factor"), REMOVED)
    return {"rope_parameters": parameters, **removed} if number == 2 else {}


def _width_of_heads(number, random, config):
    return {"hidden_size": 8 * config["num_attention_heads"]}


_EXPERTS = experts("num_experts", "moe_intermediate_size")
_SHARED = {"shared_expert_intermediate_size": [9, 6, 16]}

FAMILIES = {
    "bamba": (
        *("Bamba", BOTH, _width_of_heads, _mamba2),
        {"num_hidden_layers": [2, 3, 2], "attn_layer_indices": [[1], [0, 2], None]},
    ),
    "falcon_h1": ("FalconH1", BOTH, _mamba2, _falcon_h1),
    "granite4": (
        *("GraniteMoeHybrid", ATTENTION, multipliers, experts("num_local_experts")),
        *(_granite4, _mamba2),
    ),
    "lfm2_moe": ("Lfm2Moe", _lfm2_moe, _EXPERTS),
    "mamba2": (
        *("Mamba2", layer_norm, _mamba2_alone),
        {"layer_norm_eps": REMOVED, "layer_norm_epsilon": [1e-5, 1e-3, 1e-5]},
    ),
    "nemotron_h": ("NemotronH", _nemotron_h),
    "qwen3_5": (
        *("Qwen3_5", part_turns, ATTENTION, _delta, _mrope, {"model_type": "qwen3_5_text"}),
    ),
    "qwen3_5_moe": (
        *("Qwen3_5Moe", part_turns, ATTENTION, _delta, _EXPERTS),
        {**_SHARED, "model_type": "qwen3_5_moe_text"},
    ),
    "qwen3_next": (
        *("Qwen3Next", part_turns, ATTENTION, _delta, _EXPERTS, _SHARED),
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
