"""Check the type and range of every value in config.json before a model family reads it.

transformers takes most numbers as they are: models without heads, with a billion layers, or divided by 0. A
family's code and XLA then fail somewhere, or a bundle is built that writes nonsense. So what the families
read is checked here, twice: as the file says it, before transformers computes with it, and as transformers
completes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.base.wording import shown
from prejit.runtime.errors import CheckpointError

MAX_LAYERS = 1000
"""Largest number of layers. Each is traced and compiled; published models have up to 126."""

_HINT = "correct config.json, or take the one that was published with the weights"


@dataclass(frozen=True)
class _Int:
    """An integer from `low` to `high`, or null where `optional`."""

    low: int
    high: int
    optional: bool = False

    def __str__(self) -> str:
        return f"an integer from {self.low} to {self.high}{' or null' if self.optional else ''}"

    def allows(self, value: Any) -> bool:
        """Whether a value is such a number."""
        return type(value) is int and self.low <= value <= self.high


@dataclass(frozen=True)
class _Number:
    """A number from `low` to `high`, or null where `optional`."""

    low: float
    high: float
    optional: bool = False

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}{' or null' if self.optional else ''}"

    def allows(self, value: Any) -> bool:
        """Whether a value is such a number; NaN is none."""
        return type(value) in (int, float) and self.low <= value <= self.high


@dataclass(frozen=True)
class _Type:
    """A value of one of Python's types, or null where `optional`."""

    kind: type
    optional: bool = False

    def __str__(self) -> str:
        name = {bool: "true or false", str: "a text", dict: "an object"}[self.kind]
        return f"{name}{' or null' if self.optional else ''}"

    def allows(self, value: Any) -> bool:
        """Whether a value has the type."""
        return type(value) is self.kind


@dataclass(frozen=True)
class _List:
    """A list of what `item` allows, or null where `optional`."""

    item: _Number | _Type
    optional: bool = False

    def __str__(self) -> str:
        return f"a list, each {self.item}{' or null' if self.optional else ''}"

    def allows(self, value: Any) -> bool:
        """Whether a value is such a list."""
        return isinstance(value, list | tuple) and all(map(self.item.allows, value))


_Check = _Int | _Number | _Type | _List

_LARGEST = 2**31 - 1
_WIDTH = _Int(1, 2**20)
_INNER = _Int(1, 2**22)
_HEADS = _Int(1, 2**14)
_LAYERS = _Int(1, MAX_LAYERS)
_VOCABULARY = _Int(1, 2**24)
_POSITIONS = _Int(1, _LARGEST)
_BOOL = _Type(bool)
_TEXT = _Type(str)
# The bounds of other numbers keep them, and their squares, normal float32 numbers.
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
_HEAD_SIZE: Mapping[str, _Check] = {"head_dim": _Int(1, 2**14, optional=True)}
# A family says itself which windows and kinds of layers it builds.
_WINDOW: Mapping[str, _Check] = {"sliding_window": _Int(0, _LARGEST, optional=True)}
_LAYER_TYPES: Mapping[str, _Check] = {"layer_types": _List(_TEXT)}
_ACTIVATION: Mapping[str, _Check] = {"hidden_act": _TEXT}
_BIAS: Mapping[str, _Check] = {"attention_bias": _BOOL}
_QWEN: Mapping[str, _Check] = {
    "use_sliding_window": _BOOL,
    "max_window_layers": _Int(0, _LARGEST),
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
        "n_inner": _Int(1, 2**22, optional=True),
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
    "bert": _BERT,
    "roberta": {**_BERT, "pad_token_id": _Int(0, 2**22)},
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
"""The keys that each model_type's family reads, and what their values must be."""

_ROPE: Mapping[str, _Check] = {
    "rope_theta": _SCALE,
    "partial_rotary_factor": _Number(1e-6, 1.0, optional=True),
}
_PRETRAINED = _Int(2, _LARGEST)
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
"""The keys of `rope_parameters` that rope.py reads, by rope_type."""


def check_file(
    file: Path, said: Mapping[str, Any], family: str, aliases: Mapping[str, str], prefix: str = ""
) -> None:
    """Check what a file says itself. A key that is missing or null is left to transformers.

    Args:
        file: config.json.
        said: its content, or that of the object in it at `prefix`.
        family: model_type, one that is built here.
        aliases: other names of keys, each with the one that the family reads: transformers'
            `attribute_map`.
        prefix: of keys in errors: `text_config.`.

    Raises:
        CheckpointError: a value has another type or lies out of range; names the file, the key, and what
            is allowed.
    """
    checks = _FAMILIES[family]
    for key, value in said.items():
        check = checks.get(aliases.get(key, key))
        if check is not None and value is not None and not check.allows(value):
            raise _error(file, prefix + key, check, value)
    if "rope_parameters" in checks:
        _check_said(file, prefix, said, _ROPE)
        for key in ("rope_scaling", "rope_parameters"):
            _check_rope_said(file, prefix + key, said.get(key))


def check_config(file: Path, config: Any) -> None:
    """Check a configuration as transformers completes it.

    Args:
        file: config.json.
        config: of transformers, of a family that is built here.

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
    """Check how heads turn: `rope_parameters`, or one of its parts.

    Args:
        file: config.json.
        key: of the parameters, for errors.
        parameters: what is found there.
        kind: its rope_type; None: only what all kinds have.

    Raises:
        CheckpointError: as `check_file`.
    """
    if not isinstance(parameters, dict):
        raise _error(file, key, _Type(dict), parameters)
    checks = _ROPE if kind is None else _ROPE_KINDS.get(kind, {})
    _check(file, f"{key}.", {name: parameters.get(name) for name in checks}, checks)


def _check_rope_said(file: Path, key: str, said: Any) -> None:
    """Check `rope_scaling` or `rope_parameters` as the file has them: flat, or by kinds of layers."""
    if said is None:
        return
    if not isinstance(said, dict):
        raise _error(file, key, _Type(dict, optional=True), said)
    kind = said.get("rope_type", said.get("type"))
    numbers = _ROPE_KINDS.get(kind, {}) if isinstance(kind, str) else {}
    _check_said(file, f"{key}.", said, {**_ROPE, **numbers})
    for name, part in said.items():
        if isinstance(part, dict):
            _check_rope_said(file, f"{key}.{name}", part)


def _check_said(
    file: Path, prefix: str, said: Mapping[str, Any], checks: Mapping[str, _Check]
) -> None:
    for key, check in checks.items():
        value = said.get(key)
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
