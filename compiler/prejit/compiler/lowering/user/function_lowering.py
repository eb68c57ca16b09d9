"""Lower a function of the user at one bucket."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import ClosedJaxpr
from jax.sharding import use_abstract_mesh

from prejit.compiler.lowering.export import (
    LoweredProgram,
    SizedTrial,
    abstract_mesh,
    export_program,
    sharding_on,
)
from prejit.compiler.lowering.user.flat_arrays import Arrays, Example, arrays_of
from prejit.compiler.lowering.user.found_function import UserFunction
from prejit.compiler.lowering.user.nondeterminism import refusing_nondeterminism
from prejit.compiler.lowering.user.repeating import repeated
from prejit.compiler.lowering.user.shardings import Shardings, split_results
from prejit.compiler.lowering.user.source_modules import modules_of
from prejit.compiler.lowering.user.trace_inputs import is_installed
from prejit.compiler.lowering.user.traced_primitives import (
    CALLBACKS,
    INDEXING,
    PALLAS,
    called_files,
    equations,
    find_calls,
    noting_files,
    source_files,
)
from prejit.compiler.lowering.user.varying_sizes import (
    Shapes,
    Variables,
    numbers_in,
    open_sizes,
    padded_sizes,
    size_limits,
    variables_of,
)
from prejit.compiler.manifest.manifest import REPEAT, UNCHECKED
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.runtime.device import _jax_parts, jax_settings
from prejit.runtime.device.jax_arrays import data_shape, is_key, key_name
from prejit.runtime.device.portable import version_of
from prejit.runtime.errors import BuildError, ManifestError, PrejitError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.constants import encode
from prejit.runtime.machine.fingerprint import PLATFORMS

if TYPE_CHECKING:
    from prejit.compiler.manifest import manifest

_MANY_OPERATIONS = 1000
"""A function with more operations than this is compared at one size, which takes as long as lowering it."""


def lower_function(
    user: UserFunction,
    program: manifest.Program,
    spec: ProgramSpec,
    at: str,
    platforms: Sequence[str],
    mesh: Mesh | None = None,
    calls: Sequence[str] = (),
) -> LoweredProgram:
    """Lower a function of the user at one bucket, for every platform that is possible.

    It must be possible for `platforms`, those of the manifest's targets. `mesh` has the devices that it
    is split over (None: one device), and `calls` the names of custom calls that the user's libraries
    serve. `at` is the manifest, for errors.

    Raises:
        BuildError: it cannot be traced or lowered.
        ManifestError: its arguments or shardings have mistakes.
    """
    section = f"{at}: program {program.name!r}"
    shardings = Shardings(program.shardings, mesh, section)
    with user.modules.in_use():  # or their classes and functions would be constants without names
        example = user.example(spec.bucket, f"{section}: args")
        taken = arrays_of(example, f"{section}: args", tuple(program.donate))
        constants = [*taken.constants, *((encode(value), value) for value in spec.static.values())]
    leaves, structure = example.shapes, jax.tree.structure(example.value)
    arguments = tuple(
        replace(array, sharding=shardings.of(array.path, array.shape)) for array in taken.arrays
    )
    weights = {
        name: shardings.of(("params", *name.split(".")), shape.shape)
        for name, shape in user.weights.items()
    }
    call = _with_static(user, program, spec, section)
    returned: list[Arrays] = []
    what = f"{at}: program {spec.name}: cannot lower {program.label}"

    def function(weights: Mapping[str, Any], *data: Any, call: Callable[..., Any] = call) -> Any:
        """Call the user's function; random keys go in and out as their data."""
        given = jax.tree.unflatten(structure, map(_as_given, data, leaves))
        args, kwargs = ((), given) if isinstance(given, dict) else (tuple(given), {})
        result = call(weights, *args, **kwargs)
        found = [jnp.asarray(leaf) for leaf in jax.tree.leaves(result)]
        if not returned:
            shapes = [*map(_shape_of, found)]
            returned.append(arrays_of(Example(result, shapes), f"{what}: result", given=constants))
        return list(map(_as_data, found))

    values = (user.weights, *map(data_shape, leaves))
    wanted = tuple(name for name in PLATFORMS if name in platforms)
    table = example.value if isinstance(example.value, dict) else {}
    by_place = user.wrapped[: len(table)]
    if by_place and {*by_place} <= table.keys():
        placed = _with_static(user, program, spec, section, by_place)
        with user.modules.in_use(), _on(mesh):
            texts = [_text_of(partial(function, call=f), values, wanted) for f in (call, placed)]
        if None not in texts[1:] and texts[0] != texts[1]:
            raise _needs_list(program, by_place, section)
    pure = contextlib.nullcontext() if program.impure else refusing_nondeterminism(what)
    files = set[str]()
    is_for_jit = user.parameters is not None
    noting = noting_files(files) if is_for_jit else contextlib.nullcontext()
    with user.modules.tracing(what), _on(mesh), pure, noting:
        jaxpr = jax.jit(function, keep_unused=True).trace(*values).jaxpr
        settings = jax_settings.to_record()
    _refuse_callbacks(jaxpr, what)
    _refuse_refs(jaxpr, what)
    [given] = returned
    results = split_results(shardings, (taken.tree, arguments), (given.tree, given.arrays))
    shardings.check_all_used()

    def data_at(bucket: Mapping[str, Any]) -> list[Any]:
        return [*map(data_shape, user.example(bucket, f"{section}: args").shapes)]

    def shapes_at(bucket: Mapping[str, int]) -> tuple[Shapes, Shapes]:
        data = data_at(bucket)
        outputs = jax.eval_shape(function, user.weights, *data)
        return [shape.shape for shape in data], [shape.shape for shape in outputs]

    with user.modules.in_use(), _on(mesh):
        variables = variables_of(shapes_at, spec.bucket, spec.pad, spec.open_sizes, section)
    arguments = _with_variables(arguments, variables[0])
    results = _with_variables(results, variables[1])
    options = {**_options(weights, arguments, results, mesh), "calls": calls}
    with user.modules.tracing(what), _on(mesh):
        exported, refused = _export_where_possible(function, values, wanted, options)
    if exported is None:
        raise _cannot_lower(jaxpr, refused, what)
    _check_devices(exported.nr_devices, mesh, what)
    with user.modules.tracing(what):
        portable = _refined(exported.mlir_module_serialized)
    symbolic = None
    if spec.open_sizes:
        if mesh is not None:
            raise ManifestError(f"{section}: open_sizes: expected no [mesh] beside them")

        def values_at_any_size(limits: Sequence[str] = ()) -> tuple[Any, ...]:
            sizes = jax.export.symbolic_shape(",".join(spec.open_sizes), constraints=limits)
            bucket = {**spec.bucket, **dict(zip(spec.open_sizes, sizes, strict=True))}
            return user.weights, *data_at(bucket)

        with user.modules.tracing(
            f"{section}: open_sizes: cannot lower {program.label} for any size"
        ):
            of_symbols = jax.jit(function, keep_unused=True).trace(*values_at_any_size()).jaxpr
            values = values_at_any_size(size_limits(of_symbols, spec.open_sizes))
            of_any_size = export_program(function, values, exported.platforms, **options)
        symbolic = of_any_size.mlir_module_serialized

    def trials() -> tuple[SizedTrial, ...]:
        """Return the function at other sizes. Where it raises an error there is nothing to compare."""
        found = []
        has_places = bool(find_calls(jaxpr, *INDEXING))
        for sizes, padded in _trial_sizes(user, program, spec, jaxpr):
            with contextlib.suppress(PrejitError), user.modules.tracing(what):
                values = (user.weights, *data_at({**spec.bucket, **sizes}))
                at_size = export_program(function, values, ("cpu",), calls=calls)
                module = at_size.mlir_module_serialized
                found.append(SizedTrial(sizes, padded, has_places, module))
        return tuple(found)

    modules: tuple[str, ...] = ()
    if is_for_jit:
        own = {file for file in files if not is_installed(file)}
        with user.modules.in_use():
            held = (user.function, example.value, tuple(spec.static.values()))
            modules = modules_of(held, called_files(jaxpr, __file__) | own)
        if isinstance(program.fn, str):
            modules = tuple(sorted({program.fn.partition(":")[0], *modules}))
    return LoweredProgram(
        portable,
        exported.platforms,
        tuple(user.weights),
        arguments,
        results,
        {name: axes for name, axes in weights.items() if axes},
        arguments_tree=trees.to_text(taken.tree),
        results_tree=trees.to_text(given.tree),
        symbolic=symbolic,
        traced=jaxpr,
        settings=settings,
        state=_state(user, example.value, spec) or None,
        modules=modules,
        search_path=user.modules.search_path() if modules else ((), ()),
        narrowed=user.narrowed(spec.bucket, f"{section}: args"),
        trials=trials if mesh is None and "cpu" in exported.platforms else tuple,
    )


