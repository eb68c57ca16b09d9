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
class NumberCheck:
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


integer = partial(NumberCheck, whole=True)


@dataclass(frozen=True)
class TypeCheck:
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
class ListCheck:
    """A list of values that `item` allows, or null if `optional`."""

    item: NumberCheck | TypeCheck
    optional: bool = False

    def __str__(self) -> str:
        return f"a list, each {self.item}{' or null' if self.optional else ''}"

    def allows(self, value: Any) -> bool:
        """Return whether a value is such a list."""
        return isinstance(value, list | tuple) and all(map(self.item.allows, value))


Check = NumberCheck | TypeCheck | ListCheck
Checks = Mapping[str, Check]

_LARGEST = 2**31 - 1
_WIDTH = integer(1, 2**20)
INNER = integer(1, 2**22)
"""An inner width, or the number of rows of a table of positions."""
_SIZE = integer(1, 2**14)
_LAYERS = integer(1, MAX_LAYERS)
_BOOL, _TEXT = TypeCheck(bool), TypeCheck(str)
# Within these bounds the numbers and their squares are normal float32 numbers.
_EPSILON = NumberCheck(1e-30, 1.0)
_SCALE = NumberCheck(1e-6, 1e12)
_FACTOR = NumberCheck(1e-6, 1e9)
_ANY_FACTOR = NumberCheck(1e-6, 1e9, optional=True)

_KEYS: Checks = {
    **dict.fromkeys(("vocab_size", "type_vocab_size"), integer(1, 2**24)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "num_mel_bins"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim"), INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), INNER),
    **dict.fromkeys(("n_positions", "max_source_positions", "max_target_positions"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), _SIZE),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _SIZE),
    **dict.fromkeys(("n_head", "n_heads", "d_kv"), _SIZE),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _EPSILON),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation"), _TEXT),
    **dict.fromkeys(("activation_function", "dense_act_fn", "feed_forward_proj"), _TEXT),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), _BOOL),
    **dict.fromkeys(("use_sliding_window", "scale_decoder_outputs"), _BOOL),
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx"), _BOOL),
    **dict.fromkeys(("is_gated_act", "is_encoder_decoder"), _BOOL),
    "max_position_embeddings": integer(1, _LARGEST),
    "n_inner": integer(1, 2**22, optional=True),
    "head_dim": integer(1, 2**14, optional=True),
    "pad_token_id": integer(0, 2**22),
    "rope_parameters": TypeCheck(dict),
    # The family checks which windows and kinds of layers it supports.
    "sliding_window": integer(0, _LARGEST, optional=True),
    "layer_types": ListCheck(_TEXT),
    "max_window_layers": integer(0, _LARGEST),
    "query_pre_attn_scalar": _SCALE,
    "final_logit_softcapping": NumberCheck(1e-6, 1e12, optional=True),
    "attn_logit_softcapping": NumberCheck(1e-6, 1e12, optional=True),
    # Each of two directions has a bucket for the distance 0 and one for larger distances.
    "relative_attention_num_buckets": integer(4, 2**16),
    "relative_attention_max_distance": integer(1, 2**20),
}
"""The check of each key that a family may read."""


def checks_of(*keys: str, **others: Check) -> Checks:
    """Return the checks of keys, and those of others, which mean something else in one family."""
    return {**{key: _KEYS[key] for key in keys}, **others}


_ROPE: Checks = {
    "rope_theta": _SCALE,
    "partial_rotary_factor": NumberCheck(1e-6, 1.0, optional=True),
}
_PRETRAINED = integer(2, _LARGEST)
_ROPE_KINDS: Mapping[str, Checks] = {
    "linear": {"factor": _FACTOR},
    "llama3": {
        "factor": _FACTOR,
        "original_max_position_embeddings": _PRETRAINED,
        "low_freq_factor": _FACTOR,
        "high_freq_factor": _FACTOR,
    },
    "yarn": {
        "factor": _ANY_FACTOR,
        "original_max_position_embeddings": _PRETRAINED,
        "attention_factor": _ANY_FACTOR,
        "mscale": NumberCheck(0, 1e9, optional=True),
        "mscale_all_dim": NumberCheck(0, 1e9, optional=True),
        "beta_fast": _ANY_FACTOR,
        "beta_slow": _ANY_FACTOR,
    },
    "longrope": {
        "factor": _ANY_FACTOR,
        "original_max_position_embeddings": _PRETRAINED,
        "attention_factor": _ANY_FACTOR,
        "short_factor": ListCheck(_FACTOR),
        "long_factor": ListCheck(_FACTOR),
    },
}
"""The keys of `rope_parameters` that rope.py reads, with the check of each value, by rope_type."""


def check_file(
    file: Path,
    content: Mapping[str, Any],
    checks: Checks,
    aliases: Mapping[str, str],
    prefix: str = "",
) -> None:
    """Check the values in a file. transformers completes a key that is missing or null.

    Args:
        file: config.json.
        content: its content, or that of the object in it at `prefix`.
        checks: the keys that the family reads, each with the check of its value.
        aliases: other names of keys, each with the name that the family reads: transformers'
            `attribute_map`.
        prefix: prefix of keys in errors: `text_config.`.

    Raises:
        CheckpointError: a value has another type or is out of range; the error names the file, the key and
            what is allowed.
    """
    for key, value in content.items():
        check = checks.get(aliases.get(key, key))
        if check is not None and value is not None and not check.allows(value):
            raise _error(file, prefix + key, check, value)
    if "rope_parameters" in checks:
        _check_present(file, prefix, content, _ROPE)
        for key in ("rope_scaling", "rope_parameters"):
            _check_file_rope(file, prefix + key, content.get(key))


def check_config(file: Path, config: Any, checks: Checks) -> None:
    """Check a configuration as transformers completes it.

    Args:
        file: config.json.
        config: transformers' configuration of a supported family.
        checks: as of `check_file`.

    Raises:
        CheckpointError: as `check_file`.
    """
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
        raise _error(file, key, TypeCheck(dict), parameters)
    checks = _ROPE if kind is None else _ROPE_KINDS.get(kind, {})
    _check(file, f"{key}.", {name: parameters.get(name) for name in checks}, checks)


def _check_file_rope(file: Path, key: str, content: Any) -> None:
    """Check `rope_scaling` or `rope_parameters` of the file, which may be flat or by kinds of layers."""
    if content is None:
        return
    if not isinstance(content, dict):
        raise _error(file, key, TypeCheck(dict, optional=True), content)
    kind = content.get("rope_type", content.get("type"))
    numbers = _ROPE_KINDS.get(kind, {}) if isinstance(kind, str) else {}
    _check_present(file, f"{key}.", content, {**_ROPE, **numbers})
    for name, part in content.items():
        if isinstance(part, dict):
            _check_file_rope(file, f"{key}.{name}", part)


def _check_present(file: Path, prefix: str, content: Mapping[str, Any], checks: Checks) -> None:
    for key, check in checks.items():
        value = content.get(key)
        if value is not None and not check.allows(value):
            raise _error(file, prefix + key, check, value)


def _check(file: Path, prefix: str, values: Mapping[str, Any], checks: Checks) -> None:
    for key, check in checks.items():
        value = values[key]
        if not (value is None and getattr(check, "optional", False)) and not check.allows(value):
            raise _error(file, prefix + key, check, value)


def _error(file: Path, key: str, check: Check, value: Any) -> CheckpointError:
    return CheckpointError(f"{file}: {key}: expected {check}, found {shown(value)}", hint=_HINT)
