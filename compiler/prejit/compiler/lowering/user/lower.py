"""Lower a function of the user at one bucket."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import export
from jax.extend.core import ClosedJaxpr

from prejit.compiler.lowering.export import export_program
from prejit.compiler.lowering.program import LoweredProgram
from prejit.compiler.lowering.user.arrays import arrays_of, results_of, shapes_of
from prejit.compiler.lowering.user.calls import CALLBACKS, PALLAS, find_calls
from prejit.compiler.lowering.user.finding import UserFunction
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.runtime.errors import BuildError
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
    with user.modules.tracing(what):  # creates nodes of the user's own types
        results = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        tuple(user.weights),
        arrays_of(args or kwargs),
        results_of(results, what),
    )


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
    function: Callable[..., Any], values: tuple[Any, ...], wanted: tuple[str, ...]
) -> tuple[export.Exported | None, dict[str, Exception]]:
    """Export a function for all platforms, or those of the targets; else return each platform's error."""
    for platforms in (PLATFORMS, wanted):
        with contextlib.suppress(Exception):  # it calls something that only some platforms have
            return export_program(function, values, platforms), {}
    refused: dict[str, Exception] = {}
    for platform in wanted:
        try:
            export_program(function, values, (platform,))
        except Exception as error:
            refused[platform] = error
    if not refused:  # each platform lowers alone, but not together
        export_program(function, values, wanted)
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
