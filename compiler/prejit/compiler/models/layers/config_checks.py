"""Check the type and range of every value in config.json before a model family reads it.

transformers accepts almost any number: no heads, a billion layers, a division by 0. Then the code of a
family or XLA fails somewhere, or the build makes a bundle that generates nonsense. So the values that
families read are checked twice: in the file, before transformers computes with them, and in the configuration
that transformers completes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prejit.compiler.base.suggestions import shown
from prejit.runtime.errors import CheckpointError

MAX_LAYERS = 1000
"""Maximum number of layers. Each is traced and compiled; published models have up to 126."""

_HINT = "correct config.json, or take the one that was published with the weights"


@dataclass(frozen=True)
class Check:
    """The rule for a value of config.json.

    Attributes:
        expected: in words.
        allows: returns whether a value is so.
        optional: whether it may be null.
    """

    expected: str
    allows: Callable[[Any], bool]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.expected}{' or null' if self.optional else ''}"


Checks = Mapping[str, Check]


def _number(low: float, high: float, *, optional: bool = False) -> Check:
    """Allow numbers from low to high; NaN is none."""
    return Check(
        f"a number from {low:g} to {high:g}",
        lambda value: type(value) in (int, float) and low <= value <= high,
        optional,
    )


def _integer(low: int, high: int, *, optional: bool = False) -> Check:
    return Check(
        f"an integer from {low} to {high}",
        lambda value: type(value) is int and low <= value <= high,
        optional,
    )


def _list(item: Check) -> Check:
    return Check(
        f"a list, each {item}",
        lambda value: isinstance(value, list | tuple) and all(map(item.allows, value)),
    )


_LARGEST = 2**31 - 1
_WIDTH = _integer(1, 2**20)
INNER = _integer(1, 2**22)
"""An inner width, or the number of rows of a table of positions."""
INNER_OR_NULL = _integer(1, 2**22, optional=True)
"""An inner width; null is four times the width of the model."""
OF_EXPERTS_OR_NULL = _integer(1, 2**22, optional=True)
"""A number or a width of experts, of a family whose models may have none."""
NUMBER_OF_SEGMENTS = _integer(0, 2**24)
"""The number of segments of a family that may have none."""
FARTHEST = _integer(-1, 2**22)
"""A distance from which on all are alike; below 1 it is the number of positions."""
_SIZE = _integer(1, 2**14)
_SIZE_OR_NULL = _integer(1, 2**14, optional=True)
_LAYERS = _integer(1, MAX_LAYERS)
_BOOL = Check("true or false", lambda value: type(value) is bool)
_TEXT = Check("a text", lambda value: type(value) is str)
_OBJECT = Check("an object", lambda value: type(value) is dict)
# Within these bounds the numbers and their squares are normal float32 numbers.
_EPSILON = _number(1e-30, 1.0)
_SCALE = _number(1e-6, 1e12)
_FACTOR = _number(1e-6, 1e9)
_ANY_FACTOR = _number(1e-6, 1e9, optional=True)


def _factors(count: int) -> Check:
    return Check(
        f"a list of {count}, each {_SCALE}",
        lambda value: _list(_SCALE).allows(value) and len(value) == count,
    )


_SIZE_OR_AUTO = Check(f'{_SIZE} or "auto"', lambda value: value == "auto" or _SIZE.allows(value))
_LIMIT = _number(0, math.inf)
_LIMITS = Check(
    "a list of two numbers of at least 0, the smaller one first",
    lambda value: _list(_LIMIT).allows(value) and len(value) == 2 and value[0] <= value[1],
)

_CHOSEN = _integer(1, 4096)
_EACH_LAYER = Check(
    f"{_CHOSEN} or a list of such",
    lambda value: _CHOSEN.allows(value) or (_list(_CHOSEN).allows(value) and len(value) > 0),
)

_KEYS: Checks = {
    **dict.fromkeys(("vocab_size", "type_vocab_size"), _integer(1, 2**24)),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "num_mel_bins", "embedding_size"), _WIDTH
    ),
    **dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim"), INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("bias", "enable_bias", "multi_query", "parallel_attn"), _BOOL),
    **dict.fromkeys(("new_decoder_architecture", "use_post_norm"), _BOOL),
    "word_embed_proj_dim": _WIDTH,
    "lm_head_bias": _BOOL,
    "router_jitter_noise": _number(0, 1),
    "num_kv_heads": _SIZE,
    "layer_rope_theta": _list(_number(0, 1e12)),
    **dict.fromkeys(("n_positions", "max_source_positions", "max_target_positions"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), _SIZE),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _SIZE),
    **dict.fromkeys(("n_head", "n_heads", "d_kv"), _SIZE),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _EPSILON),
    **dict.fromkeys(("norm_eps", "norm_epsilon"), _EPSILON),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation"), _TEXT),
    **dict.fromkeys(("activation_function", "dense_act_fn", "feed_forward_proj"), _TEXT),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), _BOOL),
    **dict.fromkeys(("attention_out_bias", "use_qkv_bias", "qkv_bias", "use_bias"), _BOOL),
    **dict.fromkeys(("use_parallel_residual", "norm_topk_prob"), _BOOL),
    **dict.fromkeys(("use_sliding_window", "scale_decoder_outputs"), _BOOL),
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx"), _BOOL),
    **dict.fromkeys(("is_gated_act", "is_encoder_decoder"), _BOOL),
    "max_position_embeddings": _integer(1, _LARGEST),
    **dict.fromkeys(("image_size", "patch_size"), _SIZE),
    **dict.fromkeys(("query_bias", "key_bias", "value_bias", "proj_bias"), _BOOL),
    **dict.fromkeys(("use_swiglu_ffn", "use_gated_mlp"), _BOOL),
    **dict.fromkeys(("rope_theta", "mlp_ratio"), _number(1e-6, 1e6)),
    **dict.fromkeys(("projection_size",), _WIDTH),
    "num_register_tokens": _integer(0, 2**10),
    "n_inner": INNER_OR_NULL,
    "head_dim": _integer(1, 2**14, optional=True),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), _SIZE_OR_NULL),
    **dict.fromkeys(("enable_moe_block", "use_double_wide_mlp", "attention_k_eq_v"), _BOOL),
    "top_k_experts": OF_EXPERTS_OR_NULL,
    "attention_chunk_size": _integer(1, _LARGEST, optional=True),
    "intermediate_size_mlp": INNER,
    **dict.fromkeys(("use_qk_norm", "attn_temperature_tuning"), _BOOL),
    "mup_enabled": _BOOL,
    "route_scale": _FACTOR,
    "floor_scale": _integer(1, _LARGEST),
    "attn_scale": _number(0, 1e6),
    "moe_layers": _list(_integer(0, MAX_LAYERS)),
    "num_kv_shared_layers": _integer(0, MAX_LAYERS),
    "hidden_size_per_layer_input": _integer(0, 2**20),
    "vocab_size_per_layer_input": _integer(1, 2**24),
    "pad_token_id": _integer(0, 2**22),
    "rope_parameters": _OBJECT,
    # Half of it is a window on each side.
    "local_attention": _integer(2, _LARGEST),
    # The family checks which windows and kinds of layers it supports.
    "sliding_window": _integer(0, _LARGEST, optional=True),
    "layer_types": _list(_TEXT),
    "max_window_layers": _integer(0, _LARGEST),
    **dict.fromkeys(("query_pre_attn_scalar", "attention_multiplier", "logit_scale"), _SCALE),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), _SCALE),
    "no_rope_layers": _list(_integer(0, 1)),
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), _integer(1, 4096)),
    "num_local_experts": _integer(0, 4096),
    "shared_intermediate_size": _integer(0, 2**22),
    **dict.fromkeys(("shared_expert_intermediate_size", "kv_lora_rank"), INNER),
    "q_lora_rank": _integer(1, 2**22, optional=True),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _SIZE),
    **dict.fromkeys(("n_routed_experts", "n_shared_experts"), _integer(1, 4096)),
    **dict.fromkeys(("n_group", "topk_group"), _integer(1, 4096, optional=True)),
    "routed_scaling_factor": _FACTOR,
    "first_k_dense_replace": _integer(0, MAX_LAYERS),
    **dict.fromkeys(("rope_interleave", "conv_bias", "block_auto_adjust_ff_dim"), _BOOL),
    "num_nextn_predict_layers": _integer(0, MAX_LAYERS, optional=True),
    "conv_L_cache": _integer(2, 64),
    "block_multiple_of": _WIDTH,
    "block_ffn_dim_multiplier": _FACTOR,
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups", "mamba_d_state"), _SIZE),
    **dict.fromkeys(("num_heads", "n_groups", "state_size"), _SIZE),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel"), _integer(2, 64)),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "ssm_state_size"), _SIZE),
    **dict.fromkeys(("mlp_hidden_act", "mamba_hidden_act"), _TEXT),
    "time_step_min": _number(0, 1e9),
    "moe_latent_size": _integer(1, 2**20, optional=True),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), INNER),
    "mlp_layer_types": _list(_TEXT),
    **dict.fromkeys(("clip_qkv", "rotary_dim"), _ANY_FACTOR),
    **dict.fromkeys(("moe_num_experts", "moe_k"), _integer(1, 4096)),
    **dict.fromkeys(("moe_num_shared_experts", "num_shared_experts"), _integer(0, 4096)),
    "prefix_dense_intermediate_size": INNER_OR_NULL,
    "prefix_dense_sliding_window_pattern": _integer(1, MAX_LAYERS),
    **dict.fromkeys(("moe_layer_start_index", "moe_layer_end_index"), _integer(-1, MAX_LAYERS)),
    "moe_layer_interval": _integer(1, MAX_LAYERS),
    "moe_topk": _EACH_LAYER,
    "num_dense_layers": _integer(0, MAX_LAYERS),
    "mamba_d_head": _SIZE_OR_AUTO,
    "mamba_d_ssm": _integer(1, 2**22, optional=True),
    **dict.fromkeys(("mamba_expand", "expand"), _integer(1, 64)),
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm"), _BOOL),
    **dict.fromkeys(("mamba_norm_before_gate", "projectors_bias", "use_conv_bias"), _BOOL),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), _SIZE),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), _SIZE),
    "linear_conv_kernel_dim": _integer(2, 64),
    "time_step_limit": _LIMITS,
    "attn_layer_indices": replace(_list(_integer(0, MAX_LAYERS)), optional=True),
    **dict.fromkeys(("key_multiplier", "lm_head_multiplier"), _SCALE),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), _SCALE),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), _SCALE),
    "mlp_multipliers": _factors(2),
    "ssm_multipliers": _factors(5),
    "moe_intermediate_size": INNER,
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), _ANY_FACTOR),
    "decoder_sparse_step": _integer(1, MAX_LAYERS),
    "mlp_only_layers": _list(_integer(0, MAX_LAYERS)),
    "final_logit_softcapping": _number(1e-6, 1e12, optional=True),
    "attn_logit_softcapping": _number(1e-6, 1e12, optional=True),
    # Each of two directions has a bucket for the distance 0 and one for larger distances.
    "relative_attention_num_buckets": _integer(4, 2**16),
    "relative_attention_max_distance": _integer(1, 2**20),
}
"""The check of each key that a family may read."""


def checks_of(*keys: str, **others: Check) -> Checks:
    """Return the checks of keys, and those of others, which mean something else in one family."""
    return {**{key: _KEYS[key] for key in keys}, **others}


_ROPE: Checks = {"rope_theta": _SCALE, "partial_rotary_factor": _number(1e-6, 1.0, optional=True)}
_PRETRAINED = _integer(2, _LARGEST)
_MODEL_ROPE: Checks = {**_ROPE, "original_max_position_embeddings": _PRETRAINED}
"""The keys beside `rope_parameters` that say how heads turn."""
_ROPE_KINDS: Mapping[str, Checks] = {
    **{"linear": {"factor": _FACTOR}, "proportional": {"factor": _ANY_FACTOR}},
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
        "mscale": _number(0, 1e9, optional=True),
        "mscale_all_dim": _number(0, 1e9, optional=True),
        "beta_fast": _ANY_FACTOR,
        "beta_slow": _ANY_FACTOR,
    },
    "longrope": {
        "factor": _ANY_FACTOR,
        "original_max_position_embeddings": _PRETRAINED,
        "attention_factor": _ANY_FACTOR,
        "short_factor": _list(_FACTOR),
        "long_factor": _list(_FACTOR),
    },
}
"""The keys of `rope_parameters` that rope.py reads, with the check of each value, by rope_type."""
_OF_LAYER: Checks = {"head_dim": _SIZE, "num_key_value_heads": _SIZE}
ALPHA: Checks = {"alpha": _FACTOR}
GROWTH: Checks = {
    "llama_4_scaling_beta": _number(0, 1e6),
    "original_max_position_embeddings": _PRETRAINED,
}
"""The keys of `rope_parameters` that only some families read, with their checks (see rope.Extra)."""


def check_file(
    file: Path, content: Mapping[str, Any], checks: Checks, kind: Any, prefix: str = ""
) -> None:
    """Check the values in a file. transformers completes a key that is missing or null.

    Args:
        file: config.json.
        content: its content, or that of the object in it at `prefix`.
        checks: the keys that the family reads, each with the check of its value.
        kind: transformers' class of the configuration.
        prefix: prefix of keys in errors: `text_config.`.

    Raises:
        CheckpointError: a value has another type or is out of range; the error names the file, the key and
            what is allowed.
    """
    checks = {"layer_types": _KEYS["layer_types"], **checks}  # transformers reads it for all
    aliases: Mapping[str, str] = kind.attribute_map
    for key, value in content.items():
        if callable(getattr(kind, key, None)) or key == "attribute_map":
            raise _refused(file, prefix + key, "it names a part of transformers' code")
        if key == "per_layer_config" and value is not None:
            if "global_head_dim" not in checks:
                raise _refused(file, prefix + key, "all layers read the same values here")
            _check_layers(file, prefix + key, value)
        names = (key, aliases.get(key), *(name for name, read in aliases.items() if read == key))
        for name in names:
            if name in checks:
                _check(file, prefix, content, {key: checks[name]}, complete=False)
    heads, width = content.get("num_attention_heads"), content.get("hidden_size")
    head = content.get("head_dim") or getattr(kind, "head_dim", None)
    if head is None and type(heads) is type(width) is int and heads > width:
        raise _error(
            file,
            f"{prefix}num_attention_heads",
            Check(f"at most hidden_size = {width}, as head_dim is not given", bool),
            heads,
        )
    if "rope_parameters" in checks:
        _check(file, prefix, content, _MODEL_ROPE, complete=False)
        for key in ("rope_scaling", "rope_parameters"):
            _check_file_rope(file, prefix + key, content.get(key))
    else:  # transformers reads them for all
        unread = dict.fromkeys(("rope_scaling", "rope_parameters"), _OBJECT)
        _check(file, prefix, content, unread, complete=False)


def check_config(file: Path, config: Any, checks: Checks, prefix: str = "") -> None:
    """Check a configuration as transformers completes it; `prefix` precedes its keys in the file."""
    _check(file, prefix, {key: getattr(config, key, None) for key in checks}, checks)
    lists = (
        *(("layer_types", True), ("mlp_layer_types", True)),
        *(("no_rope_layers", False), ("layer_rope_theta", False)),
    )
    for key, is_exact in lists:
        if key not in checks:
            continue
        expected, found = config.num_hidden_layers, len(getattr(config, key))
        if found < expected or (is_exact and found > expected):
            raise CheckpointError(
                f"{file}: {prefix}{key}: expected {expected} items, which is num_hidden_layers, "
                f"found {found}",
                hint=_HINT,
            )


def check_rope(file: Path, key: str, parameters: Any, kind: str | Checks | None = None) -> None:
    """Check `rope_parameters`, or one of its parts.

    `key` is the key of the parameters, for errors, and `kind` their rope_type, or checks of other keys; None
    checks only the keys that all kinds have.
    """
    if not isinstance(parameters, dict):
        raise _error(file, key, _OBJECT, parameters)
    checks = _ROPE if kind is None else kind
    if isinstance(checks, str):
        checks = _ROPE_KINDS.get(checks, {})
    _check(file, f"{key}.", parameters, checks)


def _check_file_rope(file: Path, key: str, content: Any) -> None:
    """Check `rope_scaling` or `rope_parameters` of the file, which may be flat or by kinds of layers."""
    if content is None:
        return
    if not isinstance(content, dict):
        raise _error(file, key, replace(_OBJECT, optional=True), content)
    kind = content.get("rope_type", content.get("type"))
    numbers = _ROPE_KINDS.get(kind, {}) if isinstance(kind, str) else {}
    # transformers completes a key that is missing, not one that is null
    given = {name: check for name, check in {**_ROPE, **numbers}.items() if name in content}
    _check(file, f"{key}.", content, given)
    for name, part in content.items():
        if isinstance(part, dict) or name.endswith("_attention"):
            _check_file_rope(file, f"{key}.{name}", part)


def _check(
    file: Path, prefix: str, values: Mapping[str, Any], checks: Checks, *, complete: bool = True
) -> None:
    """Check values; where they are not complete, transformers gives a value to a key that is null."""
    for key, check in checks.items():
        value = values.get(key)
        may_be_null = check.optional or not complete
        if not (value is None and may_be_null) and not check.allows(value):
            raise _error(file, prefix + key, check, value)


def _check_layers(file: Path, key: str, layers: Any) -> None:
    """Check the numbers and sizes of heads that layers have of their own."""
    if not isinstance(layers, dict):
        raise _error(file, key, _OBJECT, layers)
    for layer, values in layers.items():
        if not isinstance(values, dict):
            raise _error(file, f"{key}.{layer}", _OBJECT, values)
        for name in values.keys() - _OF_LAYER.keys():
            raise _refused(file, f"{key}.{layer}.{name}", "all layers read the same value here")
        _check(file, f"{key}.{layer}.", values, {name: _OF_LAYER[name] for name in values})


def _refused(file: Path, key: str, why: str) -> CheckpointError:
    return CheckpointError(f"{file}: {key}: expected no such key: {why}", hint=_HINT)


def _error(file: Path, key: str, check: Check, value: Any) -> CheckpointError:
    return CheckpointError(f"{file}: {key}: expected {check}, found {shown(value)}", hint=_HINT)
