"""Objects of the user that hold arrays: find the arrays, and make the object again with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.lowering.user.flat_arrays import is_key
from prejit.runtime.errors import ManifestError

Bind = Callable[[Mapping[str, Any]], Any]

ALL_BUT_RANDOM_STATE = (
    "save and give nnx.state(model, nnx.Not(nnx.RngState)): nnx.Param alone leaves out what BatchNorm and "
    "others keep beside their parameters"
)
"""The hint of errors about params that lack a part of a module of flax.nnx."""

NO_RANDOM_STATE = (
    "random state is no parameter, and the module keeps its own: save and give "
    "nnx.state(model, nnx.Not(nnx.RngState)), or the last part of nnx.split(model, nnx.RngState, ...)"
)
"""The hint of errors about params that hold random state, as of flax.nnx.Dropout."""


def arrays_in(tree: Any, spelled: Callable[[Any], str]) -> tuple[dict[str, Any], Bind]:
    """Return the arrays of a pytree by name, and a function that puts others in their place.

    Leaves that are no arrays, such as activation functions, and random keys stay what they are.

    Args:
        tree: the pytree; arrays may be shapes (jax.ShapeDtypeStruct).
        spelled: returns the name of a leaf from its path.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = [(spelled(path) if _is_array(leaf) else None, leaf) for path, leaf in leaves]

    def bind(values: Mapping[str, Any]) -> Any:
        parts = [leaf if name is None else values[name] for name, leaf in named]
        return jax.tree.unflatten(structure, parts)

    return {name: leaf for name, leaf in named if name is not None}, bind


def differing_names(own: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return in words, for errors, the names that only the object or only its params have; empty: none."""
    sides = (
        (sorted(own.keys() - given.keys()), "in the module alone"),
        (sorted(given.keys() - own.keys()), "in params alone"),
    )
    return "; ".join(
        f"{', '.join(names[:8])}{f' and {len(names) - 8} more' * (len(names) > 8)} "
        f"{'is' if len(names) == 1 else 'are'} {where}"
        for names, where in sides
        if names
    )


def check_fit(own: Mapping[str, Any], given: Mapping[str, Any], where: str, label: str) -> None:
    """Check that given arrays can replace an object's own ones of these names.

    Floating-point numbers may have another precision.

    Raises:
        ManifestError: one has another shape, or a dtype of another kind.
    """
    for name, value in given.items():
        leaf, dtype = own[name], jax.dtypes.canonicalize_dtype(own[name].dtype)
        same_kind = np.can_cast(value.dtype, dtype, "same_kind") or all(
            jnp.issubdtype(each, jnp.floating) for each in (value.dtype, dtype)
        )
        if tuple(value.shape) != tuple(leaf.shape) or not same_kind:
            raise ManifestError(
                f"{where}: {name}: expected {dtype}{[*leaf.shape]}, as in {label}; found "
                f"{value.dtype}{[*value.shape]}"
            )


def _is_array(leaf: Any) -> bool:
    held = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return held and not is_key(leaf)
