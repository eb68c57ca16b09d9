"""Make a flax module of the user callable with flat weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from prejit.compiler.lowering.user.flat_arrays import (
    ALL_BUT_RANDOM_STATE,
    NO_RANDOM_STATE,
    check_fit,
    differing_names,
)
from prejit.compiler.models.parameters import flat_parameters, parametrized
from prejit.runtime.device.jax_arrays import is_weak, weakened
from prejit.runtime.errors import ManifestError

Values = Mapping[str, np.ndarray[Any, Any]]
"""Weights by flat name."""


def call_module(
    found: object,
    label: str,
    at: str,
    parameters: Values | None,
    nested: Callable[[Mapping[str, Any]], Any],
) -> tuple[Callable[..., Any], Values] | None:
    """Return a function of flat weights and arguments that calls a module, and the weights; None: it is none.

    Args:
        found: what the user named: perhaps a module of flax.linen or flax.nnx.
        label: its name, for errors.
        at: the section of the manifest, for errors.
        parameters: values by flat name, sorted; None if the manifest gives no params.
        nested: makes the params of a linen module from flat weights.

    Raises:
        ManifestError: it is the class of a module, or params has other names than the module.
    """
    if isinstance(found, type) and issubclass(found, nnx.Module | linen.Module):
        raise ManifestError(
            f"{at}: function: expected a module, found the class {label!r}",
            hint=f"make an instance beside it and name that: model = {found.__name__}(...)",
        )
    if isinstance(found, linen.Module):
        return _of_linen(found, nested), parameters or {}
    if isinstance(found, nnx.Module):
        return _of_nnx(found, label, at, parameters)
    return None


def _of_linen(
    module: linen.Module, nested: Callable[[Mapping[str, Any]], Any]
) -> Callable[..., Any]:
    def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return module.apply(variables_of(nested(weights)), *args, **kwargs)

    return function


def variables_of(nested: Any) -> Any:
    """Return the variables of a flax.linen module, from variables or from its params alone."""
    return nested if "params" in nested else {"params": nested}


def _of_nnx(
    module: nnx.Module, label: str, at: str, parameters: Values | None
) -> tuple[Callable[..., Any], Values]:
    own = own_values(module)
    if parameters is not None and (differing := differing_names(own, parameters)):
        random = flat_parameters(nnx.state(module, nnx.RngState))
        raise ManifestError(
            f"{at}: params: expected the names of {label}: {differing}",
            hint=NO_RANDOM_STATE if parameters.keys() & random.keys() else ALL_BUT_RANDOM_STATE,
        )
    check_fit(own, parameters or {}, f"{at}: params", label)
    values = parameters or {
        name: weakened(np.asarray(leaf)) if is_weak(leaf) else np.asarray(leaf)
        for name, leaf in own.items()
    }
    bind = parametrized(module).bind

    def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return bind(weights)(*args, **kwargs)

    return function, values


def own_values(module: nnx.Module) -> dict[str, Any]:
    """Return what a flax.nnx module holds, by name, in alphabetical order, without random state."""
    values = flat_parameters(nnx.split(module, nnx.RngState, ...)[2])
    return {
        name: each if hasattr(each, "shape") else jnp.asarray(each) for name, each in values.items()
    }
