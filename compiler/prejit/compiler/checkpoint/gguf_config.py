"""Make config.json from the metadata of a GGUF file, as llama.cpp reads it, or compare both.

A key that this module does not know may change what the model computes, so it is an error. llama.cpp has two
values that the file lacks, by the number of layers, and the activations by architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prejit.compiler.base.suggestions import shown
from prejit.runtime.base.wording import few
from prejit.runtime.errors import CheckpointError

BESIDE = "put config.json and tokenizer.json beside the file, those of the checkpoint that it was made from"
MODEL_TYPES = {
    **{name: name for name in ("gemma", "gemma2", "llama", "phi3", "qwen2", "qwen3")},
    "gemma3": "gemma3_text",
}
"""The model_type for each architecture of llama.cpp. Mistral is a llama there."""
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_KEY_HEADS = ("attention.head_count_kv", "num_key_value_heads")
_SCALING = ("type", "factor", "original_context_length", "finetuned")
_READ = {
    *_SIZES,
    *(_KEY_HEADS[0], "attention.key_length", "attention.value_length", "vocab_size"),
    *("rope.dimension_count", "rope.freq_base", *(f"rope.scaling.{key}" for key in _SCALING)),
}
_WINDOW, _WINDOWS, _BASE_SWA = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_READ_OF = {
    "gemma2": {_WINDOW, *_CAPS},
    "gemma3": {_WINDOW, _WINDOWS, _BASE_SWA, "final_logit_softcapping"},
    "phi3": {_WINDOW, "rope.scaling.attn_factor"},
}
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that follow from config.json."""
_EXPERTS = ("expert_count", "expert_used_count")
_MOST_LAYERS_BY_HEAD = {"gemma2": 46, "gemma3": 62}
"""The layers of the largest model, which scales queries as if its heads filled its width."""
_GEMMA3_PERIOD = 6
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""RoPE settings of all published Llama 3.1 to 3.3. A GGUF file holds the factors that they lead to."""


def config_of(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of config.json.

    Raises:
        CheckpointError: the file's architecture, or a value of it, is not supported here.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
        raise unsupported(
            f"{path}: general.architecture: expected one of {', '.join(map(shown, MODEL_TYPES))}, found "
            f"{shown(architecture)}"
        )
    start = f"{architecture}."
    said = {
        key.removeprefix(start): _short(value)
        for key, value in metadata.items()
        if key.startswith(start) and not (key.removeprefix(start) in _EXPERTS and value == 0)
    }
    read = _READ | _READ_OF.get(architecture, set())
    needed = {*_SIZES, *({_WINDOW} if architecture in ("gemma2", "gemma3") else ())}
    if unread := sorted(said.keys() - read):
        raise unsupported(f"{path}: unknown {few([start + key for key in unread], 8)}")
    if missing := sorted(needed - said.keys()):
        raise unsupported(f"{path}: missing {few([start + key for key in missing], 8)}")
    odd = [f"{start}{key}: expected a number, found {shown(value)}" for key, value in said.items()
           if key != "rope.scaling.type" and type(value) not in (int, float, bool)]  # fmt: skip
    if odd:
        raise unsupported(f"{path}: {'; '.join(odd)}")
    if "token_embd.weight" not in tensors or said["attention.head_count"] < 1:
        raise unsupported(f"{path}: expected token_embd.weight and heads of attention")
    heads = said["attention.head_count"]
    given = said["embedding_length"] // heads
    turned = said.get("rope.dimension_count")
    size = said.get("attention.key_length", turned if architecture == "llama" else given) or given
    config = {
        "model_type": MODEL_TYPES[architecture],
        **{ours: said[key] for key, ours in _SIZES.items()},
        "num_key_value_heads": said.get(_KEY_HEADS[0], heads),
        "head_dim": size,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        **_special_ids(path, metadata),
    }
    activation = "gelu_pytorch_tanh" if architecture.startswith("gemma") else "silu"
    config["hidden_activation" if architecture in ("gemma2", "gemma3") else "hidden_act"] = (
        activation
    )
    if architecture in ("gemma", "gemma2", "gemma3", "llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if architecture in ("phi3", "qwen2"):  # whose config.json has no size of heads
        del config["head_dim"]
        if size != given:
            raise unsupported(f"{path}: attention.key_length: expected {given}, found {size}")
    if said.get("attention.value_length", size) != size:
        raise unsupported(f"{path}: expected keys and values of one length")
    rope = _rope(path, said, tensors)
    if architecture == "phi3":
        config |= _phi3(path, said, rope, (turned or size) / size)
    elif rope["rope_type"] == "longrope":
        raise unsupported(
            f"{path}: rope_factors_long.weight: expected it in phi3 alone, found it in {architecture}"
        )
    elif turned not in (None, size):
        raise unsupported(f"{path}: rope.dimension_count: expected {size}, found {turned}")
    if (layers := _MOST_LAYERS_BY_HEAD.get(architecture)) is not None:
        scaled = given if said["block_count"] == layers else size
        config |= {"query_pre_attn_scalar": scaled, "sliding_window": said[_WINDOW]}
        config |= {key: said.get(key) for key in _CAPS}
    if architecture == "gemma3":
        if said.get(_WINDOWS, _GEMMA3_PERIOD) != _GEMMA3_PERIOD:
            raise unsupported(f"{path}: {_WINDOWS}: expected 6, found {said[_WINDOWS]}")
        near = {"rope_type": "default", "rope_theta": said.get(_BASE_SWA, 10000.0)}
        rope = {"full_attention": rope, "sliding_attention": near}
    return {**config, "rope_parameters": rope}


def unsupported(message: str) -> CheckpointError:
    """Return the error for what no file is made of here."""
    return CheckpointError(message, hint=BESIDE)


def _short(value: Any) -> Any:
    """Return a float32 as config.json has it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if type(value) is float else value


