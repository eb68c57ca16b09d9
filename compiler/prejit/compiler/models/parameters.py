"""The parameters of a module, by the names of the published tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from prejit.compiler.models.layers.linear import Linear


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model.

    Attributes:
        shape: shape of the array.
        in_out: whether it is a matrix stored (in, out), where torch's Linear has (out, in).
    """

    shape: tuple[int, ...]
    in_out: bool


def parameters_of(module: nnx.Module) -> dict[str, Parameter]:
    """Return the parameters of a module by name, in alphabetical order."""
    in_out = {
        ".".join(map(str, (*path, "weight")))
        for path, part in nnx.iter_modules(module)
        if isinstance(part, Linear) and part.in_out
    }
    leaves = flat_parameters(nnx.state(module))
    return {name: Parameter(leaf.shape, name in in_out) for name, leaf in leaves.items()}


def flat_parameters(state: nnx.State) -> dict[str, Any]:
    """Return the leaves of a state by name, `transformer.h.0.ln_1.weight`, in alphabetical order."""
    return dict(sorted(zip(_names(state), jax.tree.leaves(state), strict=True)))


def with_parameters(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """Return a state of the same structure with other values, named as `flat_parameters` names them."""
    return jax.tree.unflatten(jax.tree.structure(state), [values[name] for name in _names(state)])


def _names(state: nnx.State) -> list[str]:
    """Return the names of the leaves. Steps without a key lead from a flax variable to its value."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [
        ".".join(str(step.key) for step in path if isinstance(step, jax.tree_util.DictKey))
        for path in paths
    ]
