"""Lower a function of the user."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import linen, nnx, traverse_util
from jax import export
from jax.extend.core import ClosedJaxpr

from prejit.compiler.lowering import traced
from prejit.compiler.lowering.export import arrays_of, export_program, shapes_of
from prejit.compiler.lowering.program import LoweredProgram, Shapes, results_of
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models import registry
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.machine.requirement import PLATFORMS

if TYPE_CHECKING:
    from prejit.compiler.lowering.user_code import UserModules
    from prejit.compiler.manifest import manifest


@dataclass(frozen=True)
class UserFunction:
    """A function of the user's, ready to be lowered.

    Attributes:
        function: takes a flat dict of weights, then the arguments of the manifest.
        weights: their shapes, by flat name; sorted.
        values: the weights themselves where they come from the object (a flax.nnx module).
        modules: among which it was found.
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
    """Imports what `function` of a [[program]] names.

    That is a function, called as function(params, ...) where the manifest gives params, else as
    function(...); a flax.linen module, applied to params; or a flax.nnx module, whose parameters are its
    own unless the manifest gives params.

    Args:
        program: the section of the manifest.
        at: the manifest, for errors.
        parameters: flat, names joined by dots; None where the manifest gives none.
        modules: those beside the manifest.
        nested: returns the first argument of the function from its flat weights; None: nested dicts, by the
            dots in names.

    Raises:
        ManifestError: the module or the attribute is not there, raises, or is nothing that can be called.
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
        own = registry.flat_parameters(state)
        if parameters is not None and own.keys() != values.keys():
            differing = sorted(own.keys() ^ values.keys())
            raise ManifestError(
                f"{at}: program {program.name!r}: params: expected the names of {program.label}, "
                f"and {', '.join(differing[:8])} differ"
            )
        values = values or {name: np.asarray(leaf) for name, leaf in sorted(own.items())}

        def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            return nnx.merge(graph, random, registry.with_parameters(state, weights))(
                *args, **kwargs
            )

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


def lower_function(
    user: UserFunction,
    program: manifest.Program,
    spec: ProgramSpec,
    at: str,
    platforms: Sequence[str],
) -> LoweredProgram:
    """Lowers a function of the user's at one bucket: for every platform, if it can be.

    Args:
        user: the function.
        program: its section of the manifest.
        spec: the program.
        at: the manifest, for errors.
        platforms: those of the manifest's targets, for which it must be possible.

    Raises:
        BuildError: it cannot be traced or lowered; the cause says why.
    """
    shapes = shapes_of(program.args, spec.bucket, f"{at}: program {program.name!r}: args")
    args, kwargs = ((), shapes) if isinstance(shapes, dict) else (tuple(shapes), {})

    def function(weights: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        return user.function(weights, *args, **kwargs)

    values = (user.weights, args, kwargs)
    what = f"{at}: program {spec.name}: cannot lower {program.label}"
    with user.modules.tracing(what):
        jaxpr = jax.jit(function, keep_unused=True).trace(*values).jaxpr
    _refuse_callbacks(jaxpr, what)
    wanted = tuple(name for name in PLATFORMS if name in platforms)
    with user.modules.tracing(what):
        exported, refused = _export_where_possible(function, values, wanted)
    if exported is None:
        raise _cannot_lower(jaxpr, refused, what)
    with user.modules.tracing(what):  # makes nodes of the user's own types
        results = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        tuple(user.weights),
        arrays_of(args or kwargs),
        results_of(results, what),
    )


def _refuse_callbacks(function: ClosedJaxpr, what: str) -> None:
    """Refuses a function that calls Python while it runs, which a server does not have.

    Raises:
        BuildError: what it calls, and where.
    """
    calls = [
        f"{traced.CALLBACKS[name]}{f' at {place}' if place else ''}"
        for name, place in traced.find(function, *traced.CALLBACKS)
    ]
    if calls:
        raise BuildError(
            f"{what}: expected a function that runs without Python, found {', '.join(dict.fromkeys(calls))}",
            hint="a bundle holds compiled programs and no Python: take the call out, or return its "
            "arguments and do it after Bundle.call",
        )


def _export_where_possible(
    function: Callable[..., Any], values: tuple[Any, ...], wanted: tuple[str, ...]
) -> tuple[export.Exported | None, dict[str, Exception]]:
    """A function for all platforms, or for those of the targets; else each platform's error."""
    for platforms in (PLATFORMS, wanted):
        with contextlib.suppress(Exception):  # it calls what only some platforms have
            return export_program(function, values, platforms), {}
    refused: dict[str, Exception] = {}
    for platform in wanted:
        try:
            export_program(function, values, (platform,))
        except Exception as error:
            refused[platform] = error
    if not refused:  # each alone, but not together
        export_program(function, values, wanted)
    return None, refused


def _cannot_lower(function: ClosedJaxpr, refused: Mapping[str, Exception], what: str) -> BuildError:
    """The error of a function that does not lower for some platforms of the manifest's targets."""
    platforms = " and ".join(refused)
    error = next(iter(refused.values()))
    hint = (
        f"leave the targets of {platforms} out, or give that platform a form of its own with "
        "jax.lax.platform_dependent"
    )
    if kernels := traced.find(function, traced.PALLAS):
        place = kernels[0][1]
        hint = (
            f"pallas_call{f' at {place}' if place else ''} has no kernel for {platforms}: leave its targets "
            "out, or pass interpret=True, which runs everywhere and is slow"
        )
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    unstable = re.search(
        r"compatibility guarantees.*?custom_call @([\w.$]+)", str(error), re.DOTALL
    )
    if unstable:
        reason = f"it calls {unstable[1]}, which jax may change with any version"
        hint = "a bundle holds a program that later versions can read: do without this function"
    return BuildError(f"{what} for {platforms}: {reason}", hint=hint)
