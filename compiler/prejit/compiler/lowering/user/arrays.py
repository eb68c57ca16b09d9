"""The arrays that a function of the user takes and returns: pytrees as flat lists of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from prejit.compiler.manifest.shape_string import parse_shape
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.format.arrays import DTYPES, Array


def shapes_of(args: Any, bucket: Mapping[str, int], where: str) -> Any:
    """Return the shapes of a manifest's args at a bucket, as a pytree."""
    if isinstance(args, dict):
        return {name: shapes_of(item, bucket, f"{where}.{name}") for name, item in args.items()}
    if isinstance(args, list | tuple):
        return [shapes_of(item, bucket, f"{where}[{i}]") for i, item in enumerate(args)]
    dtype, shape = parse_shape(args, dict(bucket))
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ManifestError(
            f"{where}: expected a dtype of at most 32 bits, found {args!r}",
            hint="set JAX_ENABLE_X64=1 in the environment of the build",
        )
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def arrays_of(tree: Any) -> tuple[Array, ...]:
    """Return the arrays of a manifest's args."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return tuple(_array_of(path, leaf) for path, leaf in leaves)


def _array_of(path: tuple[Any, ...], leaf: Any) -> Array:
    """Return the array of a leaf of a pytree."""
    return Array(tuple(map(_step, path)), str(leaf.dtype), tuple(leaf.shape))


def results_of(tree: Any, what: str) -> tuple[Array, ...]:
    """Return the arrays in the results of a function.

    A bundle returns dicts with text keys, tuples, and arrays in them. Other nodes are returned as one of
    these: lists and types without names as tuples, named tuples and dataclasses as dicts.

    Raises:
        BuildError: a bundle could not return a value, or would return another one.
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
        array = _array_of(path, leaf)
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