def _needs_list(program: manifest.Program, by_place: Sequence[str], section: str) -> ManifestError:
    return ManifestError(
        f"{section}: args: expected a list, because {program.label} is a wrapper that treats "
        f"{', '.join(by_place)} by position otherwise than by name; found a table",
        hint="list the arguments in their order, as in args = [...]",
    )


def _refuse_refs(jaxpr: ClosedJaxpr, what: str) -> None:
    if any(isinstance(value, jax.Ref) for value in jaxpr.consts):
        raise BuildError(
            f"{what}: expected a function of its arguments alone, found a Ref that it changes in place",
            hint="take its array as an argument and return it anew; Bundle.bind keeps it between calls",
        )


def _check_devices(found: int, mesh: Mesh | None, what: str) -> None:
    if found != (count := 1 if mesh is None else mesh.size):
        raise BuildError(
            f"{what}: expected a function for {count} device{'s' * (count > 1)}, found one for "
            f"{found}: it names a mesh of its own, as in jax.pmap, shard_map or a constraint",
            hint="let the [mesh] of the manifest, or the shardings of jax.jit, have that mesh and its axes",
        )


def _trial_sizes(
    user: UserFunction, program: manifest.Program, spec: ProgramSpec, traced: ClosedJaxpr
) -> list[tuple[dict[str, int], bool]]:
    """Return sizes at which to compare a program with its function, and whether it is padded for them."""
    pad = () if UNCHECKED in program.pad else spec.pad
    opened = () if UNCHECKED in program.open_sizes else spec.open_sizes
    if not (pad or opened):
        return []
    numbers = numbers_in(
        file for file in {user.file, *source_files(traced)} if not is_installed(file)
    )
    found = [
        [(sizes, True) for sizes in padded_sizes(spec.bucket, pad, numbers)],
        [(sizes, False) for sizes in open_sizes(spec.bucket, opened, numbers)],
    ]
    operations = sum(1 for _ in equations(traced.jaxpr))
    most = 1 if operations > _MANY_OPERATIONS else None
    return [each for kind in found for each in kind[:most]]


