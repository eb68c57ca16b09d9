"""Decoder families as flax nnx modules, for Hugging Face directories as they are published.

A family is a module with `describe`, `NAMING`, `SPLIT` and a class; it is added to `_FAMILIES` here. Its
parameters have the names of the published tensors, one array each, nothing stacked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from flax import nnx

from prejit.compiler.models import gpt2, llama
from prejit.compiler.models.decoder import (
    Decoder,
    DecoderConfig,
    Embedding,
    KVCache,
    Linear,
    Naming,
    Split,
    split,
    unsupported,
)
from prejit.compiler.wording import did_you_mean, shown
from prejit.runtime.bundle import Mesh
from prejit.runtime.errors import CheckpointError

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "Naming",
    "Parameter",
    "decoder",
    "describe",
    "flat_parameters",
    "load_config",
    "naming",
    "parameters",
    "shardings",
    "split",
    "split_sizes",
    "with_parameters",
]

_FAMILIES: dict[str, tuple[ModuleType, type[nnx.Module]]] = {
    "gpt2": (gpt2, gpt2.GPT2),
    "llama": (llama, llama.Llama),
}
"""By model_type."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a decoder.

    Attributes:
        shape: of the array.
        in_out: whether it is a matrix stored (in, out), where torch's Linear has (out, in).
    """

    shape: tuple[int, ...]
    in_out: bool


def load_config(directory: Path) -> Any:
    """The configuration of a checkpoint, read by transformers.

    Args:
        directory: holds config.json.

    Raises:
        CheckpointError: no config.json, not one that transformers accepts, or of no family here.
    """
    file = directory / "config.json"
    try:
        said = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: cannot read: {error}",
            hint="expected a directory in the Hugging Face layout, with config.json in it",
        ) from error
    family = said.get("model_type") if isinstance(said, dict) else None
    known = ", ".join(map(shown, _FAMILIES))
    if not isinstance(family, str) or family not in _FAMILIES:
        raise CheckpointError(
            f"{file}: model_type: expected one of {known}, found {shown(family)}"
            f"{did_you_mean(str(family), _FAMILIES)}",
            hint="write the model as a JAX function or flax module and compile it as a [[program]]",
        )
    if said.get("quantization_config"):
        raise CheckpointError(
            f"{file}: quantization_config: expected none, found {shown(said['quantization_config'])}",
            hint="take the checkpoint in float32, bfloat16 or float16",
        )
    # At import transformers would advise to install torch, which no step here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # of many kinds: KeyError, ValueError, huggingface_hub's own
        reason = error.args[0] if error.args else type(error).__name__
        raise CheckpointError(f"{file}: transformers refuses it: {reason}") from error


def describe(config: Any) -> DecoderConfig:
    """What lowering and generation need to know of a model.

    Args:
        config: from load_config.

    Raises:
        CheckpointError: a setting that is not supported; names file, key, value and what is allowed.
    """
    described: DecoderConfig = _family(config)[0].describe(config)
    return described


def decoder(config: Any) -> nnx.Module:
    """The model, abstract: its parameters are shapes without values.

    It is called as Decoder says.

    Raises:
        CheckpointError: as describe.
    """
    describe(config)
    module = _family(config)[1]
    return nnx.eval_shape(lambda: module(config))


def parameters(config: Any) -> dict[str, Parameter]:
    """The parameters of a model by name, in alphabetical order.

    Raises:
        CheckpointError: as describe.
    """
    module = decoder(config)
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
        elif isinstance(part, Linear):
            by_outputs = last in rules.outputs
            if last in rules.vocabulary:
                by_outputs = _extent(part, outputs=True) % mesh.tensor == 0
            if by_outputs or last in rules.inputs:
                first = by_outputs != part.in_out
                found[f"{name}.weight"] = ("tensor", "") if first else ("", "tensor")
            if by_outputs and part.bias is not None:
                found[f"{name}.bias"] = ("tensor",)
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
    names: Naming = _family(config)[0].NAMING
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
    rules: Split = next(family.SPLIT for family, cls in _FAMILIES.values() if type(module) is cls)
    return rules


def _extent(part: Linear, *, outputs: bool) -> int:
    size: int = part.weight.shape[1 if outputs == part.in_out else 0]
    return size


def _family(config: Any) -> tuple[ModuleType, type[nnx.Module]]:
    if config.model_type not in _FAMILIES:
        raise unsupported(config, f"model_type: found {shown(config.model_type)}")
    return _FAMILIES[config.model_type]
