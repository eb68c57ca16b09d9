"""Model families as flax nnx modules, for Hugging Face directories as they are published.

A decoder family is a module with `describe`, `build` and `NAMING`, added to `_FAMILIES` here; an encoder
family one with `check`, `max_tokens`, `build` and `NAMING`, added to `_ENCODERS`. Parameters have the names
of the published tensors, one array each, nothing stacked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from flax import nnx

from prejit.compiler.base.json_file import read_json
from prejit.compiler.base.wording import did_you_mean, shown
from prejit.compiler.models import precision
from prejit.compiler.models.encoders import bert, distilbert, roberta
from prejit.compiler.models.encoders.sentence import EncoderConfig, EncoderSource, SentenceEncoder
from prejit.compiler.models.encoders.sentence_layout import read_layout
from prejit.compiler.models.families import gemma2, gemma3, gpt2, llama, mistral, phi3, qwen2, qwen3
from prejit.compiler.models.layers import forms
from prejit.compiler.models.layers.config import (
    BRING_YOUR_OWN,
    Decoder,
    DecoderConfig,
    KVCache,
    Naming,
    Split,
    unsupported,
)
from prejit.compiler.models.layers.config_checks import check_config, check_file
from prejit.compiler.models.layers.linear import Embedding, Linear, split
from prejit.compiler.models.layers.rotary import SPLIT, RotaryDecoder
from prejit.runtime.errors import CheckpointError
from prejit.runtime.format.arrays import Mesh

__all__ = [
    "Decoder",
    "DecoderConfig",
    "EncoderConfig",
    "EncoderSource",
    "KVCache",
    "Naming",
    "Parameter",
    "SentenceEncoder",
    "decoder",
    "describe",
    "describe_encoder",
    "encoder",
    "encoder_naming",
    "encoder_parameters",
    "flat_parameters",
    "load_config",
    "load_encoder",
    "naming",
    "parameters",
    "shardings",
    "split",
    "split_sizes",
    "with_parameters",
]

_FAMILIES: dict[str, ModuleType] = {
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
"""Decoders, by model_type."""

_ENCODERS: dict[str, ModuleType] = {"bert": bert, "distilbert": distilbert, "roberta": roberta}
"""Encoders, by model_type."""

_AROUND = {"gemma3": "gemma3_text"}
"""Model types around a text model of a family here, which is taken; the rest is left."""

_UNREAD = frozenset(
    (
        *("num_labels", "id2label", "label2id", "dtype", "torch_dtype", "vision_config"),
        *("name_or_path", "_name_or_path"),
    )
)
"""Keys that no family reads. transformers would act on them: it makes a name for each of a billion labels."""

_SPLITS: dict[type[nnx.Module], Split] = {
    gpt2.GPT2: gpt2.SPLIT,
    RotaryDecoder: SPLIT,
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model.

    Attributes:
        shape: of the array.
        in_out: whether it is a matrix stored (in, out), where torch's Linear has (out, in).
    """

    shape: tuple[int, ...]
    in_out: bool


def load_config(directory: Path) -> Any:
    """The configuration of a decoder's checkpoint, read by transformers.

    Args:
        directory: holds config.json.

    Raises:
        CheckpointError: no config.json, not one that transformers accepts, or of no family here.
    """
    return _load_config(directory, sorted([*_FAMILIES, *_AROUND]), "[generate]")


def load_encoder(directory: Path) -> EncoderSource:
    """An encoder's configuration: of its transformer, and of the modules that follow it.

    Args:
        directory: in the layout of sentence-transformers, or a plain one with config.json.

    Raises:
        CheckpointError: as load_config; or a module or setting that is not built here.
    """
    layout = read_layout(directory)
    return EncoderSource(_load_config(layout.transformer, sorted(_ENCODERS), "[encode]"), layout)


def _load_config(directory: Path, known: list[str], section: str) -> Any:
    """The configuration, of a model type that is known to what the manifest's section needs."""
    file = directory / "config.json"
    said = read_json(
        file, "expected a directory in the Hugging Face layout, with config.json in it"
    )
    family = said.get("model_type") if isinstance(said, dict) else None
    if not isinstance(family, str) or family not in known:
        other = {"[encode]": _FAMILIES, "[generate]": _ENCODERS}[section]
        raise CheckpointError(
            f"{file}: model_type: expected one of {', '.join(map(shown, known))} for {section}, found "
            f"{shown(family)}{did_you_mean(str(family), known)}",
            hint=f"give the manifest [{'encode' if other is _ENCODERS else 'generate'}] instead of {section}"
            if str(family) in other
            else BRING_YOUR_OWN,
        )
    if said.get("quantization_config"):
        raise CheckpointError(
            f"{file}: quantization_config: expected none, found {shown(said['quantization_config'])}",
            hint="take the checkpoint in float32, bfloat16 or float16",
        )
    config = _completed(file, said)
    check_config(file, config)
    return config