def _special_ids(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        name: metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "eom")
    }
    odd = [
        f"tokenizer.ggml.{name}_token_id: expected a token id, found {shown(each)}"
        for name, each in found.items()
        if each is not None and not (type(each) is int and each >= 0)
    ]
    if odd:
        raise unsupported(f"{path}: {'; '.join(odd)}")
    ends = sorted({each for name, each in found.items() if name != "bos" and each is not None})
    pad = metadata.get("tokenizer.ggml.padding_token_id")
    return {"bos_token_id": found["bos"], "eos_token_id": ends or None, "pad_token_id": pad}


def _rope(path: Path, said: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": said.get("rope.freq_base", 10000.0)}
    factor, positions = (said.get(f"rope.scaling.{key}") for key in _SCALING[1:3])
    is_scaled = (factor or 1) != 1
    kind = said.get("rope.scaling.type", "linear" if is_scaled else "none")
    if "rope_factors_long.weight" in tensors:
        long, short = (
            _factors(tensors, f"rope_factors_{each}.weight") for each in ("long", "short")
        )
        return {**rope, "rope_type": "longrope", "long_factor": long, "short_factor": short}
    factors = _factors(tensors, "rope_freqs.weight")
    scaled = any(each != 1 for each in factors)
    if kind == "none" or not is_scaled:
        return rope | (
            _llama3(path, factors, rope["rope_theta"]) if scaled else {"rope_type": "default"}
        )
    if scaled:  # llama.cpp multiplies both, which no config.json says
        raise unsupported(
            f"{path}: rope_freqs.weight: expected ones beside rope.scaling.factor {factor}, found others"
        )
    if kind == "linear":
        return {**rope, "rope_type": kind, "factor": float(factor or 1)}
    if kind == "yarn" and positions is not None:
        return {
            **rope,
            "rope_type": kind,
            "factor": float(factor or 1),
            "original_max_position_embeddings": positions,
        }
    raise unsupported(
        f'{path}: rope.scaling: expected "none", "linear" or "yarn" with its numbers, found {shown(kind)}'
    )


def _factors(tensors: Mapping[str, Any], name: str) -> list[float]:
    return [_short(float(each)) for each in np.ravel(tensors[name].data)] if name in tensors else []


def _llama3(path: Path, factors: list[float], theta: float) -> dict[str, Any]:
    """Return the settings of Llama 3's RoPE from which factors of frequencies follow."""
    low, high, positions = _LLAMA3.values()
    factor = max(factors)
    turns = positions / (2 * math.pi) * theta ** (-np.arange(len(factors)) / len(factors))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise unsupported(
            f"{path}: rope_freqs.weight: expected the factors of a Llama 3, found others"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _phi3(
    path: Path, said: Mapping[str, Any], rope: dict[str, Any], share: float
) -> dict[str, Any]:
    """Return what Phi 3 has beside others; complete its RoPE."""
    window, positions = said.get(_WINDOW), said["context_length"]
    original = said.get("rope.scaling.original_context_length", positions)
    rope["partial_rotary_factor"] = share
    if rope["rope_type"] == "longrope":
        rope["original_max_position_embeddings"] = original
        scale = math.sqrt(1 + math.log(max(1.0, positions / original)) / math.log(original))
        if not math.isclose(said.get("rope.scaling.attn_factor", scale), scale, rel_tol=1e-3):
            raise unsupported(
                f"{path}: rope.scaling.attn_factor: expected {scale:.4f}, as LongRoPE has it"
            )
    return {
        "original_max_position_embeddings": original,
        "sliding_window": window if window and window < positions else None,
    }


def check_agreement(
    path: Path, metadata: Mapping[str, Any], config: Any, tensors: Mapping[str, Any]
) -> None:
    """Check that a file says what config.json says, of what both say."""
    architecture = metadata["general.architecture"]
    start = f"{architecture}."
    said = {
        key.removeprefix(start): each for key, each in metadata.items() if key.startswith(start)
    }
    problems = [
        f"{start}{key}: expected {shown(ours)}, as config.json gives {name}; found {shown(said[key])}"
        for key, name, ours in _expected(config, said)
        if not _agree(said.get(key), ours)
    ]
    if _turning(config).get("rope_type", "default") == "default":
        problems += [
            f"{name}: expected ones, as config.json gives no scaling of RoPE; found others"
            for name in ROPE_FACTORS
            if name in tensors and (tensors[name].data != 1).any()
        ]
    if problems:
        raise CheckpointError(
            f"{path}: {'; '.join(problems)}",
            hint="config.json and the file must come from the same model",
        )


def _turning(config: Any) -> Mapping[str, Any]:
    """Return how heads turn; for Gemma 3 in the layers that llama.cpp's keys mean."""
    found: Mapping[str, Any] = config.rope_parameters or {}
    return found.get("full_attention", found)


def _expected(config: Any, said: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield keys of the file, those of config.json, and their values there."""
    for key, name in (*_SIZES.items(), _KEY_HEADS):
        if key != "context_length":  # it does not change what is computed
            yield key, name, getattr(config, name, None)
    ours = _turning(config)
    yield "rope.freq_base", "rope_theta", ours.get("rope_theta")
    kind, factor = ours.get("rope_type", "default"), said.get("rope.scaling.factor")
    if kind in ("linear", "yarn", "longrope"):
        yield "rope.scaling.type", "rope_type", kind
        name = "original_max_position_embeddings"
        yield "rope.scaling.original_context_length", name, ours.get(name)
        if kind != "longrope":
            yield "rope.scaling.factor", "factor", ours.get("factor")
    elif said.get("rope.scaling.type", "linear") != "linear" or factor not in (None, 0, 1):
        # llama.cpp has llama3 as tensors, and nothing of dynamic.
        yield "rope.scaling.type", "rope_type", "none"
        yield "rope.scaling.factor", "no factor", 1.0


def _agree(said: Any, ours: Any) -> bool:
    """Return whether a value of the file is that of config.json; None: one of them has none."""
    if said is None or ours is None:
        return True
    if isinstance(said, list):  # for each layer
        return all(_agree(each, ours) for each in said)
    if isinstance(said, str) or isinstance(ours, str):
        return bool(said == ours)
    return math.isclose(said, ours, rel_tol=1e-5)
