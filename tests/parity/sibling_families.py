"""For each family of sibling_cases.py, the keys of its configurations and their values in each case."""

from .cases import ACTIVATIONS, POSITIONS, pick, rope_keys

REMOVED, KEPT = object(), object()
"""A key that the configuration does not have, and one that stays as it is."""


def one_of(*options):
    """A value at random."""
    return lambda random, config: pick(random, list(options))


def times_heads(number):
    return lambda random, config: number * config["num_attention_heads"]


def of_head(random, config):
    """The width of a head."""
    return config["hidden_size"] // config["num_attention_heads"]


def removed(*keys):
    return dict.fromkeys(keys, REMOVED)


_OF_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_OF_LLAMA = (*_OF_ROPE, "rms_norm_eps", "intermediate_size", "num_key_value_heads", "hidden_act")


def biases(first, *others):
    """Say by the number whether there are biases: none, all, the first."""
    return {first: [False, True, True], **{key: [False, True, False] for key in others}}


BOTH = biases("attention_bias", "mlp_bias")
ATTENTION = biases("attention_bias")
EPSILONS = [1e-5, 1e-3, 1e-5]
sizes_of_heads = {"head_dim": one_of(4, 6, 10)}
layer_norm = {"rms_norm_eps": REMOVED, "layer_norm_eps": one_of(1e-5, 1e-3)}
multipliers = {
    **{"attention_multiplier": [0.3, 0.5, 1.0], "embedding_multiplier": [3.0, 0.5, 2.0]},
    **{"logits_scaling": [0.5, 2.0, 1.5], "residual_multiplier": [0.22, 1.5, 0.7]},
}
experts_in_groups = {
    **{"n_routed_experts": 6, "n_shared_experts": [1, 2, 1], "num_experts_per_tok": [2, 3, 2]},
    **{"moe_intermediate_size": one_of(5, 8), "first_k_dense_replace": [0, 1, 0]},
    **{"routed_scaling_factor": [1.0, 2.5, 0.5], "n_group": [1, 3, 2], "topk_group": [1, 2, 1]},
}
"""Experts in groups beside shared ones, after a layer without experts."""

_FAR_NEAR = ["full_attention", "sliding_attention", "sliding_attention"]
_WINDOWS = {
    **{"sliding_window": one_of(3, 9, 20), "num_hidden_layers": [4, 3, 3]},
    "layer_types": [KEPT, _FAR_NEAR, _FAR_NEAR],
}
"""Windows in some layers, said by the default pattern or by each layer."""


def experts(count, inner="intermediate_size"):
    """Return numbers of experts for each case, and how many of them a token reads."""
    return {count: [4, 7, 5], "num_experts_per_tok": [2, 6, 1], inner: one_of(5, 8, 11)}


def part_turns(number, random, config):
    """Return keys by which only a part of each head turns, in the form of transformers 4."""
    return {
        "hidden_size": 8 * config["num_attention_heads"],
        "partial_rotary_factor": [0.5, 0.25, 0.75][number],
        **rope_keys("linear" if number == 2 else "default", 1, random),
    }


_SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_TYPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_BY_TYPES = {
    **{"rope_parameters": [REMOVED, _TYPES, _TYPES], "rope_theta": [1000.0, REMOVED, REMOVED]},
    "rope_scaling": [_SCALED, REMOVED, REMOVED],
}
"""Rotary positions by kinds of layers; the first as files of transformers 4 say it."""

_NTK = {
    **{
        **sizes_of_heads,
        "rope_parameters": [REMOVED, KEPT, KEPT],
        "rope_theta": [100.0, KEPT, KEPT],
    },
    "rope_scaling": [{"type": "dynamic", "alpha": 50.0, "factor": 1.0}, KEPT, KEPT],
}
_GROWING = {
    **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "mscale": 1.0},
    "original_max_position_embeddings": 8,
}
_GROWN = {
    "rope_parameters": [{**_GROWING, "llama_4_scaling_beta": beta} for beta in (0.1, 0.5, 0.0)],
    **removed("rope_theta", "rope_scaling"),
}
_NEOX = {
    **removed("num_key_value_heads", *_OF_ROPE),
    **{"use_parallel_residual": [True, True, False], "attention_bias": [True, False, True]},
    **{"rotary_pct": [0.25, 0.5, 1.0], "rotary_emb_base": 1000, "hidden_size": times_heads(8)},
}
_EXPERTS_OR_NONE = {
    **{"num_hidden_layers": 3, "moe_num_experts": [4, 7, 5], "moe_k": [2, 6, 1]},
    **{"moe_intermediate_size": one_of(5, 8, 11), "moe_num_shared_experts": [1, 0, 2]},
    **{"moe_layer_start_index": [1, 0, 0], "moe_layer_end_index": [-1, 1, 2]},
    "moe_layer_interval": [1, 1, 2],
}
"""Experts in layers from one to another, and shared ones."""