def _completed(file: Path, said: Mapping[str, Any]) -> Any:
    """What config.json says as transformers' configuration: of the text model, where it is a part of another.

    Raises:
        CheckpointError: a value that no model can have, or that transformers does not accept.
    """
    # At import transformers would advise to install torch, which no step here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import CONFIG_MAPPING

    text, prefix, family = said, "", said["model_type"]
    if family in _AROUND:
        part = said.get("text_config")
        if not isinstance(part, dict):
            raise CheckpointError(
                f"{file}: text_config: expected an object, found {shown(part)}",
                hint="correct config.json, or take the one that was published with the weights",
            )
        text, prefix, family = part, "text_config.", _AROUND[family]
    check_file(file, text, family, CONFIG_MAPPING[family].attribute_map, prefix)
    read = {key: value for key, value in text.items() if key not in _UNREAD}
    try:
        config = CONFIG_MAPPING[family].from_dict(read)
        if (
            text is not said
        ):  # as transformers' Gemma3Config has it, whose other values are not read
            config.tie_word_embeddings = said.get("tie_word_embeddings", True)
        config.name_or_path = str(file.parent)
    except Exception as error:  # of many kinds: KeyError, ValueError, huggingface_hub's own
        reason = error.args[0] if error.args else type(error).__name__
        raise CheckpointError(f"{file}: transformers refuses it: {reason}") from error
    return config


def describe(config: Any, cache_dtype: str = "float32") -> DecoderConfig:
    """What lowering and generation need to know of a model.

    Args:
        config: from load_config.
        cache_dtype: of the KV cache: `float32` or `bfloat16`.

    Raises:
        CheckpointError: a setting that is not supported; names file, key, value and what is allowed.
    """
    described: DecoderConfig = _family(config).describe(config)
    return replace(described, cache_dtype=cache_dtype)


def decoder(
    config: Any, context: int | None = None, dtype: str = "float32", *, out_in: bool = False
) -> nnx.Module:
    """The model, abstract: its parameters are shapes without values.

    It is called as Decoder says.

    Args:
        config: from load_config.
        context: the longest that programs of a bundle are built for, which decides LongRoPE's factors for all
            of them (rope.py says why); None: as long as the model was made for.
        dtype: that its matrices are stored in (precision.py).
        out_in: whether all are stored (out, in), as kernels read them; else as XLA:CPU wants each.

    Raises:
        CheckpointError: as describe.
    """
    describe(config)
    family = _family(config)
    with forms.storing(out_in=out_in):
        module: nnx.Module = nnx.eval_shape(lambda: family.build(config, context))
    precision.store(module, dtype)
    return module


def describe_encoder(source: EncoderSource) -> EncoderConfig:
    """What lowering and encoding need to know of an encoder.

    Raises:
        CheckpointError: a setting that is not supported; names file, key, value and what is allowed.
    """
    config, layout = source.config, source.layout
    family = _ENCODERS[config.model_type]
    family.check(config)
    width: int = config.hidden_size
    if width % config.num_attention_heads:
        heads = config.num_attention_heads
        raise unsupported(
            config,
            f"hidden_size: expected a multiple of the {heads} attention heads, found {width}",
        )
    if layout.width not in (None, width):
        raise CheckpointError(
            f"{layout.files[-1]}: word_embedding_dimension: expected {width}, the width that "
            f"{layout.transformer / 'config.json'} gives the model; found {layout.width}"
        )
    width *= len(layout.pooling)
    for part in layout.dense:
        if part.inputs != width:
            raise CheckpointError(
                f"{part.directory / 'config.json'}: in_features: expected {width}, the width of what comes "
                f"before; found {part.inputs}"
            )
        width = part.outputs
    positions: int = family.max_tokens(config)
    if positions < 1:
        raise unsupported(
            config,
            f"max_position_embeddings: expected more than pad_token_id + 1 = {config.pad_token_id + 1}, "
            f"found {config.max_position_embeddings}",
        )
    return EncoderConfig(
        config.model_type,
        config.vocab_size,
        width,
        min(positions, layout.max_tokens or positions),
        "+".join(layout.pooling),
        layout.normalized,
    )