def _options(
    weights: Mapping[str, tuple[str, ...]],
    arguments: Sequence[Array],
    results: Sequence[Array],
    mesh: Mesh | None,
) -> dict[str, Any]:
    """Return the options of jax.jit for donated arguments, and for what a mesh splits."""
    donated = tuple(1 + place for place, array in enumerate(arguments) if array.donated)
    if mesh is None:
        return {"donate_argnums": donated}
    place_on = partial(sharding_on, abstract_mesh(mesh))
    return {
        "donate_argnums": donated,
        "in_shardings": (
            {name: place_on(axes) for name, axes in weights.items()},
            *(place_on(array.sharding) for array in arguments),
        ),
        "out_shardings": [place_on(array.sharding) for array in results],
    }


def _text_of(
    function: Callable[..., Any], values: tuple[Any, ...], platforms: tuple[str, ...]
) -> str | None:
    """Return a function's StableHLO for the first of the platforms; None: it has none."""
    with contextlib.suppress(Exception):  # of the user's code
        traced = jax.jit(function, keep_unused=True).trace(*values)
        return traced.lower(lowering_platforms=platforms[:1]).as_text()
    return None


def _with_static(
    user: UserFunction,
    program: manifest.Program,
    spec: ProgramSpec,
    section: str,
    by_place: Sequence[str] = (),
) -> Callable[..., Any]:
    """Return the user's function of weights and arguments, with its static arguments, repeated if wanted.

    It passes the arguments in `by_place` by position, although it takes them by name.
    """
    static = dict(spec.static)
    times = static.pop(REPEAT, None) if program.repeat else None

    def call(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        def once(*args: Any, **kwargs: Any) -> Any:
            args = (*args, *(kwargs.pop(name) for name in by_place))
            return user.function(weights, *args, **kwargs, **static)

        if times is None:
            return once(*args, **kwargs)
        return repeated(once, program.carry, int(times), section)(*args, **kwargs)

    return call


def _on(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which jax knows the axes of a mesh."""
    return contextlib.nullcontext() if mesh is None else use_abstract_mesh(abstract_mesh(mesh))


def _state(user: UserFunction, given: Any, spec: ProgramSpec) -> dict[str, str]:
    """Return the state of a function, without the defaults of parameters that a program has otherwise."""
    if user.parameters is None:
        return {}
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    bound = {*user.parameters.named(args, kwargs), *spec.static}
    unread = {f"default {name}" for name in bound}
    return {place: text for place, text in user.state.items() if place not in unread}


def _with_variables(arrays: Sequence[Array], variables: Variables) -> tuple[Array, ...]:
    return tuple(
        replace(array, variables=names) for array, names in zip(arrays, variables, strict=True)
    )


def _as_given(data: Any, leaf: Any) -> Any:
    """Return an argument as the user's function takes it: a random key, or the array as it is."""
    return jax.random.wrap_key_data(data, impl=key_name(leaf)) if is_key(leaf) else data


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=jax.typeof(array).weak_type)


def _as_data(leaf: Any) -> Any:
    """Return the data of a random key, or another value as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _refuse_callbacks(function: ClosedJaxpr, what: str) -> None:
    """Refuse a function that calls Python while it runs, which a bundle cannot hold."""
    calls = [
        f"{CALLBACKS[name]}{f' at {place}' if place else ''}"
        for name, place in find_calls(function, *CALLBACKS)
    ]
    if calls:
        raise _calls_python(what, ", ".join(dict.fromkeys(calls)))


def _calls_python(what: str, found: str, advice: str = "") -> BuildError:
    return BuildError(
        f"{what}: expected a function that runs without Python, found {found}",
        hint="a bundle holds compiled programs and no Python: take the call out, or return its "
        f"arguments and do it after Bundle.call{advice}",
    )


def _export_where_possible(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    wanted: tuple[str, ...],
    options: Mapping[str, Any],
) -> tuple[export.Exported | None, dict[str, Exception]]:
    """Export a function for all platforms where that is possible; else return each wanted platform's error.

    The wanted platforms are those of the targets. They do not decide the program, or another target would
    compile it again for all. Options are those of `export_program`.
    """
    with contextlib.suppress(Exception):  # it calls something that only some platforms have
        return export_program(function, values, PLATFORMS, **options), {}
    refused: dict[str, Exception] = {}
    for platform in PLATFORMS:
        try:
            export_program(function, values, (platform,), **options)
        except Exception as error:
            refused[platform] = error
    if unmet := {platform: refused[platform] for platform in wanted if platform in refused}:
        return None, unmet
    possible = tuple(platform for platform in PLATFORMS if platform not in refused)
    return export_program(function, values, possible, **options), {}


def _cannot_lower(function: ClosedJaxpr, refused: Mapping[str, Exception], what: str) -> BuildError:
    """Return the error for a function that does not lower for some platforms of the targets."""
    platforms = " and ".join(refused)
    error = next(iter(refused.values()))
    if "serialization of host_callbacks" in str(error):  # jax.export
        return _calls_python(
            what,
            "a callback that an operation of a library becomes when it is lowered",
            "; environment variable EQX_ON_ERROR=nan makes checks of equinox and lineax give NaN instead",
        )
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
        reason = (
            f"it calls {unstable[1]}, which is in no [[library]] of the manifest, and which jax may change "
            "with any version"
        )
        hint = (
            "if it is a handler of yours, name its library in the manifest: [[library]] with path and "
            f'handlers = {{ "{unstable[1]}" = SYMBOL }}; a function of jax that calls it can be in no bundle'
        )
    return BuildError(f"{what} for {platforms}: {reason}", hint=hint)


def _refined(portable: bytes) -> bytes:
    """Return a portable artifact with the sizes that follow from those of its arguments, which are static.

    Only a call of a function that was exported with symbolic sizes leaves others.
    """
    with _jax_parts.import_mlir().Context():
        module = _jax_parts.parse_stablehlo(portable)
        if "tensor<?" not in module.operation.get_asm(large_elements_limit=16):
            return portable
        return _jax_parts.refined(module, version_of(portable))
