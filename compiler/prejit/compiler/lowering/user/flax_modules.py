"""Make a flax module of the user callable with flat weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.extend.core import Jaxpr

from prejit.compiler.lowering.user.flat_arrays import (
    ALL_BUT_RANDOM_STATE,
    NO_RANDOM_STATE,
    check_fit,
    differing_names,
)
from prejit.compiler.lowering.user.traced_primitives import called_by
from prejit.compiler.models.parameters import flat_parameters, parametrized
from prejit.runtime.base.wording import few
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
        called = bind(weights)
        result = called(*args, **kwargs)
        if set_anew := {
            name for name, each in own_values(called).items() if each is not weights.get(name)
        }:

            def after(weights: Mapping[str, Any]) -> dict[str, Any]:
                called = bind(weights)
                called(*args, **kwargs)
                return {name: each for name, each in own_values(called).items() if name in set_anew}

            _check_unchanged(after, weights, f"{at}: function: {label}")
        return result

    return function, values


def _check_unchanged(
    after: Callable[[Mapping[str, Any]], Mapping[str, Any]], weights: Mapping[str, Any], what: str
) -> None:
    """Check that a call of a module leaves its variables as they are. A bundle would not keep what it sets.

    Transformations of nnx set all variables anew, so what comes out of another function than one that is
    jitted counts as unchanged. `after` returns variables after a call, by name, of the module's `weights`.

    Raises:
        ManifestError: the call computes a variable.
    """
    traced, shapes = jax.make_jaxpr(after, return_shape=True)(weights)
    computed = _computed(traced.jaxpr)
    changed = [
        name for place, name in enumerate(sorted(shapes)) if computed[place] and name in weights
    ]
    if changed:
        raise ManifestError(
            f"{what}: expected a module that leaves its variables as they are, found one that changes "
            f"{few(changed, 8)}",
            hint="for inference call .eval() on the module; else take the state as an argument and return it "
            "anew: Bundle.bind keeps it between calls",
        )


def _computed(jaxpr: Jaxpr) -> list[bool]:
    """Return for each result whether an operation computes it, and no loop or other called function."""
    made = {id(var): (each, at) for each in jaxpr.eqns for at, var in enumerate(each.outvars)}
    found = []
    for result in jaxpr.outvars:
        equation, at = made.get(id(result), (None, 0))
        called = [] if equation is None else [*called_by(equation)]
        if equation is not None and equation.primitive.name in _JITTED:
            found.append(_computed(called[0][0])[at])
        else:
            found.append(equation is not None and not called)
    return found


_JITTED = ("jit", "pjit")
"""jax's names of the operation that calls a jitted function, such as most of jax.numpy."""


def own_values(module: nnx.Module) -> dict[str, Any]:
    """Return what a flax.nnx module holds, by name, in alphabetical order, without random state."""
    values = flat_parameters(nnx.split(module, nnx.RngState, ...)[2])
    return {
        name: each if hasattr(each, "shape") else jnp.asarray(each) for name, each in values.items()
    }
