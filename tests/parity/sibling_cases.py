"""Small random checkpoints of the decoders that are a row beside those of cases.py. No JAX, no torch.

Each family has three: the first runs in `make test`. torch named their tensors: the record holds names and
shapes beside the logits, so no list here can repeat a mistake of the table.
"""

import json
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from .cases import ACTIVATIONS, POSITIONS, Case, common_sizes, pick, rope_keys

PROMPT, STEPS = 17, 24
"""Tokens of the prompt, and greedy ones after it."""

EACH = 3
"""Cases of a family."""

REFERENCE = Path(__file__).parent / "sibling_reference.npz"
HYBRID_REFERENCE = Path(__file__).parent / "hybrid_reference.npz"


@dataclass(frozen=True)
class Sibling(Case):
    """A case whose tensors torch named: their names and shapes are as recorded, unless they are given."""

    shapes: dict = field(default_factory=dict)

    @property
    def tensor_shapes(self):
        """Of the tensors that torch publishes for the configuration."""
        shapes = self.shapes or _recorded_shapes()[shapes_key(self)]
        return {name: tuple(shape) for name, shape in shapes.items()}


def shapes_key(case):
    """The key in the reference of the shapes of a case."""
    return f"{case.name}/shapes"


@cache
def _recorded_shapes():
    shapes = {}
    for reference in (REFERENCE, HYBRID_REFERENCE):
        if not reference.is_file():  # record.py writes it
            continue
        with np.load(reference) as recorded:
            shapes |= {key: json.loads(str(recorded[key])) for key in recorded if "/" in key}
    return shapes


def cases():
    return cases_of(FAMILIES, _SEEDS)


def cases_of(families, seeds):
    """The cases of families; some have a seed of their own."""
    return tuple(
        _case(family, number, seeds, *families[family])
        for family in families
        for number in range(EACH)
    )


def _case(family, number, seeds, kind, *changes):
    name, crc = f"{family}-{number}", zlib.crc32(family.encode())
    random = np.random.default_rng([9, crc, number])
    config = {
        "model_type": family,
        "architectures": [f"{kind}ForCausalLM"],
        "pad_token_id": 0,
        **common_sizes(random),
        "num_hidden_layers": 2 + number % 2,
        "hidden_act": pick(random, ACTIVATIONS),
        "tie_word_embeddings": number % 2 == 0,
        **rope_keys(["default", "yarn", "linear"][number], number, random),
    }
    heads = config["num_attention_heads"]
    config["hidden_size"] = heads * pick(random, [4, 6])
    for change in changes:
        if callable(change):
            config |= change(number, random, config)
        else:  # values of keys; of a list the one at the number
            each = {key: v[number] if isinstance(v, list) else v for key, v in change.items()}
            config |= each
    config = {key: value for key, value in config.items() if value is not REMOVED}
    return Sibling(name, config, seeds.get(name, 3000 + crc % 1000 + number))


_SEEDS = {
    "gpt_oss-2": 5000,
    "granitemoehybrid-1": 5000,
    "granitemoeshared-1": 5000,
    "nemotron-1": 5001,
    "nemotron-2": 5012,
    "seed_oss-1": 4001,
    "vaultgemma-1": 5000,
}
"""Of cases where, with another seed, rounding would decide a token: see record.py."""

REMOVED = object()
"""A key that the configuration does not have."""

_OF_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_OF_LLAMA = (*_OF_ROPE, "rms_norm_eps", "intermediate_size", "num_key_value_heads", "hidden_act")


def biases(*keys):
    """Say by the number whether there are biases: none, all, the first."""

    def change(number, random, config):
        return {key: number == 1 or (number == 2 and key == keys[0]) for key in keys}

    return change


def sizes_of_heads(number, random, config):
    return {"head_dim": pick(random, [4, 6, 10])}


def windows(number, random, config):
    """Windows in some layers, said by the default pattern or by each layer."""
    change = {"sliding_window": pick(random, [3, 9, 20]), "num_hidden_layers": 4}
    if number:
        layers = ["full_attention", "sliding_attention", "sliding_attention"]
        change |= {"layer_types": layers, "num_hidden_layers": 3}
    return change


def part_turns(number, random, config):
    """Heads of which a part turns, as files of transformers 4 say it."""
    return {
        "hidden_size": 8 * config["num_attention_heads"],
        "partial_rotary_factor": [0.5, 0.25, 0.75][number],
        **rope_keys("linear" if number == 2 else "default", 1, random),
    }


