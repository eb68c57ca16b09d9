"""Check the type and range of every value in config.json before a model family reads it.

transformers accepts almost any number: no heads, a billion layers, a division by 0. Then the code of a
family or XLA fails somewhere, or the build makes a bundle that generates nonsense. So the values that
families read are checked twice: in the file, before transformers computes with them, and in the configuration
that transformers completes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prejit.compiler.base.suggestions import shown
from prejit.runtime.errors import CheckpointError

MAX_LAYERS = 1000
"""Maximum number of layers. Each is traced and compiled; published models have up to 126."""

_HINT = "correct config.json, or take the one that was published with the weights"


@dataclass(frozen=True)
class _Number:
    """A number from `low` to `high`, an integer if `whole`, or null if `optional`."""

    low: float
    high: float
    optional: bool = False
    whole: bool = False

    def __str__(self) -> str:
        low, high = (str(n) if self.whole else f"{n:g}" for n in (self.low, self.high))
        kind = "an integer" if self.whole else "a number"
        return f"{kind} from {low} to {high}{' or null' if self.optional else ''}"

    def allows(self, value: Any) -> bool:
        """Return whether a value is such a number; NaN is not."""
        types: tuple[type, ...] = (int,) if self.whole else (int, float)
        return type(value) in types and self.low <= value <= self.high


_integer = partial(_Number, whole=True)


@dataclass(frozen=True)
class _Type:
    """A value of one of Python's types, or null if `optional`."""

    kind: type
    optional: bool = False

    def __str__(self) -> str:
        name = {bool: "true or false", str: "a text", dict: "an object"}[self.kind]
        return f"{name}{' or null' if self.optional else ''}"

    def allows(self, value: Any) -> bool:
        """Return whether a value has the type."""
        return type(value) is self.kind


@dataclass(frozen=True)
class _List:
    """A list of values that `item` allows, or null if `optional`."""

    item: _Number | _Type
    optional: bool = False

    def __str__(self) -> str:
        return f"a list, each {self.item}{' or null' if self.optional else ''}"

    def allows(self, value: Any) -> bool:
        """Return whether a value is such a list."""
        return isinstance(value, list | tuple) and all(map(self.item.allows, value))


_Check = _Number | _Type | _List

_LARGEST = 2**31 - 1
_WIDTH = _integer(1, 2**20)
_INNER = _integer(1, 2**22)
_HEADS = _integer(1, 2**14)
_LAYERS = _integer(1, MAX_LAYERS)
_VOCABULARY = _integer(1, 2**24)
_POSITIONS = _integer(1, _LARGEST)
_BOOL = _Type(bool)
_TEXT = _Type(str)
# Within these bounds the numbers and their squares are normal float32 numbers.
_EPSILON = _Number(1e-30, 1.0)
_SCALE = _Number(1e-6, 1e12)
_FACTOR = _Number(1e-6, 1e9)

