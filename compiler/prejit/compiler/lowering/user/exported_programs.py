"""Programs that were lowered elsewhere: `jax.export` artifacts, and StableHLO from any framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.extend.mlir import ir as mlir_ir
from jax.extend.mlir.dialects import stablehlo as mlir_stablehlo

from prejit.compiler.lowering.export import LoweredProgram
from prejit.runtime.errors import BuildError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array

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