def encoder(
    source: EncoderSource, dtype: str = "float32", *, out_in: bool = False
) -> SentenceEncoder:
    """The encoder, abstract: its parameters are shapes without values.

    Args:
        source: from load_encoder.
        dtype: that its matrices are stored in (precision.py).
        out_in: as of decoder.

    Raises:
        CheckpointError: as describe_encoder.
    """
    describe_encoder(source)
    family = _ENCODERS[source.config.model_type]
    prefix = family.NAMING.prefix
    with forms.storing(out_in=out_in):
        module: SentenceEncoder = nnx.eval_shape(
            lambda: SentenceEncoder(source, prefix, family.build(source.config))
        )
    precision.store(module, dtype)
    return module


def encoder_parameters(source: EncoderSource, *, out_in: bool = False) -> dict[str, Parameter]:
    """As parameters, of an encoder."""
    return _parameters(encoder(source, out_in=out_in))


def encoder_naming(source: EncoderSource) -> Naming:
    """As naming, of an encoder's transformer."""
    names: Naming = _ENCODERS[source.config.model_type].NAMING
    return names


def parameters(config: Any, *, out_in: bool = False) -> dict[str, Parameter]:
    """The parameters of a model by name, in alphabetical order.

    Args:
        config: from load_config.
        out_in: as of decoder.

    Raises:
        CheckpointError: as describe.
    """
    return _parameters(decoder(config, out_in=out_in))


def _parameters(module: nnx.Module) -> dict[str, Parameter]:
    in_out = {
        ".".join(map(str, (*path, "weight")))
        for path, part in nnx.iter_modules(module)
        if isinstance(part, Linear) and part.in_out
    }
    leaves = flat_parameters(nnx.state(module))
    return {name: Parameter(leaf.shape, name in in_out) for name, leaf in leaves.items()}


def shardings(module: nnx.Module, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """The mesh axis that splits each dimension of the parameters that are split, by their names.

    Args:
        module: from decoder; `mesh.tensor` divides its split_sizes.
        mesh: the devices.
    """
    found: dict[str, tuple[str, ...]] = {}
    rules = _split(module)
    for path, part in nnx.iter_modules(module):
        name = ".".join(map(str, path))
        last = str(path[-1]) if path else ""
        if isinstance(part, Embedding):
            if last in rules.vocabulary and part.weight.shape[0] % mesh.tensor == 0:
                found[f"{name}.weight"] = ("tensor", "")
                if part.weight_scale is not None:
                    found[f"{name}.weight_scale"] = ("tensor",)
        elif isinstance(part, Linear):
            by_outputs = last in rules.outputs
            if last in rules.vocabulary:
                by_outputs = _extent(part, outputs=True) % mesh.tensor == 0
            if by_outputs or last in rules.inputs:
                first = by_outputs != part.in_out
                found[f"{name}.weight"] = ("tensor", "") if first else ("", "tensor")
            for key in ("bias", "weight_scale") if by_outputs else ():
                if getattr(part, key) is not None:
                    found[f"{name}.{key}"] = ("tensor",)
    return found


def split_sizes(module: nnx.Module) -> dict[str, int]:
    """What `tensor` of a mesh must divide beside the heads: extents of linear layers, by their names."""
    rules = _split(module)
    return {
        ".".join(map(str, path)): _extent(part, outputs=path[-1] in rules.outputs)
        for path, part in nnx.iter_modules(module)
        if isinstance(part, Linear) and path[-1] in (*rules.outputs, *rules.inputs)
    }


def naming(config: Any) -> Naming:
    """How published checkpoints of the family name tensors."""
    names: Naming = _family(config).NAMING
    return names


def flat_parameters(state: nnx.State) -> dict[str, Any]:
    """The leaves of a split module by name, `transformer.h.0.ln_1.weight`, in alphabetical order."""
    return dict(sorted(zip(_names(state), jax.tree.leaves(state), strict=True)))


def with_parameters(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """A split module's state with other values, named as flat_parameters names them."""
    return jax.tree.unflatten(jax.tree.structure(state), [values[name] for name in _names(state)])


def _names(state: nnx.State) -> list[str]:
    """Of the leaves. A step that is no key leads from a flax variable to its value."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [
        ".".join(str(step.key) for step in path if isinstance(step, jax.tree_util.DictKey))
        for path in paths
    ]


def _split(module: nnx.Module) -> Split:
    return _SPLITS[type(module)]


def _extent(part: Linear, *, outputs: bool) -> int:
    size: int = part.weight.shape[1 if outputs == part.in_out else 0]
    return size


def _family(config: Any) -> ModuleType:
    if config.model_type not in _FAMILIES:
        raise unsupported(config, f"model_type: found {shown(config.model_type)}")
    return _FAMILIES[config.model_type]
