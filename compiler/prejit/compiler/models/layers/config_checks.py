"""Read config.json as transformers does, and check the type and range of every value that a family reads.

transformers accepts almost any number: no heads, a billion layers, a division by 0. Then the code of a
family or XLA fails somewhere, or the build makes a bundle that generates nonsense. So the values that
families read are checked twice: in the file, before transformers computes with them, and in the configuration
that transformers completes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prejit.compiler.base.suggestions import shown
from prejit.runtime.errors import CheckpointError

MAX_LAYERS = 1000
"""Maximum number of layers. Each is traced and compiled; published models have up to 126."""

_HINT = "correct config.json, or take the one that was published with the weights"
_UNREAD = frozenset(
    (
        *("num_labels", "id2label", "label2id", "dtype", "torch_dtype"),
        *("name_or_path", "_name_or_path", "quantization_config"),
    )
)
"""Keys that no family reads. transformers would act on them: it makes a name for each of a billion labels."""


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
"""An inner width, a rank or a number of experts; what null means differs by key."""
NUMBER_OF_SEGMENTS = _integer(0, 2**24)
"""The number of segments of a family that may have none."""
FARTHEST = _integer(-1, 2**22)
"""A distance from which on all are alike; below 1 it is the number of positions."""
_SIZE = _integer(1, 2**14)
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

_CHECKED: tuple[tuple[str, Check], ...] = (
    (
        """
        attention_bias attention_k_eq_v attention_out_bias attn_temperature_tuning bias
        block_auto_adjust_ff_dim conv_bias enable_bias enable_moe_block is_encoder_decoder is_gated_act
        key_bias lm_head_bias mamba_conv_bias mamba_norm_before_gate mamba_proj_bias mamba_rms_norm mlp_bias
        multi_query mup_enabled new_decoder_architecture norm_topk_prob parallel_attn proj_bias
        projectors_bias qkv_bias query_bias rope_interleave scale_attn_by_inverse_layer_idx
        scale_attn_weights scale_decoder_outputs tie_word_embeddings use_bias use_conv_bias
        use_attention_gate use_double_wide_mlp use_gated_mlp use_parallel_residual use_post_norm use_qk_norm
        use_qkv_bias use_sandwich_norm use_sliding_window use_swiglu_ffn value_bias
        """,
        _BOOL,
    ),
    (
        """
        activation activation_function dense_act_fn feed_forward_proj hidden_act hidden_activation
        mamba_hidden_act mlp_hidden_act
        """,
        _TEXT,
    ),
    # The family checks which kinds of layers it supports.
    ("layer_types mlp_layer_types", _list(_TEXT)),
    ("rope_parameters", _OBJECT),
    # sizes of the model
    ("type_vocab_size vocab_size vocab_size_per_layer_input", _integer(1, 2**24)),
    (
        """
        block_multiple_of d_model dim embedding_size hidden_size n_embd num_mel_bins projection_size
        word_embed_proj_dim
        """,
        _WIDTH,
    ),
    ("hidden_size_per_layer_input", _integer(0, 2**20)),
    ("moe_latent_size", _integer(1, 2**20, optional=True)),
    (
        """
        d_ff decoder_ffn_dim dim_model_base encoder_ffn_dim ffn_dim ffn_hidden_size hidden_dim
        intermediate_size intermediate_size_mlp kv_lora_rank max_source_positions max_target_positions
        moe_intermediate_size moe_shared_expert_intermediate_size n_positions
        shared_expert_intermediate_size
        """,
        INNER,
    ),
    (
        "mamba_d_ssm n_inner prefix_dense_intermediate_size q_lora_rank top_k_experts",
        INNER_OR_NULL,
    ),
    ("pad_token_id shared_intermediate_size", _integer(0, 2**22)),
    (
        """
        d_kv decoder_attention_heads encoder_attention_heads image_size linear_key_head_dim
        linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_d_state mamba_head_dim
        mamba_n_groups mamba_n_heads mamba_num_heads n_groups n_head n_heads num_attention_heads num_heads
        num_key_value_heads num_kv_heads patch_size qk_nope_head_dim qk_rope_head_dim ssm_state_size
        state_size v_head_dim
        """,
        _SIZE,
    ),
    (
        "global_head_dim head_dim num_global_key_value_heads",
        _integer(1, 2**14, optional=True),
    ),
    ("mamba_d_head", _SIZE_OR_AUTO),
    ("conv_L_cache conv_kernel linear_conv_kernel_dim mamba_d_conv", _integer(2, 64)),
    ("expand mamba_expand", _integer(1, 64)),
    ("num_register_tokens", _integer(0, 2**10)),
    # layers, by their numbers
    (
        """
        decoder_layers decoder_sparse_step encoder_layers moe_layer_interval n_layer n_layers
        num_decoder_layers num_hidden_layers num_layers prefix_dense_sliding_window_pattern
        """,
        _LAYERS,
    ),
    ("first_k_dense_replace num_dense_layers num_kv_shared_layers", _integer(0, MAX_LAYERS)),
    ("num_nextn_predict_layers", _integer(0, MAX_LAYERS, optional=True)),
    ("moe_layer_end_index moe_layer_start_index", _integer(-1, MAX_LAYERS)),
    ("mlp_only_layers moe_layers", _list(_integer(0, MAX_LAYERS))),
    ("attn_layer_indices", replace(_list(_integer(0, MAX_LAYERS)), optional=True)),
    ("no_rope_layers", _list(_integer(0, 1))),
    # experts
    (
        "moe_k moe_num_experts n_routed_experts n_shared_experts num_experts num_experts_per_tok",
        _CHOSEN,
    ),
    ("moe_num_shared_experts num_local_experts num_shared_experts", _integer(0, 4096)),
    ("n_group topk_group", _integer(1, 4096, optional=True)),
    ("moe_topk", _EACH_LAYER),
    # positions and distances
    ("floor_scale max_position_embeddings", _integer(1, _LARGEST)),
    ("attention_chunk_size", _integer(1, _LARGEST, optional=True)),
    # Half of it is a window on each side.
    ("local_attention", _integer(2, _LARGEST)),
    # The family checks which windows it supports.
    ("sliding_window", _integer(0, _LARGEST, optional=True)),
    ("max_window_layers", _integer(0, _LARGEST)),
    # Each of two directions has a bucket for the distance 0 and one for larger distances.
    ("relative_attention_num_buckets", _integer(4, 2**16)),
    ("relative_attention_max_distance", _integer(1, 2**20)),
    # factors
    ("layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon rms_norm_eps", _EPSILON),
    ("mlp_ratio rope_theta", _number(1e-6, 1e6)),
    ("layer_rope_theta", _list(_number(0, 1e12))),
    (
        """
        attention_in_multiplier attention_multiplier attention_out_multiplier embedding_multiplier
        key_multiplier lm_head_multiplier logit_scale logits_scaling query_pre_attn_scalar
        residual_multiplier scale_depth scale_emb ssm_in_multiplier ssm_out_multiplier
        """,
        _SCALE,
    ),
    ("attn_logit_softcapping final_logit_softcapping", replace(_SCALE, optional=True)),
    ("mlp_multipliers", _factors(2)),
    ("ssm_multipliers", _factors(5)),
    ("block_ffn_dim_multiplier route_scale routed_scaling_factor", _FACTOR),
    ("clip_qkv rotary_dim swiglu_alpha swiglu_limit", _ANY_FACTOR),
    ("attn_scale", _number(0, 1e6)),
    ("router_jitter_noise", _number(0, 1)),
    ("time_step_min", _number(0, 1e9)),
    ("time_step_limit", _LIMITS),
)
_KEYS: Checks = {key: check for keys, check in _CHECKED for key in keys.split()}
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


def config_classes() -> Mapping[str, Any]:
    """Return transformers' classes of configurations, by model_type."""
    silence_transformers()
    from transformers import CONFIG_MAPPING

    classes: Mapping[str, Any] = CONFIG_MAPPING
    return classes


