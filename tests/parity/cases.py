"""Small random GPT-2 and Llama checkpoints, the same wherever they are made. No JAX, no torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PROMPT, TOTAL = 17, 24
"""Tokens of the prompt, and with those that are decoded after it: longer than any original context."""

REFERENCE = Path(__file__).parent / "reference.npz"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A configuration with a seed for its weights.

    Attributes:
        name: `gpt2-07`, `llama-00-llama3`.
        config: of config.json.
        seed: of weights and tokens.
    """

    name: str
    config: dict[str, Any]
    seed: int

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Int32 [TOTAL]."""
        random = np.random.default_rng([self.seed, 0])
        return random.integers(0, self.config["vocab_size"], TOTAL, dtype=np.int32)

    def write(self, directory: Path) -> None:
        """Writes the checkpoint as torch's save_pretrained would."""
        shapes = (_gpt2_shapes if self.config["model_type"] == "gpt2" else _llama_shapes)(
            self.config
        )
        tensors = {name: _values(name, shape, self.seed) for name, shape in shapes.items()}
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config, indent=1))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def cases() -> tuple[Case, ...]:
    """All of them, in a fixed order."""
    return (*_gpt2(20), *_llama(25))


def _gpt2(count: int) -> Iterator[Case]:
    activations = cycle(["gelu_new", "gelu", "relu", "silu", "gelu_pytorch_tanh"])
    for number, activation in enumerate(islice(activations, count)):
        random = np.random.default_rng([1, number])
        heads, head_size = _pick(random, [1, 2, 3, 5, 7]), _pick(random, [2, 3, 4, 7, 8])
        config = {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": _pick(random, [61, 64, 83, 97]),
            "n_positions": _pick(random, [TOTAL, 32, 41]),
            "n_embd": heads * head_size,
            "n_head": heads,
            "n_layer": _pick(random, [1, 2]),
            "n_inner": _pick(random, [None, 11, 32]),
            "activation_function": activation,
            "layer_norm_epsilon": _pick(random, [1e-5, 1e-6, 1e-3]),
            "scale_attn_weights": number % 4 != 1,
            "scale_attn_by_inverse_layer_idx": number % 4 == 2,
            "reorder_and_upcast_attn": number % 4 == 3,
            "tie_word_embeddings": number % 3 != 0,
        }
        yield Case(f"gpt2-{number:02}", config, 100 + number)


def _llama(count: int) -> Iterator[Case]:
    ropes = cycle(["default", "linear", "llama3", "dynamic", "yarn"])
    for number, rope in enumerate(islice(ropes, count)):
        random = np.random.default_rng([2, number])
        kv_heads, groups = _pick(random, [1, 2, 3]), _pick(random, [1, 2, 3, 5])
        heads = kv_heads * groups
        # transformers wants the width to be a multiple of the heads, even where head_dim is given
        width = heads * _pick(random, [3, 4, 6])
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": _pick(random, [61, 64, 83, 97]),
            "hidden_size": width,
            "head_dim": _pick(random, [4, 6, 10]) if width // heads % 2 or number % 2 else None,
            "intermediate_size": _pick(random, [13, 24, 40]),
            "num_hidden_layers": _pick(random, [1, 2]),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 64,
            "rms_norm_eps": _pick(random, [1e-5, 1e-6]),
            "hidden_act": _pick(random, ["silu", "gelu", "relu", "gelu_pytorch_tanh"]),
            "attention_bias": number % 3 == 1,
            "mlp_bias": number % 4 == 1,
            "tie_word_embeddings": number % 2 == 0,
            **_rope(rope, number // 5, random),
        }
        config = {key: value for key, value in config.items() if value is not None}
        yield Case(f"llama-{number:02}-{rope}", config, 200 + number)


def _rope(kind: str, variant: int, random: np.random.Generator) -> dict[str, Any]:
    """The keys of config.json, as files of transformers 4 (rope_scaling) or 5 (rope_parameters) say it."""
    theta = _pick(random, [100.0, 10000.0, 500000.0])
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        scaling["factor"] = _pick(random, [2.0, 4.0, 8.0])
    if kind == "llama3":
        # 8: prompt and decoding go beyond the original context; 48: they stay within it
        scaling["original_max_position_embeddings"] = 8 if variant % 2 else 48
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": _pick(random, [2.0, 4.0])}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _pick(random, [8, 32])
        scaling |= [
            {},
            {"attention_factor": 0.8},
            {"beta_fast": 8.0, "beta_slow": 2.0},
            {"mscale": 0.7, "mscale_all_dim": 1.2},
            {"truncate": False},
        ][variant % 5]
    if variant % 2 == 0:
        return {"rope_parameters": {"rope_theta": theta, **scaling}}
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}


def _gpt2_shapes(config: dict[str, Any]) -> Shapes:
    width, inner = config["n_embd"], config["n_inner"] or 4 * config["n_embd"]
    shapes: Shapes = {
        "transformer.wte.weight": (config["vocab_size"], width),
        "transformer.wpe.weight": (config["n_positions"], width),
        **_norm("transformer.ln_f", width),
    }
    for layer in range(config["n_layer"]):
        block = f"transformer.h.{layer}"
        shapes |= _norm(f"{block}.ln_1", width) | _norm(f"{block}.ln_2", width)
        for name, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, inner),
            ("mlp.c_proj", inner, width),
        ):
            shapes[f"{block}.{name}.weight"] = (inputs, outputs)  # Conv1D
            shapes[f"{block}.{name}.bias"] = (outputs,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return shapes


def _llama_shapes(config: dict[str, Any]) -> Shapes:
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim", width // heads)
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        shapes[f"{block}.input_layernorm.weight"] = (width,)
        shapes[f"{block}.post_attention_layernorm.weight"] = (width,)
        for name, inputs, outputs, bias in (
            ("self_attn.q_proj", width, heads * head_size, config["attention_bias"]),
            ("self_attn.k_proj", width, kv_heads * head_size, config["attention_bias"]),
            ("self_attn.v_proj", width, kv_heads * head_size, config["attention_bias"]),
            ("self_attn.o_proj", heads * head_size, width, config["attention_bias"]),
            ("mlp.gate_proj", width, inner, config["mlp_bias"]),
            ("mlp.up_proj", width, inner, config["mlp_bias"]),
            ("mlp.down_proj", inner, width, config["mlp_bias"]),
        ):
            shapes[f"{block}.{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{block}.{name}.bias"] = (outputs,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return shapes


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Values large enough that each part of the model shows in the logits."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = random.standard_normal(shape, dtype=np.float32)
    if len(shape) == 2:
        return values * np.float32(0.5)
    return values * np.float32(0.2) + np.float32(name.endswith("weight"))


def _pick(random: np.random.Generator, options: list[Any]) -> Any:
    return options[random.integers(len(options))]
