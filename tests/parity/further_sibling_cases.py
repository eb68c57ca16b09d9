"""Small random checkpoints of the decoders like Llama, and of the older ones (see sibling_cases.py)."""

from .cases import ACTIVATIONS, POSITIONS, pick
from .sibling_cases import (
    ATTENTION,
    BOTH,
    FURTHER_REFERENCE,
    REMOVED,
    cases_of,
    combined,
    experts,
    given,
    latent,
    layer_norm,
    multipliers,
    sizes_of_heads,
    windows,
)

REFERENCE = FURTHER_REFERENCE


def cases():
    return cases_of(FAMILIES, _SEEDS)


_SEEDS = {}
"""Of cases where, with another seed, rounding would decide a token: see record.py."""

_OF_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_OF_LLAMA = (*_OF_ROPE, "rms_norm_eps", "intermediate_size", "num_key_value_heads", "hidden_act")


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


def _thetas(number, random, config):
    return {"layer_rope_theta": [None, [0, 100.0, 5000.0], [700.0, 0, 700.0]][number]}


FAMILIES = {
    "exaone": ("Exaone", sizes_of_heads),
    "falcon": ("Falcon", _falcon),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        combined(
            latent,
            given(
                first_k_dense_replace=REMOVED,
                mlp_layer_types=[None, ["sparse", "dense", "sparse"], ["sparse", "sparse"]],
                norm_topk_prob=[True, True, False],
                rope_interleave=[True, True, False],
            ),
        ),
    ),
    "gpt_bigcode": (
        "GPTBigCode",
        combined(
            _gpt,
            given(multi_query=[True, False, True], scale_attn_weights=[True, True, False]),
        ),
    ),
    "gpt_neo": ("GPTNeo", _neo),
    "gptj": ("GPTJ", combined(_gpt, given(rotary_dim=[2, 4, 8], tie_word_embeddings=False))),
    "granite_swa": ("GraniteSWA", combined(BOTH, multipliers, windows, _thetas)),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        combined(
            ATTENTION,
            multipliers,
            experts("num_local_experts"),
            windows,
            _thetas,
            given(shared_intermediate_size=[0, 9, 16]),
        ),
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        combined(BOTH, multipliers, given(use_post_norm=[True, False, True])),
    ),
    "internlm3": (
        "InternLM3",
        combined(
            sizes_of_heads,
            lambda number, random, config: dict.fromkeys(("qkv_bias", "bias"), number == 1),
        ),
    ),
    "iquestcoder": ("IQuestCoder", combined(sizes_of_heads, BOTH)),
    "jais2": ("Jais2", combined(BOTH, layer_norm, given(hidden_act=["relu2", "gelu", "relu2"]))),
    "opt": ("OPT", _opt),
    "phimoe": (
        "Phimoe",
        combined(
            ATTENTION,
            experts("num_local_experts"),
            given(
                num_experts_per_tok=2,
                router_jitter_noise=[0.01, 0.3, 0.1],
                lm_head_bias=[False, True, False],
                sliding_window=[None, 9, None],
                rope_parameters=REMOVED,
                rope_scaling=REMOVED,
                rope_theta=1000.0,
            ),
        ),
    ),
}
"""The beginning of the name of transformers' class, and what a configuration has, for each model_type."""
