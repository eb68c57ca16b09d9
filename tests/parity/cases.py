"""Small random decoder checkpoints of every family, the same wherever they are made. No JAX, no torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PROMPT, STEPS = 17, 64
"""Tokens of the prompt, and greedy ones after it: windows and contexts of pretraining end among both."""

POSITIONS = 128
"""What the models with rotary positions were made for, if nothing else is said."""

REFERENCE = Path(__file__).parent / "reference.npz"

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A name like `llama-00-llama3`, what config.json holds, and a seed for weights and prompt."""

    name: str
    config: Config
    seed: int

    @property
    def prompt(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Int32 [PROMPT]."""
        random = np.random.default_rng([self.seed, 0])
        return random.integers(0, self.config["vocab_size"], PROMPT, dtype=np.int32)

    @property
    def switch(self) -> int | None:
        """The longest text that transformers turns by LongRoPE's short factors, if this one passes it."""
        parameters = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if "long_factor" not in parameters:
            return None
        context: int = {**parameters, **self.config}["original_max_position_embeddings"]
        return context if PROMPT <= context < PROMPT + STEPS else None

    def write(self, directory: Path) -> None:
        """Writes the checkpoint as torch's save_pretrained would."""
        tensors = {name: self.values(name, each) for name, each in self.tensor_shapes.items()}
        write_checkpoint(directory, self.config, tensors)

    def values(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Values large enough that each part of the model shows in the logits, and no larger.

        With larger projections attention is so sharp that float32 does not determine the logits to 1e-4.
        """
        values = noise(self.seed, name, shape)
        if len(shape) >= 2:
            embedding = shape[0] in _VOCABULARIES
            return values * np.float32(0.5 if embedding else min(0.25, 1.5 / max(shape) ** 0.5))
        one = np.float32(name.endswith(("weight", "layer_scalar")))
        return np.asarray(values * np.float32(0.2) + one)

    @property
    def tensor_shapes(self) -> Shapes:
        """Of the tensors that torch publishes for the configuration."""
        return shapes_of(self.config)


def write_checkpoint(directory: Path, config: Config, tensors: dict[str, Any]) -> None:
    """Writes config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def cases() -> tuple[Case, ...]:
    made = []
    for stream, (family, kind, count, ropes, change) in enumerate(_FAMILIES, 1):
        for number in range(count):
            rope = [ropes[number % len(ropes)]] if ropes else []
            name = "-".join([family.removesuffix("_text"), f"{number:02}", *rope])
            random = np.random.default_rng([stream, number])
            config = {
                "model_type": family,
                "architectures": [kind],
                **change(number, random, *rope),
            }
            made.append(Case(name, config, _SEEDS.get(name, 100 * stream + number)))
    return tuple(made)


_SEEDS = {
    "gpt2-06": 1106,
    "llama-13-linear": 1213,
    "qwen3-00-default": 1500,
    "gemma3-07": 2707,
    "phi3-04-longrope": 1804,
}
"""Of cases where, with the seed of their number, rounding would decide a token: see record.py."""


_VOCABULARIES = [29, 31, 37, 41]
ACTIVATIONS = ["silu", "gelu", "relu", "gelu_pytorch_tanh"]


def _gpt2(number: int, random: np.random.Generator) -> Config:
    heads, head_size = pick(random, [1, 2, 3, 5, 7]), pick(random, [2, 3, 4, 7, 8])
    activations = ["gelu_new", "gelu", "relu", "silu", "gelu_pytorch_tanh"]
    return {
        "vocab_size": pick(random, _VOCABULARIES),
        "n_positions": pick(random, [PROMPT + STEPS, 96, 107]),
        **{"n_embd": heads * head_size, "n_head": heads, "n_layer": pick(random, [1, 2])},
        "n_inner": pick(random, [None, 11, 32]),
        "activation_function": activations[number % 5],
        "layer_norm_epsilon": pick(random, [1e-5, 1e-6, 1e-3]),
        **{"scale_attn_weights": number % 4 != 1, "tie_word_embeddings": number % 3 != 0},
        "scale_attn_by_inverse_layer_idx": number % 4 == 2,
        "reorder_and_upcast_attn": number % 4 == 3,
    }


def common_sizes(random: np.random.Generator, *, even: bool = False) -> Config:
    """What the configurations of all families after GPT-2 have in common."""
    kv_heads, groups = pick(random, [1, 2, 3]), pick(random, [1, 2, 3, 5])
    heads = kv_heads * groups
    # transformers wants the width to be a multiple of the heads, even where head_dim is given
    width = heads * pick(random, [4, 6] if even else [3, 4, 6])
    return {
        "vocab_size": pick(random, _VOCABULARIES),
        "hidden_size": width,
        "intermediate_size": pick(random, [13, 24, 40]),
        "num_hidden_layers": pick(random, [1, 2]),
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads},
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": pick(random, [1e-5, 1e-6]),
    }


def _llama(number: int, random: np.random.Generator, rope: str) -> Config:
    sizes = common_sizes(random)
    given = sizes["hidden_size"] // sizes["num_attention_heads"]
    head_size = pick(random, [4, 6, 10]) if given % 2 or number % 2 else given
    return {
        **sizes,
        "hidden_act": pick(random, ACTIVATIONS),
        "attention_bias": number % 3 == 1,
        "mlp_bias": number % 4 == 1,
        "tie_word_embeddings": number % 2 == 0,
        **rope_keys(rope, number // 6, random, head_size // 2),
        **({} if head_size == given else {"head_dim": head_size}),
    }


def _mistral(number: int, random: np.random.Generator, rope: str) -> Config:
    return {
        **common_sizes(random, even=True),
        "hidden_act": pick(random, ACTIVATIONS),
        # shorter than the prompt, ending while decoding, longer than all, none
        "sliding_window": [5, 1, 30, 200, None][number % 5],
        "tie_word_embeddings": number % 3 == 2,
        **rope_keys(rope, number // 3, random),
        **({"head_dim": pick(random, [4, 6, 10])} if number % 2 else {}),
    }


def _qwen2(number: int, random: np.random.Generator, rope: str) -> Config:
    return {
        **common_sizes(random, even=True),
        "hidden_act": pick(random, ACTIVATIONS),
        "tie_word_embeddings": number % 2 == 0,
        **_layers(number, random),
        **rope_keys(rope, number // 3, random),
    }


def _qwen3(number: int, random: np.random.Generator, rope: str) -> Config:
    return {
        **common_sizes(random),
        "head_dim": pick(random, [4, 6, 10]),
        "hidden_act": pick(random, ACTIVATIONS),
        "attention_bias": number % 3 == 1,
        "tie_word_embeddings": number % 2 == 0,
        **_layers(number, random),
        **rope_keys(rope, number // 4, random),
    }


def _layers(number: int, random: np.random.Generator) -> Config:
    """Windows in some layers, in each of the ways to say so; a window that is not used in the others."""
    kinds = ["sliding_attention", "full_attention"]
    ways: list[Config] = [
        {"use_sliding_window": False},
        {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1},
        {"num_hidden_layers": 2, "use_sliding_window": True, "layer_types": kinds},
    ]
    return {**ways[number % 3], "sliding_window": pick(random, [4, 9, 40])}


def _gemma(number: int, random: np.random.Generator) -> Config:
    """What Gemma 2 and 3 have in common."""
    return {
        **common_sizes(random),
        "head_dim": pick(random, [4, 6, 10]),
        "num_hidden_layers": 2 + number % 2,
        "hidden_activation": pick(random, ["gelu_pytorch_tanh", "silu"]),
        "query_pre_attn_scalar": pick(random, [4, 9, 24]),
        "sliding_window": [5, 20, 1, 50][number % 4],
        "attention_bias": number % 4 == 1,
        "final_logit_softcapping": [20.0, 50.0, None][number % 3],
        "tie_word_embeddings": number % 5 != 0,
    }


def _gemma2(number: int, random: np.random.Generator) -> Config:
    config = {
        **_gemma(number, random),
        "attn_logit_softcapping": [1.5, 5.0, 50.0, None][number % 4],
        **rope_keys("default" if number % 3 else "linear", number, random),
    }
    if number % 4 == 3:
        kinds = ["full_attention", "sliding_attention", "full_attention"]
        config["layer_types"] = kinds[: config["num_hidden_layers"]]
    return config


def _gemma3(number: int, random: np.random.Generator) -> Config:
    config = _gemma(number, random)
    near, far = pick(random, [50.0, 1000.0]), pick(random, [10000.0, 1000000.0])
    if number % 3 == 0:  # as files of transformers 4 say it
        config |= {"rope_theta": far, "rope_local_base_freq": near, "sliding_window_pattern": 2}
    else:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config["layer_types"] = kinds[: config["num_hidden_layers"]]
        scaled = {"rope_type": "linear", "factor": 8.0} if number % 3 == 1 else {}
        config["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": far, **scaled},
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        }
    if number % 3 == 0 and number % 2:
        config["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    return config


def _phi3(number: int, random: np.random.Generator, rope: str) -> Config:
    sizes = common_sizes(random)
    head_size = pick(random, [4, 8, 16])
    partial = pick(random, [0.5, 0.75, 1.0] if head_size > 4 else [0.5, 1.0])
    config = {
        **sizes,
        "hidden_size": head_size * sizes["num_attention_heads"],
        "hidden_act": pick(random, ACTIVATIONS),
        "sliding_window": [None, 7, 45][number % 3],
        "tie_word_embeddings": number % 4 == 1,
        "partial_rotary_factor": partial,
        "pad_token_id": 0,
        **rope_keys(rope, number // 2, random, int(head_size * partial) // 2),
    }
    if rope == "longrope":  # which Phi-3 says beside its other settings
        key = "original_max_position_embeddings"
        scaling = config.get("rope_parameters") or config["rope_scaling"]
        config[key] = scaling.pop(key)
        if "rope_scaling" in config:
            scaling["type"] = scaling.pop("rope_type")
    return config


_FAMILIES: tuple[tuple[str, str, int, tuple[str, ...], Callable[..., Config]], ...] = (
    ("gpt2", "GPT2LMHeadModel", 12, (), _gpt2),
    (
        *("llama", "LlamaForCausalLM", 24),
        ("default", "linear", "llama3", "dynamic", "yarn", "longrope"),
        _llama,
    ),
    ("mistral", "MistralForCausalLM", 10, ("default", "linear", "yarn"), _mistral),
    ("qwen2", "Qwen2ForCausalLM", 10, ("default", "yarn", "dynamic"), _qwen2),
    ("qwen3", "Qwen3ForCausalLM", 10, ("default", "linear", "yarn", "llama3"), _qwen3),
    ("gemma2", "Gemma2ForCausalLM", 10, (), _gemma2),
    ("gemma3_text", "Gemma3ForCausalLM", 12, (), _gemma3),
    ("phi3", "Phi3ForCausalLM", 14, ("longrope", "default"), _phi3),
)
"""model_type, transformers' class, how many cases, the kinds of rotary positions in turns, the keys."""


def rope_keys(
    kind: str, variant: int, random: np.random.Generator, pairs: int | None = None
) -> Config:
    """The keys of config.json, as files of transformers 4 (rope_scaling) or 5 (rope_parameters) say it."""
    theta = pick(random, [100.0, 10000.0, 500000.0])
    scaling: Config = {"rope_type": kind}
    if kind not in ("default", "longrope"):
        scaling["factor"] = pick(random, [2.0, 4.0, 8.0])
    if kind == "llama3":
        # 8: the prompt goes beyond it; 48: decoding does
        scaling["original_max_position_embeddings"] = 8 if variant % 2 else 48
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": pick(random, [2.0, 4.0])}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = pick(random, [8, 32])
        variants: list[Config] = [
            *({}, {"attention_factor": 0.8}, {"beta_fast": 8.0, "beta_slow": 2.0}),
            *({"mscale": 0.7, "mscale_all_dim": 1.2}, {"truncate": False}),
        ]
        scaling |= variants[variant % 5]
    if kind == "longrope":
        assert pairs is not None
        scaling |= {
            "short_factor": random.uniform(1, 2, pairs).round(3).tolist(),
            "long_factor": random.uniform(2, 9, pairs).round(3).tolist(),
            # the prompt goes beyond it, decoding does, nothing does
            "original_max_position_embeddings": [8, 40, 100][variant % 3],
            **[{}, {"factor": 4.0}, {"attention_factor": 1.1}, {}][variant % 4],
        }
    if variant % 2 == 0:
        return {"rope_parameters": {"rope_theta": theta, **scaling}}
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}


def shapes_of(config: Config) -> Shapes:
    """Of the tensors that torch publishes for a configuration."""
    return (_gpt2_shapes if config["model_type"] == "gpt2" else _llama_shapes)(config)


def _gpt2_shapes(config: Config) -> Shapes:
    width, inner = config["n_embd"], config["n_inner"] or 4 * config["n_embd"]
    shapes: Shapes = {
        "transformer.wte.weight": (config["vocab_size"], width),
        "transformer.wpe.weight": (config["n_positions"], width),
        **norm("transformer.ln_f", width),
    }
    matrices = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}  # Conv1D
    matrices |= {"mlp.c_fc": (width, inner), "mlp.c_proj": (inner, width)}
    for layer in range(config["n_layer"]):
        block = f"transformer.h.{layer}"
        shapes |= norm(f"{block}.ln_1", width) | norm(f"{block}.ln_2", width)
        for name, shape in matrices.items():
            shapes |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[1:]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return shapes


def _llama_shapes(config: Config) -> Shapes:
    """Of every family whose projections are Llama's, and of Phi-3, which joins some of them."""
    family, heads = config["model_type"], config["num_attention_heads"]
    width, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim", width // heads)
    queries, keys = heads * size, config["num_key_value_heads"] * size
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family.startswith("gemma"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    of_heads = ["self_attn.q_norm", "self_attn.k_norm"] * (family in ("qwen3", "gemma3_text"))
    block: Shapes = dict.fromkeys(norms, (width,)) | dict.fromkeys(of_heads, (size,))
    if family == "phi3":
        attention: Shapes = {"self_attn.qkv_proj": (queries + 2 * keys, width)}
        mlp: Shapes = {"mlp.gate_up_proj": (2 * inner, width)}
    else:
        attention = {"self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width)}
        attention["self_attn.v_proj"] = (keys, width)
        mlp = {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    output, mlp["mlp.down_proj"] = {"self_attn.o_proj": (width, queries)}, (width, inner)
    bias = config.get("attention_bias", False)
    biased = [*attention] if bias or family == "qwen2" else []
    biased += [*output] * bias + [*mlp] * config.get("mlp_bias", False)
    block |= attention | output | mlp
    shapes: Shapes = {"model.norm.weight": (width,)}
    for name in ("model.embed_tokens", "lm_head")[: 2 - config["tie_word_embeddings"]]:
        shapes[f"{name}.weight"] = (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}.weight": shape for name, shape in block.items()}
        shapes |= {f"{at}.{name}.bias": block[name][:1] for name in biased}
    return shapes


def norm(name: str, width: int) -> Shapes:
    """Shapes of a layer norm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def linear(name: str, inputs: int, outputs: int) -> Shapes:
    """Shapes of a linear layer with a bias."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def noise(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normal values of the tensor of a name, the same wherever they are drawn."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return random.standard_normal(shape, dtype=np.float32)


def pick(random: np.random.Generator, options: list[Any]) -> Any:
    return options[random.integers(len(options))]
