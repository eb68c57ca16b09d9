"""Find the function of a [[program]] and make it callable with flat weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import linen, nnx, traverse_util

from prejit.compiler.lowering.program import Shapes
from prejit.compiler.models.parameters import flat_parameters, with_parameters
from prejit.runtime.errors import ManifestError

if TYPE_CHECKING:
    from prejit.compiler.lowering.user.modules import UserModules
    from prejit.compiler.manifest import manifest


@dataclass(frozen=True)
class UserFunction:
    """A function of the user, ready to be lowered.

    Attributes:
        function: takes a flat dict of weights, then the arguments of the manifest.
        weights: shapes of the weights by flat name, sorted.
        values: values of the weights, from the manifest's params or the flax.nnx module.
        modules: the modules that it was found in.
    """

    function: Callable[..., Any]
    weights: Shapes
    values: Mapping[str, np.ndarray[Any, Any]]
    modules: UserModules


def find_function(
    program: manifest.Program,
    at: str,
    parameters: Mapping[str, np.ndarray[Any, Any]] | None,
    modules: UserModules,
    nested: Callable[[Mapping[str, Any]], Any] | None = None,
) -> UserFunction:
    """Import the function that a [[program]] names, and wrap it.

    It is a function, called as function(params, ...) if the manifest gives params, else as function(...); a
    flax.linen module, which is applied to params; or a flax.nnx module, whose parameters are its own unless
    the manifest gives params.

    Args:
        program: the section of the manifest.
        at: the manifest, for errors.
        parameters: values by flat name, joined by dots; None if the manifest gives no params.
        modules: the modules beside the manifest.
        nested: makes the first argument of the function from its flat weights; None for nested dicts, by
            the dots in names.

    Raises:
        ManifestError: the module or the attribute does not exist, raises, or cannot be called.
    """
    found = program.fn
    if isinstance(found, str):
        found = modules.find(found, f"{at}: program {program.name!r}: function")
    values = dict(sorted((parameters or {}).items()))

    nested = nested or _nested
    if isinstance(found, type) and issubclass(found, nnx.Module | linen.Module):
        raise ManifestError(
            f"{at}: program {program.name!r}: function: expected a module, found the class "
            f"{program.label!r}",
            hint=f"make an instance beside it and name that: model = {found.__name__}(...)",
        )
    if isinstance(found, linen.Module):
        module = found

        def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            variables = nested(weights)
            variables = variables if "params" in variables else {"params": variables}
            return module.apply(variables, *args, **kwargs)

    elif isinstance(found, nnx.Module):
        graph, random, state = nnx.split(found, nnx.RngState, ...)
        own = flat_parameters(state)
        if parameters is not None and own.keys() != values.keys():
            differing = sorted(own.keys() ^ values.keys())
            raise ManifestError(
                f"{at}: program {program.name!r}: params: expected the names of {program.label}, "
                f"and {', '.join(differing[:8])} differ"
            )
        values = values or {name: np.asarray(leaf) for name, leaf in sorted(own.items())}

        def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            return nnx.merge(graph, random, with_parameters(state, weights))(*args, **kwargs)

    elif callable(found):
        called = found

        def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            first = (nested(weights),) if parameters is not None else ()
            return called(*first, *args, **kwargs)

    else:
        raise ManifestError(
            f"{at}: program {program.name!r}: function: expected something to call, found "
            f"{type(found).__name__} {program.label!r}"
        )
    shapes = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in values.items()}
    return UserFunction(function, shapes, values, modules)


def _nested(weights: Mapping[str, Any]) -> Any:
    return traverse_util.unflatten_dict(dict(weights), sep=".")