_HYBRID = {
    "layer_types": lambda random, config: ["full_attention"] * config["num_hidden_layers"],
    **{"shared_intermediate_size": [9, 6, 16], "position_embedding_type": ["rope", "rope", "nope"]},
    **{"num_local_experts": [0, KEPT, KEPT], "mamba_n_heads": 2, "mamba_expand": 2},
    "mamba_d_head": lambda random, config: config["hidden_size"],
}
"""Attention in all layers, with and without positions and experts."""

_EXAONE_MOE = {
    **{**experts_in_groups, **removed("n_routed_experts", "n_shared_experts")},
    **{"num_experts": 6, "num_shared_experts": [1, 2, 1], "norm_topk_prob": [True, True, False]},
    **{"first_k_dense_replace": [1, REMOVED, 1], "sliding_window_pattern": [2, 4, 3]},
    "mlp_layer_types": [KEPT, ["sparse", "dense", "sparse"], KEPT],
}
"""Experts in groups beside shared ones; which layers have them is said in two ways."""

_LATENT = {
    **{"num_key_value_heads": times_heads(1), "attention_bias": [False, True, False]},
    **{"kv_lora_rank": one_of(6, 10), "q_lora_rank": [None, 7, 11]},
    **{"qk_nope_head_dim": one_of(4, 6), "qk_rope_head_dim": one_of(2, 4)},
    **{"v_head_dim": one_of(3, 5), **experts_in_groups, "num_nextn_predict_layers": 0},
    "rope_scaling": [KEPT, {**_SCALED, "mscale": 0.7, "mscale_all_dim": 0.9}, KEPT],
}
"""Attention to latents, with shared experts beside others, after a layer without experts."""

_KINDS = ["conv", "full_attention", "conv", "full_attention"]
CONVOLUTIONS = [_KINDS[:2], _KINDS[:3], _KINDS[1:]]
_LFM2 = {
    **{"hidden_act": REMOVED, "norm_eps": one_of(1e-5, 1e-3), "num_hidden_layers": [2, 3, 3]},
    **{"layer_types": CONVOLUTIONS, "conv_L_cache": [3, 4, 2], "conv_bias": [False, True, False]},
    **{"block_auto_adjust_ff_dim": [True, True, False], "block_multiple_of": 7},
    "block_ffn_dim_multiplier": [1.3, 0.7, 1.0],
}
"""Convolutions in the first layer, in the last one, and in between."""

_ACTIVATION = {"activation_function": one_of("gelu_new", *ACTIVATIONS)}
_GPT = {
    **removed(*_OF_LLAMA, "hidden_size", "num_hidden_layers", "num_attention_heads"),
    **{"max_position_embeddings": REMOVED, "n_embd": times_heads(8), "n_head": times_heads(1)},
    **{"n_layer": [2, 3, 2], "n_positions": POSITIONS, "n_inner": [None, 11, 32], **_ACTIVATION},
    "layer_norm_epsilon": EPSILONS,
}
"""Sizes under GPT-2's names."""

_FALCON = {
    **removed(*(key for key in _OF_LLAMA if key not in _OF_ROPE)),
    **{"activation": ["gelu", "relu", "silu"], "ffn_hidden_size": [None, 13, 40]},
    **{"layer_norm_epsilon": EPSILONS, "bias": [False, False, True]},
    **{"multi_query": [True, False, False], "parallel_attn": [True, True, False]},
    "new_decoder_architecture": [False, True, False],
    "num_kv_heads": [KEPT, lambda random, config: config["num_key_value_heads"], KEPT],
}
"""Each of the three orders of queries and keys in one matrix."""

