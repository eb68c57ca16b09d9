"""Find the function of a [[program]] and make it callable with flat weights.

It may be a program that was lowered elsewhere: an artifact of `jax.export`, or StableHLO from any framework.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import export
from jax.extend.mlir import ir as mlir_ir
from jax.extend.mlir.dialects import stablehlo as mlir_stablehlo

from prejit.compiler.base.suggestions import did_you_mean
from prejit.compiler.lowering.export import LoweredProgram, Shapes
from prejit.compiler.lowering.user.flat_arrays import (
    Example,
    arrays_in,
    check_fit,
    differing_names,
    dotted,
    example_of,
    narrow_parameter,
    narrowed,
)
from prejit.compiler.manifest.manifest_checks import key_problems
from prejit.runtime.device.jax_arrays import is_weak, weakened
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.format import constants, trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.jitted.jit_call import Parameters, function_state
from prejit.runtime.programs.pytree import changes_itself
from prejit.runtime.recorded.hook.plain_functions import is_plain

if TYPE_CHECKING:
    from prejit.compiler.lowering.user.modules import UserModules
    from prejit.compiler.manifest import manifest


@dataclass(frozen=True)
class UserFunction:
    """A function of the user, ready to be lowered.

    Attributes:
        function: takes a flat dict of weights, then the arguments of the manifest.
        args: the manifest's args, or the function that it names, or those of the file.
        weights: shapes of the weights by flat name, sorted.
        values: values of the weights, from the manifest's params or the flax.nnx module.
        modules: the modules that it was found in.
        file: the file of its code; empty: it has none in Python.
        narrower: in words, the weights that jax takes for narrower ones than they are.
        wrapped: of a wrapper, such as of jax.vmap, the names of the arguments that it takes by position too.
        state: constants that it holds, as `bundle_schema.ProgramEntry` has them, with all defaults.
        parameters: those of the function; None: it has no state.
    """

    function: Callable[..., Any]
    args: Any
    weights: Shapes
    values: Mapping[str, np.ndarray[Any, Any]]
    modules: UserModules
    file: str = ""
    narrower: tuple[str, ...] = ()
    wrapped: tuple[str, ...] = ()
    state: Mapping[str, str] = field(default_factory=dict)
    parameters: Parameters | None = None

    def example(self, bucket: Mapping[str, int], where: str) -> Example:
        """Return the arguments at a bucket."""
        if not callable(self.args):
            return example_of(self.args, bucket, where)
        made: list[Any] = []

        def leaves() -> list[Any]:
            made.append(self.args(**bucket))
            return jax.tree.leaves(made[0])

        with self.modules.tracing(where):
            shapes = jax.eval_shape(leaves)
        return example_of(made[0], bucket, where, shapes)

    def narrowed(self, bucket: Mapping[str, int], where: str) -> tuple[str, ...]:
        """Return, in words, the weights, and the arguments at a bucket, that jax takes for narrower ones."""
        given = [self.args]
        if callable(self.args):
            with self.modules.tracing(where):
                jax.eval_shape(lambda: given.append(self.args(**bucket)))
        return (*self.narrower, *narrowed(given[-1]))


def find_function(
    program: manifest.Program,
    at: str,
    parameters: Mapping[str, np.ndarray[Any, Any]] | None,
    modules: UserModules,
    nested: Callable[[Mapping[str, Any]], Any] | None = None,
    file: Path | None = None,
) -> UserFunction | LoweredProgram:
    """Import the function that a [[program]] names, and wrap it.

    It is a function, called as function(params, ...) if the manifest gives params, else as function(...); a
    flax.linen module, which is applied to params; or a module that holds its parameters, of flax.nnx or
    equinox, or any other pytree that can be called. The manifest's params replace those.

    `parameters` are values by flat name, joined by dots (None: the manifest gives no params), and
    `nested` makes the function's first argument of them (None: nested dicts, by the dots in names).
    `file` is what the manifest names in place of a function; None: it names one. `at` is the manifest,
    for errors.

    Returns:
        The function; or the program of a StableHLO file, which is lowered already.

    Raises:
        ManifestError: the module or the attribute does not exist, raises, or cannot be called.
        BuildError: the file cannot be read.
    """
    found, args, where = program.fn, program.args, f"{at}: program {program.name!r}"
    if file is not None:
        with modules.in_use():
            read = read_file(file, where)
        if isinstance(read, LoweredProgram):
            _refuse_settings(program, where)
            return read
        found, args = read.function, read.example if args is None else args
        if args is None:
            raise ManifestError(
                f"{where}: args: expected the arguments, because {file} has symbolic sizes",
                hint='give shape strings such as "float32[{batch}, 128]", and buckets',
            )
    elif isinstance(found, str):
        found = modules.find(found, f"{where}: function", impure=program.impure)
    if isinstance(args, str):
        args = modules.find(args, f"{where}: args", impure=program.impure)
    values = None if parameters is None else dict(sorted(parameters.items()))
    nested = nested or nested_by_dots
    module = None
    if "flax" in sys.modules:  # else it is no module of flax, whose import takes 0.4 s
        from prejit.compiler.lowering.user.flax_modules import call_module

        module = call_module(found, program.label, where, values, nested)
    if module is not None:
        function, weights = module
    elif callable(found) and not jax.tree_util.all_leaves([found]):
        function, weights = _of_pytree(found, where, values)
    elif callable(found):
        function, weights = _calling(found, nested if values is not None else None), values or {}
    else:
        raise ManifestError(
            f"{where}: function: expected something to call, found "
            f"{type(found).__name__} {program.label!r}"
        )
    narrower = narrowed({"params": {n: v for n, v in weights.items() if not is_weak(v)}})
    weights = {n: narrow_parameter(v, f"{where}: params: {n}") for n, v in weights.items()}
    shapes = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=is_weak(value))
        for name, value in weights.items()
    }
    wrapped = () if is_plain(found) else _names_by_place(found)
    if wrapped and module is None and values is not None and jax.tree_util.all_leaves([found]):
        wrapped = wrapped[1:]  # the first one is the weights
    user = UserFunction(
        function, args, shapes, weights, modules, _file_of(found), narrower, wrapped
    )
    if not weights and file is None:  # `jit` takes no program with weights
        constants.forget_functions()
        with modules.in_use():
            held = function_state(found, ())
        state = {place: constants.dumps(constants.plain(each)) for place, each in held.items()}
        own = Parameters(found, static=(None, None), donated=(None, None))
        user = replace(user, state=state, parameters=own)
    _check_names(user, found, program, where)
    return user


def _check_names(
    user: UserFunction, found: Callable[..., Any], program: manifest.Program, where: str
) -> None:
    """Check names under `donate`, `carry`, `mask` and `static`, and what `example` checks, before a trace."""
    smallest = {name: sizes[0] for name, sizes in program.buckets.items()}
    made = user.example(smallest, f"{where}: args")
    example = made.value
    mask = () if program.mask is None else (program.mask,)
    for key, given in (("donate", program.donate), ("carry", program.carry), ("mask", mask)):
        for _, problem in key_problems(key, given, example):
            raise ManifestError(f"{where}: {key}: {problem}")
    for (path, _), shape in zip(jax.tree.leaves_with_path(example), made.shapes, strict=False):
        if mask and dotted(path[:1]) == str(mask[0]) and shape.dtype != np.bool_:
            raise ManifestError(f"{where}: mask: expected bool, found {shape.dtype}")
    if not is_plain(found):  # the signature is that of the function inside
        return
    with suppress(TypeError, ValueError):  # code in C
        parameters = inspect.signature(found).parameters
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            return
        for name in program.static.keys() & parameters.keys():
            if parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
                raise ManifestError(
                    f"{where}: static: expected an argument that can be given by name, found {name}, which "
                    f"stands before the / of {program.label}",
                    hint="a program gets its static values by name: move the / or take it out",
                )
        names = [name for name, each in parameters.items() if each.kind in _NAMED]
        for name in program.static.keys() - {*names}:
            raise ManifestError(
                f"{where}: static: expected an argument of {program.label}, one of "
                f"{', '.join(names) or 'none'}; found {name}{did_you_mean(name, names)}"
            )


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _names_by_place(found: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters that a signature allows by position and by name."""
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return ()
    return tuple(
        name
        for name, each in parameters.items()
        if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )


def _file_of(found: Any) -> str:
    """Return the source file of a function, or of an object's class; empty: it has none in Python."""
    while isinstance(found, functools.partial):
        found = found.func
    found = inspect.unwrap(found)
    with suppress(TypeError):  # code in C
        return inspect.getfile(found if inspect.isroutine(found) else type(found))
    return ""


def _refuse_settings(program: manifest.Program, where: str) -> None:
    """Refuse keys that a StableHLO file decides by itself."""
    for key in ("args", "buckets", "params", "static", "donate", "pad", "open_sizes", "repeat"):
        if getattr(program, key) not in (None, {}, (), []):
            raise ManifestError(
                f"{where}: expected no {key!r} for StableHLO, whose file has fixed shapes and no Python",
                hint="name a file for each program",
            )


def _of_pytree(
    module: Callable[..., Any], where: str, parameters: Mapping[str, Any] | None
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return a function that calls a module which is a pytree of its own parameters, as one of equinox."""
    if changes_itself(module):
        raise ManifestError(
            f"{where}: function: expected a module that jax makes anew as it is, found a "
            f"{type(module).__name__} whose own code changes its parts each time",
            hint="give a function that calls it",
        )
    own, bind = arrays_in(module, f"{where}: function")
    if parameters is not None and (differing := differing_names(own, parameters)):
        raise ManifestError(
            f"{where}: params: expected the names of the module's arrays: {differing}"
        )
    check_fit(own, parameters or {}, f"{where}: params", "the module")

    def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return bind(weights)(*args, **kwargs)

    values = parameters or {
        name: weakened(np.asarray(leaf)) if is_weak(leaf) else np.asarray(leaf)
        for name, leaf in own.items()
    }
    return function, dict(sorted(values.items()))


def _calling(
    called: Callable[..., Any], nested: Callable[[Mapping[str, Any]], Any] | None
) -> Callable[..., Any]:
    """Return a function of flat weights and arguments; `nested` is None where `called` takes no weights."""

    def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        first = () if nested is None else (nested(weights),)
        return called(*first, *args, **kwargs)

    return function


def nested_by_dots(weights: Mapping[str, Any]) -> Any:
    """Return flat weights as nested dicts."""
    from flax import traverse_util

    return traverse_util.unflatten_dict(dict(weights), sep=".")


ir: Any = mlir_ir  # the bindings of MLIR have no types
stablehlo: Any = mlir_stablehlo

_MLIR_BYTECODE = b"ML\xefR"
_DTYPES = {
    **{"i1": "bool", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"},
    **{f"i{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"ui{bits}": f"uint{bits}" for bits in (4, 8, 16, 32, 64)},
    **{"complex<f32>": "complex64", "complex<f64>": "complex128"},
    **{"f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2", "f8E8M0FNU": "float8_e8m0fnu"},
}
"""NumPy's names of element types by MLIR's."""


@dataclass(frozen=True)
class ExportedFile:
    """A function of a `jax.export` artifact.

    Attributes:
        function: the function.
        example: its arguments as a pytree of jax.ShapeDtypeStruct; None: some of its sizes are symbolic.
    """

    function: Callable[..., Any]
    example: Any


def read_file(path: Path, where: str) -> ExportedFile | LoweredProgram:
    """Read a program from a file.

    Args:
        path: a `jax.export` artifact (`Exported.serialize`), or StableHLO as text, as MLIR bytecode, or as a
            versioned portable artifact.
        where: the place in the manifest, for errors.

    Raises:
        BuildError: the file is neither, or a bundle cannot hold its program.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BuildError(f"{where}: {path}: cannot read it: {error.strerror or error}") from error
    if content.startswith(_MLIR_BYTECODE) or _is_text(content):
        return _read_stablehlo(content, f"{where}: {path}")
    try:
        exported = export.deserialize(bytearray(content))
    except Exception as error:  # a flatbuffer that is none raises errors of many kinds
        raise BuildError(
            f"{where}: {path}: expected a jax.export artifact or StableHLO, and jax cannot read it: {error}",
            hint="write one with jax.export.export(jax.jit(f))(*args).serialize()",
        ) from error
    return ExportedFile(exported.call, _example_of(exported, f"{where}: {path}"))


def _is_text(content: bytes) -> bool:
    head = content[:4096]
    return b"\0" not in head and (b"module" in head or b"func.func" in head)


def _example_of(exported: export.Exported, where: str) -> Any:
    args, kwargs = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    shapes = jax.tree.leaves((args, kwargs))
    if any(not isinstance(extent, int) for shape in shapes for extent in shape.shape):
        return None
    if args and kwargs:
        raise BuildError(
            f"{where}: expected arguments by position or by name, found both",
            hint="export a function that takes all by position",
        )
    return kwargs if kwargs else args


def _read_stablehlo(content: bytes, where: str) -> LoweredProgram:
    """Return a StableHLO module as a portable program for every platform."""
    with jax.interpreters.mlir.make_ir_context():
        try:
            module = _parse(content)
        except Exception as error:  # errors of MLIR
            reason = str(error).strip().partition("\n")[0]
            raise BuildError(
                f"{where}: expected StableHLO, and MLIR cannot read it: {reason}"
            ) from error
        functions = {
            ir.StringAttr(op.attributes["sym_name"]).value: op.operation
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        if "main" not in functions:
            found = ", ".join(functions) or "no function"
            raise BuildError(
                f"{where}: expected a function named main, found {found}",
                hint="rename the entry function to main",
            )
        kind = ir.FunctionType(ir.TypeAttr(functions["main"].attributes["function_type"]).value)
        arguments = tuple(
            _array_of(type_, (place,), f"{where}: argument {place}")
            for place, type_ in enumerate(kind.inputs)
        )
        single = len(kind.results) == 1
        results = tuple(
            _array_of(type_, () if single else (place,), f"{where}: result {place}")
            for place, type_ in enumerate(kind.results)
        )
        version = stablehlo.get_version_from_compatibility_requirement(
            stablehlo.StablehloCompatibilityRequirement.WEEK_4
        )
        try:
            portable = stablehlo.serialize_portable_artifact(module, version)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise BuildError(
                f"{where}: expected operations of StableHLO alone: {reason}",
                hint="legalize the module to StableHLO first",
            ) from error
    leaves = tuple(trees.Leaf() for _ in results)
    many = trees.Node("tuple", tuple(range(len(results))), leaves)
    return LoweredProgram(
        bytes(portable),
        (),
        (),
        arguments,
        results,
        arguments_tree=trees.to_text(
            trees.Node(
                "tuple", tuple(range(len(arguments))), tuple(trees.Leaf() for _ in arguments)
            )
        ),
        results_tree=trees.to_text(trees.Leaf() if single else many),
    )


def _parse(content: bytes) -> Any:
    if b"StableHLO_v" in content[:256]:
        return stablehlo.deserialize_portable_artifact(ir.Context.current, content)
    return ir.Module.parse(content)


def _array_of(type_: Any, path: tuple[int, ...], where: str) -> Array:
    try:
        kind = ir.RankedTensorType(type_)
    except ValueError:  # a token, a tuple
        kind = None
    if kind is None or not kind.has_static_shape:
        raise BuildError(
            f"{where}: expected a tensor with a static shape, found {type_}",
            hint="export it with fixed sizes, one file for each bucket",
        )
    element = str(kind.element_type)
    if (dtype := _DTYPES.get(element)) is None:
        known = ", ".join(_DTYPES)
        raise BuildError(f"{where}: expected elements of {known}, found {element}")
    return Array(path, dtype, tuple(kind.shape))
