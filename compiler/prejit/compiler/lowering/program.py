"""A lowered program, as every kind of lowering returns it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models import registry
from prejit.compiler.models.layers import config
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.format.arrays import DTYPES, Array, Mesh

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class LoweredProgram:
    """A program that can be compiled for any target.

    Attributes:
        portable: StableHLO, a versioned portable artifact (openxla/stablehlo, docs/vhlo.md).
        platforms: that it was lowered for, in the order of its platform index.
        weights: names of the tensors that come first among the arguments, in order.
        arguments, results: the others, in order.
        weight_shardings: the mesh axis that splits each dimension, of those weights that are split.
        weight_sets: all tensors that may come first, set by set; empty: `weights` alone.
        estimated_microseconds: of a run on some CPU, for what cannot be measured; 0: nothing is said.
    """

    portable: bytes
    platforms: tuple[str, ...]
    weights: tuple[str, ...]
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    weight_shardings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weight_sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    estimated_microseconds: int = 0


STEPS = 16
"""The most steps of one decode. Of models that take 0.1 ms a step, dispatch is then a small part."""
CACHE_SHARDING = ("data", "tensor", "", "")
"""Of keys and values [B, K, S, H] on a mesh: rows and heads are split."""


def check_mesh(
    mesh: Mesh, model: nnx.Module, shape: config.DecoderConfig, at: str, config: Path
) -> None:
    """Checks that a model can be split over a mesh.

    Args:
        mesh: of the manifest.
        model: abstract.
        shape: of the model.
        at: the manifest, for errors.
        config: the model's config.json, for errors.

    Raises:
        ManifestError: `tensor` does not divide the heads or a matrix.
    """
    sizes = {"key/value heads": shape.num_kv_heads, **registry.split_sizes(model)}
    for name, size in sizes.items():
        if size % mesh.tensor:
            common = math.gcd(*sizes.values())
            fitting = [n for n in range(1, common + 1) if common % n == 0]
            raise ManifestError(
                f"{at}: mesh.tensor: expected a divisor of {size}, the {name} that {config} gives the "
                f"model; found {mesh.tensor}",
                hint=f"{' or '.join(map(str, fitting))} would fit",
            )


def array_of(path: tuple[Any, ...], leaf: Any) -> Array:
    """Return the array of a leaf of a pytree."""
    return Array(tuple(map(_step, path)), str(leaf.dtype), tuple(leaf.shape))


def results_of(tree: Any, what: str) -> tuple[Array, ...]:
    """The leaves of what a function returns.

    A bundle returns arrays in dicts with text as keys, and in tuples. Nodes of other types come back as
    one of these: lists, and types that have no names, as tuples; named tuples and dataclasses as dicts.

    Raises:
        BuildError: something would come back as another value, or not at all.
    """
    arrays: dict[tuple[str, ...], Array] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty)
    for path, leaf in leaves:
        at = f"result{jax.tree_util.keystr(path)}"
        for key in path:
            if isinstance(key, jax.tree_util.DictKey) and not isinstance(key.key, str):
                raise BuildError(
                    f"{what}: expected dicts with text as keys, found the key {key.key!r} at {at}",
                    hint="return a list in its place, or a dict whose keys are text",
                )
        if _is_empty(leaf):
            raise BuildError(
                f"{what}: expected an array at {at}, found {_spelled(leaf)}",
                hint="return arrays alone: leave it out, or return jax.tree.leaves of a structure that has "
                "such parts",
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise BuildError(
                f"{what}: expected an array at {at}, found a typed key, {leaf.str_short()}",
                hint="return jax.random.key_data(key); jax.random.wrap_key_data makes a key of it again",
            )
        if str(leaf.dtype) not in DTYPES:
            raise BuildError(
                f"{what}: expected one of {', '.join(DTYPES)} at {at}, found {leaf.dtype}",
                hint="return it as one of these dtypes, with .astype()",
            )
        array = array_of(path, leaf)
        other = arrays.setdefault(tuple(map(str, array.path)), array)
        if other is not array:
            raise BuildError(
                f"{what}: expected one result at {at}, found two",
                hint="give the parts of your own type different names",
            )
    return tuple(arrays.values())


def _is_empty(node: Any) -> bool:
    return not jax.tree.leaves(node)


def _spelled(empty: Any) -> str:
    return "None" if empty is None else f"an empty {type(empty).__name__}"


def _step(key: Any) -> str | int:
    match key:
        case jax.tree_util.DictKey(key=name) | jax.tree_util.GetAttrKey(name=name):
            return str(name)
        case jax.tree_util.SequenceKey(idx=place) | jax.tree_util.FlattenedIndexKey(key=place):
            return int(place)
        case _:
            raise BuildError(f"expected a pytree of dicts and sequences, found the key {key!r}")