_NEO_KINDS = [[[["global", "local"], 1]], [[["local", "global"], 1]], [[["global", "local"], 1]]]
_NEO = {
    **removed(*_OF_LLAMA, "num_attention_heads", "num_hidden_layers"),
    **{"num_heads": times_heads(1), "num_layers": 2, "attention_types": _NEO_KINDS},
    "hidden_size": times_heads(4),  # larger scores are too sharp: nothing divides them
    **{"window_size": [5, 1, 30], "intermediate_size": [None, 13, 40], **_ACTIVATION},
    "layer_norm_epsilon": EPSILONS,
}
"""Windows in some layers."""

_OPT = {
    **{**removed(*_OF_LLAMA), "ffn_dim": one_of(13, 24, 40), "enable_bias": [True, False, True]},
    "activation_function": ["relu", "gelu", "relu"],
}
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

_NEAR, _FAR = "sliding_attention", "full_attention"
_GEMMA4_TYPES = {
    _FAR: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
    _NEAR: {"rope_type": "default", "rope_theta": 100.0},
}
_LFM3 = {
    **{
        "num_hidden_layers": [3, 4, 3],
        "conv_L_cache": [3, 7, 2],
        "conv_bias": [False, True, False],
    },
    "layer_types": [
        *(["conv", "full_attention", "sliding_attention"], None),
        ["sliding_attention", "conv", "sliding_attention"],
    ],
    **{"rope_parameters": [_GEMMA4_TYPES, REMOVED, _GEMMA4_TYPES], "sliding_window": [3, 9, 20]},
    **{"use_sandwich_norm": [True, True, False], "use_attention_gate": [True, True, False]},
    **{"head_dim": [4, 8, 12], "norm_eps": one_of(1e-5, 1e-3)},
    **removed("rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling"),
}
"""Convolutions beside both kinds of attention, or one, with and without gates and norms of what is added."""

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

_GEMMA4 = {
    **removed("rope_theta", "rope_scaling", "hidden_act"),
    **{"hidden_activation": ["gelu_pytorch_tanh", "silu", "gelu"], "rms_norm_eps": 1e-3},
    **{"num_hidden_layers": [5, 3, 4], "sliding_window": [9, 3, 20]},
    "layer_types": [[_NEAR, _FAR, _NEAR, _NEAR, _FAR], [_NEAR, _FAR, _FAR], None],
    "rope_parameters": [REMOVED, _GEMMA4_TYPES, REMOVED],
    **{"head_dim": [4, 8, 6], "global_head_dim": [8, 8, 12]},
    "num_global_key_value_heads": [None, times_heads(1), 1],
    **{"attention_k_eq_v": [False, True, True], "num_kv_shared_layers": [3, 0, 0]},
    **{"use_double_wide_mlp": [True, False, False], "final_logit_softcapping": [3.0, None, 30.0]},
    "use_bidirectional_attention": [None, "vision", None],
}
"""Layers that read the keys of others, and layers whose values are keys."""

_OF_LAYERS = {
    **{"hidden_size_per_layer_input": [5, 0, 8], "enable_moe_block": [False, False, True]},
    "vocab_size_per_layer_input": lambda random, config: config["vocab_size"] + 3,
    **{"num_experts": [None, None, 4], "top_k_experts": [None, None, 2]},
    "moe_intermediate_size": [None, None, 7],
}
"""Embeddings for each layer, and experts beside an MLP."""

_CHUNKS = "chunked_attention"
_LLAMA4 = {
    **{"num_hidden_layers": [4, 3, 3], "intermediate_size_mlp": [13, 24, 9]},
    **{"attention_chunk_size": [9, 16, None], "no_rope_layers": [[0, 1, 1, 0], None, [1, 0, 1]]},
    **{"no_rope_layer_interval": [KEPT, 2, KEPT], "interleave_moe_layer_step": [2, 1, 1]},
    **{"moe_layers": [None, None, [1]], "use_qk_norm": [True, False, True]},
    "layer_types": [None, [_CHUNKS, _FAR, _CHUNKS], None],
    **{"attn_temperature_tuning": [True, True, False], "floor_scale": [5, 10, 8]},
    "attn_scale": [0.5, 0.1, 0.3],
}
"""Texts in parts, layers that do not turn, and experts in some layers."""

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

_SHARED = {"shared_expert_intermediate_size": [9, 6, 16]}