def silence_transformers() -> None:
    """Have transformers not advise, when it is imported, to install torch, which no step here needs."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def transformers_config(
    file: Path,
    kind: Any,
    content: Mapping[str, Any],
    prefix: str = "",
    complete: Callable[[Any], Any] = lambda config: config,
) -> Any:
    """Return a configuration as transformers completes it; arguments as of `check_file`.

    `complete` may change it. An exception in it is reported as a refusal by transformers.

    Raises:
        CheckpointError: transformers does not accept the content.
    """
    read = {key: value for key, value in content.items() if key not in _UNREAD}
    try:
        return complete(kind.from_dict(read))
    except Exception as error:  # KeyError, ValueError, huggingface_hub's own and others
        reason = error.args[0] if error.args else type(error).__name__
        where = f"{file}: {prefix.removesuffix('.')}: " if prefix else f"{file}: "
        if (key := _refused_null(kind, read, error)) is not None:
            where = f"{file}: {prefix}{key}: expected a value or no such key, found null: "
        raise CheckpointError(f"{where}transformers refuses it: {reason}") from error


def _refused_null(kind: Any, read: Mapping[str, Any], error: Exception) -> str | None:
    """Return the key that is null and without which transformers refuses nothing, or something else."""
    for key in (key for key, value in read.items() if value is None):
        try:
            kind.from_dict({name: value for name, value in read.items() if name != key})
        except Exception as other:
            if str(other) == str(error):
                continue
        return key
    return None


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