def layer_norm(number, random, config):
    return {"rms_norm_eps": REMOVED, "layer_norm_eps": pick(random, [1e-5, 1e-3])}


def _by_types(number, random, config):
    """Rotary positions by kinds of layers; the first as files of transformers 4 say it."""
    if number == 0:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        return {"rope_parameters": REMOVED, "rope_theta": 1000.0, "rope_scaling": scaling}
    far = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    near = {"rope_type": "default", "rope_theta": 100.0}
    parameters = {"full_attention": far, "sliding_attention": near}
    return {"rope_theta": REMOVED, "rope_scaling": REMOVED, "rope_parameters": parameters}


def _ntk(number, random, config):
    scaling = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}
    size = sizes_of_heads(number, random, config)
    if number:
        return size
    return {**size, "rope_parameters": REMOVED, "rope_theta": 100.0, "rope_scaling": scaling}


def _grown(number, random, config):
    parameters = {
        **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "mscale": 1.0},
        **{"original_max_position_embeddings": 8, "llama_4_scaling_beta": [0.1, 0.5, 0.0][number]},
    }
    return {"rope_parameters": parameters, "rope_theta": REMOVED, "rope_scaling": REMOVED}


def _neox(number, random, config):
    return {
        "num_key_value_heads": REMOVED,
        "use_parallel_residual": number != 2,
        "attention_bias": number != 1,
        "rotary_pct": [0.25, 0.5, 1.0][number],
        "rotary_emb_base": 1000,
        **dict.fromkeys(_OF_ROPE, REMOVED),
        "hidden_size": 8 * config["num_attention_heads"],
    }


def experts(count, inner="intermediate_size"):
    """Few experts, of which a token has one, some or all but one."""

    def change(number, random, config):
        sizes = {count: [4, 7, 5][number], "num_experts_per_tok": [2, 6, 1][number]}
        return sizes | {inner: pick(random, [5, 8, 11])}

    return change


def _experts_or_none(number, random, config):
    """Experts in layers from one to another, and shared ones."""
    return {
        "num_hidden_layers": 3,
        "moe_num_experts": [4, 7, 5][number],
        "moe_k": [2, 6, 1][number],
        "moe_intermediate_size": pick(random, [5, 8, 11]),
        "moe_num_shared_experts": [1, 0, 2][number],
        "moe_layer_start_index": [1, 0, 0][number],
        "moe_layer_end_index": [-1, 1, 2][number],
        "moe_layer_interval": [1, 1, 2][number],
    }


multipliers = {
    "attention_multiplier": [0.3, 0.5, 1.0],
    "embedding_multiplier": [3.0, 0.5, 2.0],
    "logits_scaling": [0.5, 2.0, 1.5],
    "residual_multiplier": [0.22, 1.5, 0.7],
}


def _hybrid(number, random, config):
    """Attention in all layers, with and without positions and experts."""
    return {
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "shared_intermediate_size": [9, 6, 16][number],
        "position_embedding_type": ["rope", "rope", "nope"][number],
        **({} if number else {"num_local_experts": 0}),
        **{"mamba_n_heads": 2, "mamba_d_head": config["hidden_size"], "mamba_expand": 2},
    }


def experts_in_groups(number, random, config):
    """Experts in groups beside shared ones, after a layer without experts."""
    return {
        "n_routed_experts": 6,
        "n_shared_experts": 1 + number % 2,
        "num_experts_per_tok": 2 + number % 2,
        "moe_intermediate_size": pick(random, [5, 8]),
        "first_k_dense_replace": number % 2,
        "routed_scaling_factor": [1.0, 2.5, 0.5][number],
        "n_group": [1, 3, 2][number],
        "topk_group": [1, 2, 1][number],
    }


def _exaone_moe(number, random, config):
    """Experts in groups beside shared ones; which layers have them is said in two ways."""
    count, layers = config["num_hidden_layers"], ["sparse", "dense"] * 2
    said = {"mlp_layer_types": layers[:count]} if number == 1 else {"first_k_dense_replace": 1}
    grouped = experts_in_groups(number, random, config)
    return {
        **grouped,
        **dict.fromkeys(("n_routed_experts", "n_shared_experts", "first_k_dense_replace"), REMOVED),
        "num_experts": grouped["n_routed_experts"],
        "num_shared_experts": grouped["n_shared_experts"],
        "norm_topk_prob": number != 2,
        **said,
    }


