"""Lower a function of the user at one bucket."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import ClosedJaxpr

from prejit.compiler.lowering.export import export_program
from prejit.compiler.lowering.program import LoweredProgram
from prejit.compiler.lowering.user.arrays import arrays_of, is_key, key_name
from prejit.compiler.lowering.user.calls import CALLBACKS, PALLAS, find_calls
from prejit.compiler.lowering.user.finding import UserFunction
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.runtime.device._jaxlib import refine_shapes
from prejit.runtime.errors import BuildError
from prejit.runtime.format import trees
from prejit.runtime.machine.requirement import PLATFORMS

if TYPE_CHECKING:
    from prejit.compiler.manifest import manifest


def lower_function(
    user: UserFunction,
    program: manifest.Program,
    spec: ProgramSpec,
    at: str,
    platforms: Sequence[str],
) -> LoweredProgram:
    """Lower a function of the user at one bucket, for every platform that is possible.

    Args:
        user: the function.
        program: its section of the manifest.
        spec: the program.
        at: the manifest, for errors.
        platforms: the platforms of the manifest's targets, for which it must be possible.

    Raises:
        BuildError: it cannot be traced or lowered.
    """
    where = f"{at}: program {program.name!r}: args"
    with user.modules.in_use():
        example = user.example(spec.bucket, where)
    leaves, structure = jax.tree.flatten(example)
    arguments = arrays_of(example, where, tuple(program.donate))
    returned: list[Any] = []

    def function(weights: Mapping[str, Any], *data: Any) -> Any:
        """Call the user's function; random keys go in and out as their data."""
        given = jax.tree.unflatten(structure, map(_as_given, data, leaves))
        args, kwargs = ((), given) if isinstance(given, dict) else (tuple(given), {})
        result = jax.tree.map(jnp.asarray, user.function(weights, *args, **kwargs, **spec.static))
        returned[:] = [jax.tree.map(_shape_of, result)]  # the user's own nodes, of shapes
        return [_as_data(leaf) for leaf in jax.tree.leaves(result)]

    data = [jax.eval_shape(_as_data, leaf) if is_key(leaf) else leaf for leaf in leaves]
    values = (user.weights, *data)
    what = f"{at}: program {spec.name}: cannot lower {program.label}"
    with user.modules.tracing(what):
        jaxpr = jax.jit(function, keep_unused=True).trace(*values).jaxpr
    _refuse_callbacks(jaxpr, what)
    wanted = tuple(name for name in PLATFORMS if name in platforms)
    donated = tuple(1 + n for n, array in enumerate(arguments.arrays) if array.donated)
    with user.modules.tracing(what):
        exported, refused = _export_where_possible(function, values, wanted, donated)
    if exported is None:
        raise _cannot_lower(jaxpr, refused, what)
    results = arrays_of(returned[0], f"{what}: result")
    with user.modules.tracing(what):
        portable = refine_shapes(exported.mlir_module_serialized)
    return LoweredProgram(
        portable,
        exported.platforms,
        tuple(user.weights),
        arguments.arrays,
        results.arrays,
        arguments_tree=trees.to_text(arguments.tree),
        results_tree=trees.to_text(results.tree),
    )


def _as_given(data: Any, leaf: Any) -> Any:
    """Return an argument as the user's function takes it: a random key, or the array as it is."""
    return jax.random.wrap_key_data(data, impl=key_name(leaf)) if is_key(leaf) else data


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _as_data(leaf: Any) -> Any:
    """Return the data of a random key, or another value as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _refuse_callbacks(function: ClosedJaxpr, what: str) -> None:
    """Refuse a function that calls Python while it runs, which a bundle cannot hold.

    Raises:
        BuildError: it does; the error names each call and its line.
    """
    calls = [
        f"{CALLBACKS[name]}{f' at {place}' if place else ''}"
        for name, place in find_calls(function, *CALLBACKS)
    ]
    if calls:
        raise BuildError(
            f"{what}: expected a function that runs without Python, found {', '.join(dict.fromkeys(calls))}",
            hint="a bundle holds compiled programs and no Python: take the call out, or return its "
            "arguments and do it after Bundle.call",
        )


def _export_where_possible(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    wanted: tuple[str, ...],
    donated: tuple[int, ...],
) -> tuple[export.Exported | None, dict[str, Exception]]:
    """Export a function for all platforms, or those of the targets; else return each platform's error."""
    for platforms in (PLATFORMS, wanted):
        with contextlib.suppress(Exception):  # it calls something that only some platforms have
            return export_program(function, values, platforms, donate_argnums=donated), {}
    refused: dict[str, Exception] = {}
    for platform in wanted:
        try:
            export_program(function, values, (platform,), donate_argnums=donated)
        except Exception as error:
            refused[platform] = error
    if not refused:  # each platform lowers alone, but not together
        export_program(function, values, wanted, donate_argnums=donated)
    return None, refused


def _cannot_lower(function: ClosedJaxpr, refused: Mapping[str, Exception], what: str) -> BuildError:
    """Return the error for a function that does not lower for some platforms of the targets."""
    platforms = " and ".join(refused)
    error = next(iter(refused.values()))
    hint = (
        f"leave the targets of {platforms} out, or give that platform a form of its own with "
        "jax.lax.platform_dependent"
    )
    if kernels := find_calls(function, PALLAS):
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
