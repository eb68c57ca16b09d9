"""Find the function of a [[program]] and make it callable with flat weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from prejit.compiler.lowering.program import Shapes
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
    found, where = program.fn, f"{at}: program {program.name!r}"
    if isinstance(found, str):
        found = modules.find(found, f"{where}: function")
    values = None if parameters is None else dict(sorted(parameters.items()))
    nested = nested or _nested
    module = None
    if "flax" in sys.modules:  # else it is no module of flax, whose import takes 0.4 s
        from prejit.compiler.lowering.user.flax_modules import call_module

        module = call_module(found, program.label, where, values, nested)
    if module is not None:
        function, weights = module
    elif callable(found):
        function, weights = _calling(found, nested if values is not None else None), values or {}
    else:
        raise ManifestError(
            f"{where}: function: expected something to call, found "
            f"{type(found).__name__} {program.label!r}"
        )
    shapes = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in weights.items()}
    return UserFunction(function, shapes, weights, modules)


def _calling(
    called: Callable[..., Any], nested: Callable[[Mapping[str, Any]], Any] | None
) -> Callable[..., Any]:
    """Return a function of flat weights and arguments; `nested` is None where `called` takes no weights."""

    def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        first = () if nested is None else (nested(weights),)
        return called(*first, *args, **kwargs)

    return function


def _nested(weights: Mapping[str, Any]) -> Any:
    from flax import traverse_util

    return traverse_util.unflatten_dict(dict(weights), sep=".")
