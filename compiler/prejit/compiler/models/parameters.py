"""The parameters of a model, by the names of the published tensors, apart from what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
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


@dataclass(frozen=True)
class Parametrized:
    """A model apart from its parameters: programs take them as arguments.

    Attributes:
        weights: shape and dtype of each parameter by name, in alphabetical order.
        bind: returns the model that has these values, by the same names; they may be traced.
    """

    weights: Mapping[str, jax.ShapeDtypeStruct]
    bind: Callable[[Mapping[str, jax.Array]], Any]


def parametrized(module: nnx.Module) -> Parametrized:
    """Return a module apart from its parameters. They may be abstract.

    Random state is no parameter: the module keeps it.
    """
    graph, random, state = nnx.split(module, nnx.RngState, ...)
    shapes = {
        name: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
        for name, leaf in flat_parameters(state).items()
    }
    return Parametrized(
        shapes, lambda values: nnx.merge(graph, random, with_parameters(state, values))
    )


def reduced(model: Parametrized, uses: Callable[[str], bool]) -> Parametrized:
    """Return a model for programs that use some of its parameters, by name; the others are zeros in it."""
    weights = {name: value for name, value in model.weights.items() if uses(name)}
    others = {name: value for name, value in model.weights.items() if name not in weights}

    def bind(values: Mapping[str, jax.Array]) -> Any:
        unused = {name: jnp.zeros(each.shape, each.dtype) for name, each in others.items()}
        return model.bind({**values, **unused})

    return Parametrized(weights, bind)


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
    return dict(sorted(zip(names_of(state), jax.tree.leaves(state), strict=True)))


def with_parameters(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """Return a state of the same structure with other values, named as `flat_parameters` names them."""
    return jax.tree.unflatten(jax.tree.structure(state), [values[name] for name in names_of(state)])


def names_of(state: nnx.State) -> list[str]:
    """Return the names of the leaves. Steps without a key lead from a flax variable to its value."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [
        ".".join(str(step.key) for step in path if isinstance(step, jax.tree_util.DictKey))
        for path in paths
    ]


class NameStep(nnx.Module):
    """A step in the names of published tensors; it computes nothing."""


def place(module: nnx.Module, name: str, part: Any) -> None:
    """Put a part into a module under a published name, `self_attn.q_proj`, with a NameStep for each step."""
    *steps, last = name.split(".")
    for step in steps:
        if not hasattr(module, step):
            setattr(module, step, NameStep())
        module = getattr(module, step)
    setattr(module, last, part)


def part_of(module: nnx.Module, name: str) -> Any:
    """Return the part that `place` put there."""
    return reduce(getattr, name.split("."), module)
