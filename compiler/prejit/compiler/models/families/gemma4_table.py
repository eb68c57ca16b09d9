"""The table of Gemma 4's decoders (see decoder_table.py).

Source: Gemma Team 2026, Gemma 4; of a model that also reads images and sounds, the text model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from prejit.compiler.models.families.decoder_family import DecoderFamily, Experts
from prejit.compiler.models.families.decoder_table import GEMMA3, TEXT_PART, rotary
from prejit.compiler.models.families.family import Family
from prejit.compiler.models.layers.config_checks import INNER_OR_NULL
from prejit.compiler.models.layers.layer_config import require, unsupported
from prejit.compiler.models.layers.linear import RMSNorm
from prejit.runtime.errors import CheckpointError


def _first_sharing(config: Any) -> int:
    """Return the first of the layers that have no keys and values of their own."""
    return int(config.num_hidden_layers - config.num_kv_shared_layers)


def _key_source(config: Any, layer: int) -> int | None:
    """Return the last layer of the same type with keys of its own, for one without."""
    first, kinds = _first_sharing(config), config.layer_types
    return max(n for n in range(first) if kinds[n] == kinds[layer]) if layer >= first else None


def _layer_heads(config: Any, layer: int) -> tuple[int, int]:
    every = [(config.num_key_value_heads, config.head_dim)] * config.num_hidden_layers
    keys, size = getattr(config, "layer_heads", every)[layer]
    return keys, size


def _inner(config: Any, layer: int) -> int:
    is_wide = config.use_double_wide_mlp and layer >= _first_sharing(config)
    return int(config.intermediate_size * (2 if is_wide else 1))


_UNIFIED = replace(
    GEMMA3,
    names=replace(GEMMA3.names, block_scale="layer_scalar"),
    norm=RMSNorm,
    inner=_inner,
    layer_heads=_layer_heads,
    key_source=_key_source,
    has_values=lambda config, layer: (
        not config.attention_k_eq_v or config.layer_types[layer] == "sliding_attention"
    ),
    norms_values=True,
    scale=lambda config, layer: 1.0,
)
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
_OF_EXPERTS = ("num_experts", "moe_intermediate_size", "top_k_experts")
_GEMMA4 = replace(
    _UNIFIED,
    names=replace(
        _UNIFIED.names,
        router="router",
        experts_norm="pre_feedforward_layernorm_2",
        experts_up=_EXPERTS[0],
        experts_down=_EXPERTS[1],
        after_experts="post_feedforward_layernorm_2",
        shared_up=_UNIFIED.names.up,
        shared_down=_UNIFIED.names.down,
        after_shared="post_feedforward_layernorm_1",
    ),
    experts=Experts(
        *_OF_EXPERTS,
        shared=lambda config: config.intermediate_size,
        layers=lambda config, layer: config.enable_moe_block,
        norms_router=True,
    ),
    layer_embeddings=lambda config: config.hidden_size_per_layer_input,
)


def _unused(config: Any) -> Iterator[str]:
    """Yield the prefixes of the keys and values that checkpoints hold of layers that read those of others."""
    for layer in range(_first_sharing(config), config.num_hidden_layers):
        for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
            yield f"model.layers.{layer}.self_attn.{name}."


def _check(family: DecoderFamily, config: Any) -> None:
    """Check what keys say together."""
    if hasattr(config, "global_head_dim"):
        raise CheckpointError(
            f"{config.name_or_path}: the transformers installed here has no heads by layer",
            hint="pip install --upgrade transformers",
        )
    first, count, kinds = _first_sharing(config), config.num_hidden_layers, config.layer_types
    if not set(kinds[first:]) <= set(kinds[: max(first, 0)]):
        raise unsupported(
            config,
            "num_kv_shared_layers: expected layers of each type of the last ones, whose keys they read, "
            f"among the first {max(first, 0)}, found {config.num_kv_shared_layers} of {count}",
        )
    for kind in dict.fromkeys(kinds):
        heads = {_layer_heads(config, layer) for layer in range(count) if kinds[layer] == kind}
        keys, _ = min(heads)
        if len(heads) > 1 or config.num_attention_heads % keys:
            raise unsupported(
                config,
                f"per_layer_config: expected one head_dim of all layers of {kind}, and one number of "
                f"key/value heads that divides num_attention_heads = {config.num_attention_heads}, found "
                f"{sorted(heads)}",
            )
    if family.experts is not None and config.enable_moe_block:
        for key in _OF_EXPERTS:
            if getattr(config, key) is None:
                raise unsupported(config, f"{key}: expected a number for experts, found null")
        if first < count:
            require(config, "use_double_wide_mlp", config.use_double_wide_mlp, [False])
    if family.layer_embeddings(config):
        rows = config.vocab_size_per_layer_input
        if rows < config.vocab_size:
            raise unsupported(
                config,
                f"vocab_size_per_layer_input: expected at least vocab_size = {config.vocab_size}, "
                f"found {rows}",
            )
    family.heads(config)


def _family(family: DecoderFamily, *keys: str) -> Family:
    made = rotary(
        family,
        *("num_kv_shared_layers", "attention_k_eq_v", "use_double_wide_mlp", "intermediate_size"),
        *("global_head_dim", "num_global_key_value_heads", *keys),
        naming=replace(
            TEXT_PART,
            ignored=(
                *("model.vision_tower.", "model.audio_tower.", "model.vision_embedder."),
                *("model.embed_vision.", "model.embed_audio."),
            ),
            renamed=(
                *((f".{name}", f".{name}.weight") for name in _EXPERTS),
                # .scale is the end of a norm's name in flax, so it became .weight
                (".router.weight", ".router.scale"),
                (".router.proj.weight", ".router.weight"),
            ),
            unused=_unused,
        ),
        check=lambda config: _check(family, config),
        use_bidirectional_attention=(None, "vision"),  # which texts without images do not meet
    )
    if family.experts is None:
        return made
    return replace(made, keys={**made.keys, **dict.fromkeys(_OF_EXPERTS[:2], INNER_OR_NULL)})


GEMMA4: Mapping[str, Family] = {
    "gemma4_text": _family(
        _GEMMA4, "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block"
    ),
    "gemma4_unified_text": _family(_UNIFIED),
}
"""The decoders of Gemma 4, by model_type."""