_ROTARY: Mapping[str, _Check] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "max_position_embeddings": _POSITIONS,
    "rms_norm_eps": _EPSILON,
    "tie_word_embeddings": _BOOL,
    "rope_parameters": _Type(dict),
}
_HEAD_SIZE: Mapping[str, _Check] = {"head_dim": _integer(1, 2**14, optional=True)}
# The family checks which windows and kinds of layers it supports.
_WINDOW: Mapping[str, _Check] = {"sliding_window": _integer(0, _LARGEST, optional=True)}
_LAYER_TYPES: Mapping[str, _Check] = {"layer_types": _List(_TEXT)}
_ACTIVATION: Mapping[str, _Check] = {"hidden_act": _TEXT}
_BIAS: Mapping[str, _Check] = {"attention_bias": _BOOL}
_QWEN: Mapping[str, _Check] = {
    "use_sliding_window": _BOOL,
    "max_window_layers": _integer(0, _LARGEST),
}
_GEMMA: Mapping[str, _Check] = {
    **{**_ROTARY, **_HEAD_SIZE, **_WINDOW, **_LAYER_TYPES, **_BIAS},
    "hidden_activation": _TEXT,
    "query_pre_attn_scalar": _SCALE,
    "final_logit_softcapping": _Number(1e-6, 1e12, optional=True),
    "attn_logit_softcapping": _Number(1e-6, 1e12, optional=True),
}
_BERT: Mapping[str, _Check] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "max_position_embeddings": _INNER,
    "type_vocab_size": _VOCABULARY,
    "layer_norm_eps": _EPSILON,
    "hidden_act": _TEXT,
}
_FAMILIES: Mapping[str, Mapping[str, _Check]] = {
    "gpt2": {
        "vocab_size": _VOCABULARY,
        "n_positions": _INNER,
        "n_embd": _WIDTH,
        "n_head": _HEADS,
        "n_layer": _LAYERS,
        "n_inner": _integer(1, 2**22, optional=True),
        "layer_norm_epsilon": _EPSILON,
        "activation_function": _TEXT,
        "tie_word_embeddings": _BOOL,
        "scale_attn_weights": _BOOL,
        "scale_attn_by_inverse_layer_idx": _BOOL,
    },
    "llama": {**_ROTARY, **_HEAD_SIZE, **_ACTIVATION, **_BIAS, "mlp_bias": _BOOL},
    "mistral": {**_ROTARY, **_HEAD_SIZE, **_ACTIVATION, **_WINDOW},
    "phi3": {**_ROTARY, **_HEAD_SIZE, **_ACTIVATION, **_WINDOW},
    "qwen2": {**_ROTARY, **_HEAD_SIZE, **_ACTIVATION, **_WINDOW, **_LAYER_TYPES, **_QWEN},
    "qwen3": {**_ROTARY, **_HEAD_SIZE, **_ACTIVATION, **_WINDOW, **_LAYER_TYPES, **_QWEN, **_BIAS},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "whisper": {
        "vocab_size": _VOCABULARY,
        "num_mel_bins": _WIDTH,
        "d_model": _WIDTH,
        "encoder_layers": _LAYERS,
        "encoder_attention_heads": _HEADS,
        "encoder_ffn_dim": _INNER,
        "decoder_layers": _LAYERS,
        "decoder_attention_heads": _HEADS,
        "decoder_ffn_dim": _INNER,
        "max_source_positions": _INNER,
        "max_target_positions": _INNER,
        "activation_function": _TEXT,
        "tie_word_embeddings": _BOOL,
    },
    "t5": {
        "vocab_size": _VOCABULARY,
        "d_model": _WIDTH,
        "d_kv": _integer(1, 2**14),
        "d_ff": _INNER,
        "num_layers": _LAYERS,
        "num_decoder_layers": _LAYERS,
        "num_heads": _HEADS,
        # Each of two directions has a bucket for the distance 0 and one for larger distances.
        "relative_attention_num_buckets": _integer(4, 2**16),
        "relative_attention_max_distance": _integer(1, 2**20),
        "layer_norm_epsilon": _EPSILON,
        "feed_forward_proj": _TEXT,
        "dense_act_fn": _TEXT,
        "is_gated_act": _BOOL,
        "is_encoder_decoder": _BOOL,
        "tie_word_embeddings": _BOOL,
        "scale_decoder_outputs": _BOOL,
    },
    "bert": _BERT,
    "roberta": {**_BERT, "pad_token_id": _integer(0, 2**22)},
    "distilbert": {
        "vocab_size": _VOCABULARY,
        "dim": _WIDTH,
        "hidden_dim": _INNER,
        "n_layers": _LAYERS,
        "n_heads": _HEADS,
        "max_position_embeddings": _INNER,
        "activation": _TEXT,
    },
}
"""The keys that the family of each model_type reads, with the check of each value."""

_ROPE: Mapping[str, _Check] = {
    "rope_theta": _SCALE,
    "partial_rotary_factor": _Number(1e-6, 1.0, optional=True),
}
_PRETRAINED = _integer(2, _LARGEST)
_ROPE_KINDS: Mapping[str, Mapping[str, _Check]] = {
    "linear": {"factor": _FACTOR},
    "llama3": {
        "factor": _FACTOR,
        "original_max_position_embeddings": _PRETRAINED,
        "low_freq_factor": _FACTOR,
        "high_freq_factor": _FACTOR,
    },
    "yarn": {
        "factor": _Number(1e-6, 1e9, optional=True),
        "original_max_position_embeddings": _PRETRAINED,
        "attention_factor": _Number(1e-6, 1e9, optional=True),
        "mscale": _Number(0, 1e9, optional=True),
        "mscale_all_dim": _Number(0, 1e9, optional=True),
        "beta_fast": _Number(1e-6, 1e9, optional=True),
        "beta_slow": _Number(1e-6, 1e9, optional=True),
    },
    "longrope": {
        "factor": _Number(1e-6, 1e9, optional=True),
        "original_max_position_embeddings": _PRETRAINED,
        "attention_factor": _Number(1e-6, 1e9, optional=True),
        "short_factor": _List(_FACTOR),
        "long_factor": _List(_FACTOR),
    },
}
"""The keys of `rope_parameters` that rope.py reads, with the check of each value, by rope_type."""


