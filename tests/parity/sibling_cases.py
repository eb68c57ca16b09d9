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

from .cases import ACTIVATIONS, Case, common_sizes, pick, rope_keys

PROMPT, STEPS = 17, 24
"""Tokens of the prompt, and greedy ones after it."""


EACH = 3
"""Cases of a family."""

REFERENCE = Path(__file__).parent / "sibling_reference.npz"
HYBRID_REFERENCE = Path(__file__).parent / "hybrid_reference.npz"
LATER_REFERENCE = Path(__file__).parent / "later_sibling_reference.npz"
FURTHER_REFERENCE = Path(__file__).parent / "further_sibling_reference.npz"


@dataclass(frozen=True)
class Sibling(Case):
    """A case whose tensors torch named.

    Attributes:
        shapes: names and shapes of the tensors; empty: as recorded.
    """

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
    for reference in (REFERENCE, LATER_REFERENCE, FURTHER_REFERENCE, HYBRID_REFERENCE):
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
        _case(family, number, *families[family], seeds)
        for family in families
        for number in range(EACH)
    )


def _case(family, number, kind, change, seeds):
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
    changed = change(number, random, config)
    config = {key: value for key, value in (config | changed).items() if value is not REMOVED}
    return Sibling(name, config, seeds.get(name, 3000 + crc % 1000 + number))


_SEEDS = {
    "gpt_oss-2": 5000,
    "granitemoehybrid-1": 5000,
    "granitemoeshared-1": 5000,
    "nemotron-1": 5001,
    "nemotron-2": 5012,
    "seed_oss-1": 4001,
}
"""Of cases where, with another seed, rounding would decide a token: see record.py."""

REMOVED = object()
"""A key that the configuration does not have."""


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
    share = [0.5, 0.25, 0.75][number]
    return {
        "hidden_size": 8 * config["num_attention_heads"],
        "partial_rotary_factor": share,
        **rope_keys("linear" if number == 2 else "default", 1, random),
    }


def layer_norm(number, random, config):
    return {"rms_norm_eps": REMOVED, "layer_norm_eps": pick(random, [1e-5, 1e-3])}


def combined(*changes):
    def change(number, random, config):
        found = {}
        for each in changes:
            found |= each(number, random, config | found)
        return found

    return change


def given(**values):
    """Give keys these values; of a list the one at the number."""

    def change(number, random, config):
        return {
            key: value[number] if isinstance(value, list) else value
            for key, value in values.items()
        }

    return change


def _by_types(number, random, config):
    """Rotary positions by kinds of layers; the first as files of transformers 4 say it."""
    if number == 0:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        return {"rope_parameters": REMOVED, "rope_theta": 1000.0, "rope_scaling": scaling}
    far = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    near = {"rope_type": "default", "rope_theta": 100.0}
    parameters = {"full_attention": far, "sliding_attention": near}
    return {"rope_theta": REMOVED, "rope_scaling": REMOVED, "rope_parameters": parameters}


def ntk(number, random, config):
    scaling = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}
    size = {"head_dim": pick(random, [4, 6, 10])}
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
        **dict.fromkeys(("rope_parameters", "rope_theta", "rope_scaling"), REMOVED),
        "hidden_size": 8 * config["num_attention_heads"],
    }


def experts(count, inner="intermediate_size"):
    """Few experts, of which a token has one, some or all but one."""

    def change(number, random, config):
        inner_width = pick(random, [5, 8, 11])
        return {
            count: [4, 7, 5][number],
            inner: inner_width,
            "num_experts_per_tok": [2, 6, 1][number],
        }

    return change