_LOCAL = experts("num_local_experts")
_THETAS = {"layer_rope_theta": [None, [0, 100.0, 5000.0], [700.0, 0, 700.0]]}
_NORMED = {"norm_topk_prob": [True, True, False]}
_NORMED_ONCE = {"norm_topk_prob": [False, True, False]}
_SOME_WINDOWS = {"use_sliding_window": [False, False, True], "sliding_window": 9}
_SOME_EXPERTS = {"decoder_sparse_step": [1, 2, 1], "mlp_only_layers": [[1], [], []]}
_EXPERTS = experts("num_experts", "moe_intermediate_size")
_QKV = {key: [False, True, False] for key in ("qkv_bias", "bias")}

_AFMOE = {
    **{"num_hidden_layers": [3, 3, 2], "num_dense_layers": [1, 0, 1], "sliding_window": [9, 3, 20]},
    **{"global_attn_every_n_layers": [2, 3, 2], "mup_enabled": [True, False, True]},
    **{"num_shared_experts": [1, 2, 1], "route_scale": [2.5, 1.0, 0.5]},
}
_COHERE2_MOE = {
    **{"num_experts": [4, 7, 5], "num_experts_per_tok": [2, 6, 1], "intermediate_size": 8},
    **{"logit_scale": [0.5, 0.25, 1.5], "rms_norm_eps": [REMOVED, 1e-3, None]},
    **{"num_shared_experts": [1, 0, 2], "expert_selection_fn": ["sigmoid", "softmax", "sigmoid"]},
    **{"shared_expert_combination_strategy": ["average", "sum", "sum"], **_NORMED},
    **{"prefix_dense_intermediate_size": [13, None, None], "sliding_window_pattern": 2},
    "mlp_layer_types": [KEPT, ["sparse", "dense", "sparse"], ["dense", "sparse", "sparse"]],
    **{"first_k_dense_replace": [1, KEPT, KEPT], "prefix_dense_sliding_window_pattern": [1, 1, 2]},
}