def _latent(number, random, config):
    """Attention to latents, with shared experts beside others, after a layer without experts."""
    yarn = {
        **{"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9},
        "original_max_position_embeddings": 16,
    }
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "attention_bias": number == 1,
        "kv_lora_rank": pick(random, [6, 10]),
        "q_lora_rank": [None, 7, 11][number],
        "qk_nope_head_dim": pick(random, [4, 6]),
        "qk_rope_head_dim": pick(random, [2, 4]),
        "v_head_dim": pick(random, [3, 5]),
        **experts_in_groups(number, random, config),
        "num_nextn_predict_layers": 0,
        **({"rope_scaling": yarn} if number == 1 else {}),
    }


def _lfm2(number, random, config):
    """Convolutions in the first layer, in the last one, and in between."""
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    layers = [kinds[:2], kinds[:3], kinds[1:]][number]
    return {
        "hidden_act": REMOVED,
        "norm_eps": pick(random, [1e-5, 1e-3]),
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "conv_L_cache": [3, 4, 2][number],
        "conv_bias": number == 1,
        "block_auto_adjust_ff_dim": number != 2,
        "block_ffn_dim_multiplier": [1.3, 0.7, 1.0][number],
        "block_multiple_of": 7,
    }


def _gpt(number, random, config):
    """Sizes under GPT-2's names."""
    heads = config["num_attention_heads"]
    of_sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    return {
        **dict.fromkeys((*_OF_LLAMA, *of_sizes, "max_position_embeddings"), REMOVED),
        "n_embd": 8 * heads,
        "n_head": heads,
        "n_layer": 2 + number % 2,
        "n_positions": POSITIONS,
        "n_inner": [None, 11, 32][number],
        "activation_function": pick(random, ["gelu_new", *ACTIVATIONS]),
        "layer_norm_epsilon": [1e-5, 1e-3, 1e-5][number],
    }


def _falcon(number, random, config):
    """Each of the three orders of queries and keys in one matrix."""
    return {
        **dict.fromkeys((key for key in _OF_LLAMA if key not in _OF_ROPE), REMOVED),
        "activation": ["gelu", "relu", "silu"][number],
        "ffn_hidden_size": [None, 13, 40][number],
        "layer_norm_epsilon": [1e-5, 1e-3, 1e-5][number],
        "bias": number == 2,
        "multi_query": number == 0,
        "parallel_attn": number != 2,
        "new_decoder_architecture": number == 1,
        **({"num_kv_heads": config["num_key_value_heads"]} if number == 1 else {}),
    }


def _neo(number, random, config):
    """Windows in some layers."""
    heads, kinds = config["num_attention_heads"], [["global", "local"], ["local", "global"]]
    return {
        **dict.fromkeys((*_OF_LLAMA, "num_attention_heads", "num_hidden_layers"), REMOVED),
        "num_heads": heads,
        "hidden_size": 4 * heads,  # larger scores are too sharp: nothing divides them
        "num_layers": 2,
        "attention_types": [[kinds[number % 2], 1]],
        "window_size": [5, 1, 30][number],
        "intermediate_size": [None, 13, 40][number],
        "activation_function": pick(random, ["gelu_new", *ACTIVATIONS]),
        "layer_norm_epsilon": [1e-5, 1e-3, 1e-5][number],
    }


def _opt(number, random, config):
    return {
        **dict.fromkeys(_OF_LLAMA, REMOVED),
        "ffn_dim": pick(random, [13, 24, 40]),
        "activation_function": ["relu", "gelu", "relu"][number],
        "enable_bias": number != 1,
    }