def multipliers(number, random, config):
    return {
        "attention_multiplier": [0.3, 0.5, 1.0][number],
        "embedding_multiplier": [3.0, 0.5, 2.0][number],
        "logits_scaling": [0.5, 2.0, 1.5][number],
        "residual_multiplier": [0.22, 1.5, 0.7][number],
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


def latent(number, random, config):
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


BOTH = biases("attention_bias", "mlp_bias")
ATTENTION = biases("attention_bias")
_RELU2 = given(hidden_act="relu2")

FAMILIES = {
    "apertus": ("Apertus", combined(ATTENTION, given(hidden_act="xielu"))),
    "arcee": ("Arcee", combined(BOTH, _RELU2)),
    "cohere2": (
        "Cohere2",
        combined(ATTENTION, windows, layer_norm, given(logit_scale=[0.5, 0.25, 1.5])),
    ),
    "cwm": ("Cwm", combined(sizes_of_heads, windows, biases("mlp_bias"))),
    "deepseek_v2": (
        "DeepseekV2",
        combined(
            latent,
            given(
                topk_method=["greedy", "group_limited_greedy", "greedy"],
                n_group=[None, 3, None],
                topk_group=[None, 2, None],
                norm_topk_prob=False,
            ),
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        combined(
            latent,
            given(
                n_group=[1, 3, 2],
                topk_group=[1, 2, 1],
                norm_topk_prob=[True, True, False],
                rope_interleave=[True, True, False],
            ),
        ),
    ),
    "dots1": (
        "Dots1",
        combined(
            sizes_of_heads,
            ATTENTION,
            experts_in_groups,
            given(sliding_window=[None, 9, 5], max_window_layers=1, norm_topk_prob=True),
        ),
    ),
    "ernie4_5": ("Ernie4_5", combined(sizes_of_heads, biases("use_bias"))),
    "exaone4": ("Exaone4", combined(windows, given(sliding_window_pattern=[2, 4, 3]))),
    "gemma": (
        "Gemma",
        combined(
            sizes_of_heads, ATTENTION, given(hidden_act=["gelu", "gelu_pytorch_tanh", "silu"])
        ),
    ),
    "glm": ("Glm", combined(part_turns, ATTENTION, given(head_dim=8))),
    "glm4": ("Glm4", combined(part_turns, ATTENTION, given(head_dim=[8, 16, 8]))),
    "glm4_moe": (
        "Glm4Moe",
        combined(
            part_turns,
            ATTENTION,
            experts_in_groups,
            given(head_dim=8, use_qk_norm=[True, False, True], norm_topk_prob=[True, True, False]),
        ),
    ),
    "gpt_neox": ("GPTNeoX", combined(layer_norm, _neox)),
    "gpt_oss": (
        "GptOss",
        combined(
            sizes_of_heads,
            ATTENTION,
            windows,
            experts("num_local_experts"),
            given(swiglu_limit=[7.0, 1.0, 7.0], attention_bias=[True, True, False]),
        ),
    ),
    "granite": ("Granite", combined(BOTH, multipliers)),
    "granitemoe": ("GraniteMoe", combined(ATTENTION, multipliers, experts("num_local_experts"))),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        combined(
            ATTENTION,
            multipliers,
            experts("num_local_experts"),
            _hybrid,
        ),
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        combined(
            ATTENTION,
            multipliers,
            experts("num_local_experts"),
            given(shared_intermediate_size=[9, 0, 16]),
        ),
    ),
    "helium": (
        "Helium",
        combined(
            BOTH,
            lambda number, random, config: {
                "head_dim": config["hidden_size"] // config["num_attention_heads"]
            },
        ),
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", combined(ATTENTION, ntk)),
    "lfm2": ("Lfm2", combined(_lfm2, layer_norm, given(layer_norm_eps=REMOVED))),
    "ministral": ("Ministral", combined(sizes_of_heads, windows)),
    "ministral3": (
        "Ministral3",
        combined(sizes_of_heads, _grown, given(sliding_window=[None, 9, None])),
    ),
    "mixtral": (
        "Mixtral",
        combined(sizes_of_heads, experts("num_local_experts"), given(sliding_window=[None, 9, 30])),
    ),
    "nemotron": (
        "Nemotron",
        combined(
            part_turns,
            BOTH,
            given(hidden_act=["relu2", "silu", "relu2"], num_hidden_layers=[2, 1, 2]),
            given(rms_norm_eps=REMOVED, norm_eps=[1e-5, 1e-3, 1e-5]),
        ),
    ),
    "olmo2": ("Olmo2", ATTENTION),
    "olmo3": ("Olmo3", combined(ATTENTION, windows, _by_types)),
    "olmoe": (
        "Olmoe",
        combined(ATTENTION, experts("num_experts"), given(norm_topk_prob=[False, True, False])),
    ),
    "phi": ("Phi", combined(part_turns, layer_norm, given(tie_word_embeddings=False))),
    "qwen2_moe": (
        "Qwen2Moe",
        combined(
            experts("num_experts", "moe_intermediate_size"),
            given(
                qkv_bias=[True, False, True],
                shared_expert_intermediate_size=[9, 6, 16],
                norm_topk_prob=[False, True, False],
                num_hidden_layers=3,
                decoder_sparse_step=[1, 2, 1],
                mlp_only_layers=[[1], [], []],
                use_sliding_window=[False, False, True],
                sliding_window=9,
                max_window_layers=2,
            ),
        ),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        combined(
            sizes_of_heads,
            ATTENTION,
            experts("num_experts", "moe_intermediate_size"),
            given(
                norm_topk_prob=[True, False, True],
                num_hidden_layers=3,
                decoder_sparse_step=[1, 2, 1],
                mlp_only_layers=[[1], [], []],
                use_sliding_window=[False, False, True],
                sliding_window=9,
            ),
        ),
    ),
    "seed_oss": (
        "SeedOss",
        combined(sizes_of_heads, biases("attention_bias", "attention_out_bias", "mlp_bias")),
    ),
    "smollm3": (
        "SmolLM3",
        combined(
            BOTH,
            given(
                no_rope_layers=[None, [1, 0, 0], None],
                no_rope_layer_interval=[2, 4, 3],
                num_hidden_layers=3,
                use_sliding_window=[False, True, True],
                sliding_window=[9, 5, 9],
            ),
        ),
    ),
    "stablelm": ("StableLm", combined(part_turns, layer_norm, biases("use_qkv_bias"))),
    "starcoder2": (
        "Starcoder2",
        combined(
            biases("use_bias"),
            given(
                rms_norm_eps=REMOVED,
                norm_epsilon=[1e-5, 1e-3, 1e-5],
                sliding_window=[9, None, 30],
            ),
        ),
    ),
}
"""The class of transformers, and what a configuration has, for each model_type."""