FAMILIES = {
    "afmoe": ("Afmoe", sizes_of_heads, ATTENTION, _EXPERTS, _AFMOE),
    "apertus": ("Apertus", ATTENTION, {"hidden_act": "xielu"}),
    "arcee": ("Arcee", BOTH, {"hidden_act": "relu2"}),
    "cohere2": ("Cohere2", ATTENTION, _WINDOWS, layer_norm, {"logit_scale": [0.5, 0.25, 1.5]}),
    "cwm": ("Cwm", sizes_of_heads, _WINDOWS, biases("mlp_bias")),
    "deepseek_v2": (
        *("DeepseekV2", _LATENT, {"topk_method": ["greedy", "group_limited_greedy", "greedy"]}),
        {"n_group": [None, 3, None], "topk_group": [None, 2, None], "norm_topk_prob": False},
    ),
    "deepseek_v3": (
        *("DeepseekV3", _LATENT, _NORMED, {"rope_interleave": [True, True, False]}),
        {"n_group": [1, 3, 2], "topk_group": [1, 2, 1]},
    ),
    "dots1": (
        *("Dots1", sizes_of_heads, ATTENTION, experts_in_groups),
        {"sliding_window": [None, 9, 5], "max_window_layers": 1, "norm_topk_prob": True},
    ),
    "ernie4_5": ("Ernie4_5", sizes_of_heads, biases("use_bias")),
    "exaone4": ("Exaone4", _WINDOWS, {"sliding_window_pattern": [2, 4, 3]}),
    "gemma": (
        *("Gemma", sizes_of_heads, ATTENTION),
        {"hidden_act": ["gelu", "gelu_pytorch_tanh", "silu"]},
    ),
    "gemma4": ("Gemma4", ATTENTION, _GEMMA4, _OF_LAYERS, {"model_type": "gemma4_text"}),
    "gemma4_unified": (
        *("Gemma4Unified", ATTENTION, _GEMMA4, {"model_type": "gemma4_unified_text"}),
    ),
    "glm": ("Glm", part_turns, ATTENTION, {"head_dim": 8}),
    "glm4": ("Glm4", part_turns, ATTENTION, {"head_dim": [8, 16, 8]}),
    "glm4_moe": (
        *("Glm4Moe", part_turns, ATTENTION, experts_in_groups),
        {"head_dim": 8, "use_qk_norm": [True, False, True], **_NORMED},
    ),
    "gpt_neox": ("GPTNeoX", layer_norm, _NEOX),
    "gpt_oss": (
        *("GptOss", sizes_of_heads, ATTENTION, _WINDOWS, _LOCAL),
        {"swiglu_limit": [7.0, 1.0, 7.0], "attention_bias": [True, True, False]},
    ),
    "granite": ("Granite", BOTH, multipliers),
    "granitemoe": ("GraniteMoe", ATTENTION, multipliers, _LOCAL),
    "granitemoehybrid": ("GraniteMoeHybrid", ATTENTION, multipliers, _LOCAL, _HYBRID),
    "granitemoeshared": (
        *("GraniteMoeShared", ATTENTION, multipliers, _LOCAL),
        {"shared_intermediate_size": [9, 0, 16]},
    ),
    "helium": ("Helium", BOTH, {"head_dim": of_head}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", ATTENTION, _NTK),
    "lfm3": ("Lfm3", ATTENTION, _LFM3),
    "mellum": (
        *("Mellum", sizes_of_heads, ATTENTION, _EXPERTS, _WINDOWS, _NORMED_ONCE),
        {"rope_parameters": [_TYPES, KEPT, _TYPES], **removed("rope_theta", "rope_scaling")},
        {"mlp_layer_types": [None, ["sparse", "dense", "sparse"], None]},
    ),
    "sarvam_mla": ("SarvamMLA", _LATENT, _NORMED, {"rope_interleave": [True, True, False]}),
    "sarvam_moe": (
        *("SarvamMoE", ATTENTION, experts_in_groups, _NORMED),
        {"head_dim": 8, "use_qk_norm": [True, False, True]},
    ),
    "minicpm3": (
        *("MiniCPM3", _LATENT, BOTH),
        {
            "scale_emb": [3, 0.5, 12],
            "scale_depth": [1.4, None, 0.7],
            "dim_model_base": [4, 64, None],
        },
    ),
    # transformers makes the embedding of a padding token zeros
    "youtu": ("Youtu", _LATENT, {"rope_interleave": [True, True, False], "pad_token_id": None}),
    "lfm2": ("Lfm2", _LFM2, layer_norm, {"layer_norm_eps": REMOVED}),
    "ministral": ("Ministral", sizes_of_heads, _WINDOWS),
    "ministral3": ("Ministral3", sizes_of_heads, _GROWN, {"sliding_window": [None, 9, None]}),
    "mixtral": ("Mixtral", sizes_of_heads, _LOCAL, {"sliding_window": [None, 9, 30]}),
    "nemotron": (
        *("Nemotron", part_turns, BOTH, {"rms_norm_eps": REMOVED, "norm_eps": EPSILONS}),
        {"hidden_act": ["relu2", "silu", "relu2"], "num_hidden_layers": [2, 1, 2]},
    ),
    "olmo2": ("Olmo2", ATTENTION),
    "olmo3": ("Olmo3", ATTENTION, _WINDOWS, _BY_TYPES),
    "olmoe": ("Olmoe", ATTENTION, experts("num_experts"), _NORMED_ONCE),
    "phi": ("Phi", part_turns, layer_norm, {"tie_word_embeddings": False}),
    "qwen2_moe": (
        *("Qwen2Moe", _EXPERTS, _SOME_EXPERTS),
        {"qkv_bias": [True, False, True], "shared_expert_intermediate_size": [9, 6, 16]},
        {"num_hidden_layers": 3, "max_window_layers": 2, **_SOME_WINDOWS, **_NORMED_ONCE},
    ),
    "qwen3_moe": (
        *("Qwen3Moe", sizes_of_heads, ATTENTION, _EXPERTS),
        {"norm_topk_prob": [True, False, True], "num_hidden_layers": 3},
        {**_SOME_EXPERTS, **_SOME_WINDOWS},
    ),
    "seed_oss": (
        *("SeedOss", sizes_of_heads, biases("attention_bias", "attention_out_bias", "mlp_bias")),
    ),
    "smollm3": (
        *("SmolLM3", BOTH),
        {"no_rope_layers": [None, [1, 0, 0], None], "no_rope_layer_interval": [2, 4, 3]},
        {"use_sliding_window": [False, True, True], "sliding_window": [9, 5, 9]},
        {"num_hidden_layers": 3},
    ),
    "stablelm": ("StableLm", part_turns, layer_norm, biases("use_qkv_bias")),
    "starcoder2": (
        *("Starcoder2", biases("use_bias"), {"rms_norm_eps": REMOVED}),
        {"norm_epsilon": EPSILONS, "sliding_window": [9, None, 30]},
    ),
    "cohere": (
        *("Cohere", ATTENTION, layer_norm),
        {"logit_scale": [0.5, 0.25, 1.5], "use_qk_norm": [True, False, True]},
    ),
    "cohere2_moe": ("Cohere2Moe", sizes_of_heads, ATTENTION, _WINDOWS, layer_norm, _COHERE2_MOE),
    "ernie4_5_moe": ("Ernie4_5_Moe", sizes_of_heads, _EXPERTS_OR_NONE),
    "exaone_moe": ("ExaoneMoe", _WINDOWS, _EXAONE_MOE),
    "flex_olmo": ("FlexOlmo", ATTENTION, experts("num_experts"), _NORMED_ONCE),
    "hunyuan_v1_moe": (
        *("HunYuanMoEV1", ATTENTION, _NTK),
        {"num_experts": [4, 7, 5], "moe_topk": [[2, 2], 6, 1]},
    ),
    "llama4_text": ("Llama4", sizes_of_heads, ATTENTION, _LOCAL, _LLAMA4),
    "minimax_m2": ("MiniMaxM2", _LOCAL, {"head_dim": [8, 6, 10], "rotary_dim": [4, 6, 8]}),
    "olmo": ("Olmo", ATTENTION, {"rms_norm_eps": REMOVED, "clip_qkv": [0.3, None, 1.0]}),
    "solar_open": (
        *("SolarOpen", sizes_of_heads, ATTENTION, experts_in_groups, _NORMED),
        {"intermediate_size": REMOVED, "first_k_dense_replace": REMOVED},
    ),
    "vaultgemma": (
        *("VaultGemma", sizes_of_heads, ATTENTION, _WINDOWS, {"hidden_act": REMOVED}),
        {"hidden_activation": ["gelu_pytorch_tanh", "silu", "gelu"]},
        {"attn_logit_softcapping": [2.0, None, 50.0], "query_pre_attn_scalar": [5, 16, 9]},
        {"final_logit_softcapping": [None, 3.0, 30.0]},
    ),
    "exaone": ("Exaone", sizes_of_heads),
    "falcon": ("Falcon", _FALCON),
    "glm4_moe_lite": (
        *("Glm4MoeLite", _LATENT, _NORMED, {"first_k_dense_replace": REMOVED}),
        {"mlp_layer_types": [None, ["sparse", "dense", "sparse"], ["sparse", "sparse"]]},
        {"rope_interleave": [True, True, False]},
    ),
    "gpt_bigcode": (
        *("GPTBigCode", _GPT),
        {"multi_query": [True, False, True], "scale_attn_weights": [True, True, False]},
    ),
    "gpt_neo": ("GPTNeo", _NEO),
    "gptj": ("GPTJ", _GPT, {"rotary_dim": [2, 4, 8], "tie_word_embeddings": False}),
    "granite_swa": ("GraniteSWA", BOTH, multipliers, _WINDOWS, _THETAS),
    "granitemoe_swa": (
        *("GraniteMoeSWA", ATTENTION, multipliers, _LOCAL, _WINDOWS, _THETAS),
        {"shared_intermediate_size": [0, 9, 16]},
    ),
    "hyperclovax": ("HyperCLOVAX", BOTH, multipliers, {"use_post_norm": [True, False, True]}),
    "internlm3": ("InternLM3", sizes_of_heads, _QKV),
    "iquestcoder": ("IQuestCoder", sizes_of_heads, BOTH),
    "jais2": ("Jais2", BOTH, layer_norm, {"hidden_act": ["relu2", "gelu", "relu2"]}),
    "nanochat": (
        *("NanoChat", sizes_of_heads, ATTENTION, {"hidden_act": ["relu2", "gelu", "silu"]}),
        {"final_logit_softcapping": [15.0, None, 3.0], "rms_norm_eps": EPSILONS},
    ),
    "opt": ("OPT", _OPT),
    "phimoe": (
        *("Phimoe", ATTENTION, _LOCAL),
        {"router_jitter_noise": [0.01, 0.3, 0.1], "num_experts_per_tok": 2},
        {"lm_head_bias": [False, True, False], "sliding_window": [None, 9, None]},
        {"rope_parameters": REMOVED, "rope_scaling": REMOVED, "rope_theta": 1000.0},
    ),
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
"""transformers' class, and what changes a configuration, for each family: most often a model_type."""