def _helium(number, random, config):
    return {"head_dim": config["hidden_size"] // config["num_attention_heads"]}


BOTH = biases("attention_bias", "mlp_bias")
ATTENTION = biases("attention_bias")
_LOCAL = experts("num_local_experts")
_THETAS = {"layer_rope_theta": [None, [0, 100.0, 5000.0], [700.0, 0, 700.0]]}
_NORMED = {"norm_topk_prob": [True, True, False]}
_NORMED_ONCE = {"norm_topk_prob": [False, True, False]}
_SOME_WINDOWS = {"use_sliding_window": [False, False, True], "sliding_window": 9}
_SOME_EXPERTS = {"decoder_sparse_step": [1, 2, 1], "mlp_only_layers": [[1], [], []]}
_QKV = {key: [False, True, False] for key in ("qkv_bias", "bias")}
_EPSILON = {"rms_norm_eps": REMOVED, "norm_eps": [1e-5, 1e-3, 1e-5]}

FAMILIES = {
    "apertus": ("Apertus", ATTENTION, {"hidden_act": "xielu"}),
    "arcee": ("Arcee", BOTH, {"hidden_act": "relu2"}),
    "cohere2": ("Cohere2", ATTENTION, windows, layer_norm, {"logit_scale": [0.5, 0.25, 1.5]}),
    "cwm": ("Cwm", sizes_of_heads, windows, biases("mlp_bias")),
    "deepseek_v2": (
        *("DeepseekV2", _latent, {"topk_method": ["greedy", "group_limited_greedy", "greedy"]}),
        {"n_group": [None, 3, None], "topk_group": [None, 2, None], "norm_topk_prob": False},
    ),
    "deepseek_v3": (
        *("DeepseekV3", _latent, _NORMED, {"rope_interleave": [True, True, False]}),
        {"n_group": [1, 3, 2], "topk_group": [1, 2, 1]},
    ),
    "dots1": (
        *("Dots1", sizes_of_heads, ATTENTION, experts_in_groups),
        {"sliding_window": [None, 9, 5], "max_window_layers": 1, "norm_topk_prob": True},
    ),
    "ernie4_5": ("Ernie4_5", sizes_of_heads, biases("use_bias")),
    "exaone4": ("Exaone4", windows, {"sliding_window_pattern": [2, 4, 3]}),
    "gemma": (
        *("Gemma", sizes_of_heads, ATTENTION),
        {"hidden_act": ["gelu", "gelu_pytorch_tanh", "silu"]},
    ),
    "glm": ("Glm", part_turns, ATTENTION, {"head_dim": 8}),
    "glm4": ("Glm4", part_turns, ATTENTION, {"head_dim": [8, 16, 8]}),
    "glm4_moe": (
        *("Glm4Moe", part_turns, ATTENTION, experts_in_groups),
        {"head_dim": 8, "use_qk_norm": [True, False, True], **_NORMED},
    ),
    "gpt_neox": ("GPTNeoX", layer_norm, _neox),
    "gpt_oss": (
        *("GptOss", sizes_of_heads, ATTENTION, windows, _LOCAL),
        {"swiglu_limit": [7.0, 1.0, 7.0], "attention_bias": [True, True, False]},
    ),
    "granite": ("Granite", BOTH, multipliers),
    "granitemoe": ("GraniteMoe", ATTENTION, multipliers, _LOCAL),
    "granitemoehybrid": ("GraniteMoeHybrid", ATTENTION, multipliers, _LOCAL, _hybrid),
    "granitemoeshared": (
        *("GraniteMoeShared", ATTENTION, multipliers, _LOCAL),
        {"shared_intermediate_size": [9, 0, 16]},
    ),
    "helium": ("Helium", BOTH, _helium),
    "hunyuan_v1_dense": ("HunYuanDenseV1", ATTENTION, _ntk),
    "lfm2": ("Lfm2", _lfm2, layer_norm, {"layer_norm_eps": REMOVED}),
    "ministral": ("Ministral", sizes_of_heads, windows),
    "ministral3": ("Ministral3", sizes_of_heads, _grown, {"sliding_window": [None, 9, None]}),
    "mixtral": ("Mixtral", sizes_of_heads, _LOCAL, {"sliding_window": [None, 9, 30]}),
    "nemotron": (
        *("Nemotron", part_turns, BOTH, _EPSILON),
        {"hidden_act": ["relu2", "silu", "relu2"], "num_hidden_layers": [2, 1, 2]},
    ),
    "olmo2": ("Olmo2", ATTENTION),
    "olmo3": ("Olmo3", ATTENTION, windows, _by_types),
    "olmoe": ("Olmoe", ATTENTION, experts("num_experts"), _NORMED_ONCE),
    "phi": ("Phi", part_turns, layer_norm, {"tie_word_embeddings": False}),
    "qwen2_moe": (
        *("Qwen2Moe", experts("num_experts", "moe_intermediate_size"), _SOME_EXPERTS),
        {"qkv_bias": [True, False, True], "shared_expert_intermediate_size": [9, 6, 16]},
        {"num_hidden_layers": 3, "max_window_layers": 2, **_SOME_WINDOWS, **_NORMED_ONCE},
    ),
    "qwen3_moe": (
        *("Qwen3Moe", sizes_of_heads, ATTENTION, experts("num_experts", "moe_intermediate_size")),
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
        {"norm_epsilon": [1e-5, 1e-3, 1e-5], "sliding_window": [9, None, 30]},
    ),
    "cohere": (
        *("Cohere", ATTENTION, layer_norm),
        {"logit_scale": [0.5, 0.25, 1.5], "use_qk_norm": [True, False, True]},
    ),
    "ernie4_5_moe": ("Ernie4_5_Moe", sizes_of_heads, _experts_or_none),
    "exaone_moe": ("ExaoneMoe", windows, _exaone_moe, {"sliding_window_pattern": [2, 4, 3]}),
    "flex_olmo": ("FlexOlmo", ATTENTION, experts("num_experts"), _NORMED_ONCE),
    "hunyuan_v1_moe": (
        *("HunYuanMoEV1", ATTENTION, _ntk),
        {"num_experts": [4, 7, 5], "moe_topk": [[2, 2], 6, 1]},
    ),
    "minimax_m2": ("MiniMaxM2", _LOCAL, {"head_dim": [8, 6, 10], "rotary_dim": [4, 6, 8]}),
    "olmo": ("Olmo", ATTENTION, {"rms_norm_eps": REMOVED, "clip_qkv": [0.3, None, 1.0]}),
    "solar_open": (
        *("SolarOpen", sizes_of_heads, ATTENTION, experts_in_groups, _NORMED),
        {"intermediate_size": REMOVED, "first_k_dense_replace": REMOVED},
    ),
    "vaultgemma": (
        *("VaultGemma", sizes_of_heads, ATTENTION, windows, {"hidden_act": REMOVED}),
        {"hidden_activation": ["gelu_pytorch_tanh", "silu", "gelu"]},
        {"attn_logit_softcapping": [2.0, None, 50.0], "query_pre_attn_scalar": [5, 16, 9]},
        {"final_logit_softcapping": [None, 3.0, 30.0]},
    ),
    "exaone": ("Exaone", sizes_of_heads),
    "falcon": ("Falcon", _falcon),
    "glm4_moe_lite": (
        *("Glm4MoeLite", _latent, _NORMED, {"first_k_dense_replace": REMOVED}),
        {"mlp_layer_types": [None, ["sparse", "dense", "sparse"], ["sparse", "sparse"]]},
        {"rope_interleave": [True, True, False]},
    ),
    "gpt_bigcode": (
        *("GPTBigCode", _gpt),
        {"multi_query": [True, False, True], "scale_attn_weights": [True, True, False]},
    ),
    "gpt_neo": ("GPTNeo", _neo),
    "gptj": ("GPTJ", _gpt, {"rotary_dim": [2, 4, 8], "tie_word_embeddings": False}),
    "granite_swa": ("GraniteSWA", BOTH, multipliers, windows, _THETAS),
    "granitemoe_swa": (
        *("GraniteMoeSWA", ATTENTION, multipliers, _LOCAL, windows, _THETAS),
        {"shared_intermediate_size": [0, 9, 16]},
    ),
    "hyperclovax": ("HyperCLOVAX", BOTH, multipliers, {"use_post_norm": [True, False, True]}),
    "internlm3": ("InternLM3", sizes_of_heads, _QKV),
    "iquestcoder": ("IQuestCoder", sizes_of_heads, BOTH),
    "jais2": ("Jais2", BOTH, layer_norm, {"hidden_act": ["relu2", "gelu", "relu2"]}),
    "opt": ("OPT", _opt),
    "phimoe": (
        *("Phimoe", ATTENTION, _LOCAL),
        {"router_jitter_noise": [0.01, 0.3, 0.1], "num_experts_per_tok": 2},
        {"lm_head_bias": [False, True, False], "sliding_window": [None, 9, None]},
        {"rope_parameters": REMOVED, "rope_scaling": REMOVED, "rope_theta": 1000.0},
    ),
}
"""transformers' class, and what changes a configuration, for each model_type."""