def check_file(
    file: Path,
    content: Mapping[str, Any],
    family: str,
    aliases: Mapping[str, str],
    prefix: str = "",
) -> None:
    """Check the values in a file. transformers completes a key that is missing or null.

    Args:
        file: config.json.
        content: its content, or that of the object in it at `prefix`.
        family: a supported model_type.
        aliases: other names of keys, each with the name that the family reads: transformers'
            `attribute_map`.
        prefix: prefix of keys in errors: `text_config.`.

    Raises:
        CheckpointError: a value has another type or is out of range; the error names the file, the key and
            what is allowed.
    """
    checks = _FAMILIES[family]
    for key, value in content.items():
        check = checks.get(aliases.get(key, key))
        if check is not None and value is not None and not check.allows(value):
            raise _error(file, prefix + key, check, value)
    if "rope_parameters" in checks:
        _check_present(file, prefix, content, _ROPE)
        for key in ("rope_scaling", "rope_parameters"):
            _check_file_rope(file, prefix + key, content.get(key))


def check_config(file: Path, config: Any) -> None:
    """Check a configuration as transformers completes it.

    Args:
        file: config.json.
        config: transformers' configuration of a supported family.

    Raises:
        CheckpointError: as `check_file`.
    """
    checks = _FAMILIES[config.model_type]
    _check(file, "", {key: getattr(config, key, None) for key in checks}, checks)
    if "layer_types" in checks and len(config.layer_types) != config.num_hidden_layers:
        raise CheckpointError(
            f"{file}: layer_types: expected {config.num_hidden_layers} items, which is num_hidden_layers, "
            f"found {len(config.layer_types)}",
            hint=_HINT,
        )


def check_rope(file: Path, key: str, parameters: Any, kind: str | None = None) -> None:
    """Check `rope_parameters`, or one of its parts.

    Args:
        file: config.json.
        key: the key of the parameters, for errors.
        parameters: their value.
        kind: their rope_type; None checks only the keys that all kinds have.

    Raises:
        CheckpointError: as `check_file`.
    """
    if not isinstance(parameters, dict):
        raise _error(file, key, _Type(dict), parameters)
    checks = _ROPE if kind is None else _ROPE_KINDS.get(kind, {})
    _check(file, f"{key}.", {name: parameters.get(name) for name in checks}, checks)


def _check_file_rope(file: Path, key: str, content: Any) -> None:
    """Check `rope_scaling` or `rope_parameters` of the file, which may be flat or by kinds of layers."""
    if content is None:
        return
    if not isinstance(content, dict):
        raise _error(file, key, _Type(dict, optional=True), content)
    kind = content.get("rope_type", content.get("type"))
    numbers = _ROPE_KINDS.get(kind, {}) if isinstance(kind, str) else {}
    _check_present(file, f"{key}.", content, {**_ROPE, **numbers})
    for name, part in content.items():
        if isinstance(part, dict):
            _check_file_rope(file, f"{key}.{name}", part)


def _check_present(
    file: Path, prefix: str, content: Mapping[str, Any], checks: Mapping[str, _Check]
) -> None:
    for key, check in checks.items():
        value = content.get(key)
        if value is not None and not check.allows(value):
            raise _error(file, prefix + key, check, value)


def _check(
    file: Path, prefix: str, values: Mapping[str, Any], checks: Mapping[str, _Check]
) -> None:
    for key, check in checks.items():
        value = values[key]
        if not (value is None and getattr(check, "optional", False)) and not check.allows(value):
            raise _error(file, prefix + key, check, value)


def _error(file: Path, key: str, check: _Check, value: Any) -> CheckpointError:
    return CheckpointError(f"{file}: {key}: expected {check}, found {shown(value)}", hint=_HINT)
