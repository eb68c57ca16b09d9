"""Portable programs: StableHLO as a bundle stores it, made ready for one platform and for a call's sizes.

A start that finds executables for its machine does not import this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prejit.runtime.device import _jax_parts, _jaxlib
from prejit.runtime.errors import BuildError


def custom_calls(portable: bytes, platforms: Sequence[str], platform: str) -> set[str]:
    """Return the names of the custom calls that a program makes on a platform.

    Arguments and errors as `stablehlo_module`.
    """
    ir = _jax_parts.import_mlir()
    found = set[str]()

    def note(op: Any) -> Any:
        if op.name == _CUSTOM_CALL:
            found.add(ir.StringAttr(op.attributes[_TARGET_NAME]).value)
        return ir.WalkResult.ADVANCE

    module = stablehlo_module(portable, platforms, platform)
    module.operation.walk(note)
    return found


def bind_calls(portable: bytes, names: Mapping[str, str]) -> bytes:
    """Return a program that calls handlers by other names: those that XLA knows them by.

    Calls whose name is not in `names` stay.
    """
    if not names:
        return portable
    ir = _jax_parts.import_mlir()

    def rename(op: Any) -> Any:
        if op.name == _CUSTOM_CALL:
            name = names.get(ir.StringAttr(op.attributes[_TARGET_NAME]).value)
            if name is not None:
                op.attributes[_TARGET_NAME] = ir.StringAttr.get(name)
        return ir.WalkResult.ADVANCE

    with ir.Context(), ir.Location.unknown():
        module = _jax_parts.parse_stablehlo(portable)
        module.operation.walk(rename)
        return _jax_parts.serialized_portable(module, version_of(portable))


_CUSTOM_CALL, _TARGET_NAME = "stablehlo.custom_call", "call_target_name"
"""The operation that calls a handler, and its attribute with the handler's name."""


def stablehlo_module(portable: bytes, platforms: Sequence[str], platform: str) -> Any:
    """Return the MLIR module of a versioned portable artifact, upgraded to this jaxlib's StableHLO.

    The first argument of a program for several platforms is the index of the platform that it runs on
    (jax/_src/export/_export.py, "platform index"). This function replaces the argument by a constant and
    drops the parts for other platforms.

    Args:
        portable: StableHLO.
        platforms: platforms that it was lowered for, in order; empty: `platform` alone.
        platform: the platform to run on.

    Raises:
        BuildError: it was not lowered for this platform.
    """
    ir = _jax_parts.import_mlir()
    if platforms and platform not in platforms:
        raise BuildError(
            f"expected a program for {platform}, found one for {' and '.join(platforms)} alone",
            hint="its function does not lower for other platforms: mend that and build again",
        )
    if platform == "cpu":
        _jaxlib.register_library_calls(portable)
    with ir.Context():
        module = _jax_parts.parse_stablehlo(portable)
        several = len(platforms) > 1
        index = _bind_platform(module, tuple(platforms).index(platform)) if several else None
        _drop_other_platforms(module, index)
        return module


def specialize(
    portable: bytes, platforms: Sequence[str], platform: str, shapes: Sequence[tuple[int, ...]]
) -> tuple[bytes, list[tuple[int, ...]]]:
    """Give the arguments of a program with symbolic sizes the sizes of a call.

    Args:
        portable: StableHLO.
        platforms: platforms that it was lowered for, in order; empty: `platform` alone.
        platform: the platform to run on.
        shapes: the shape of each argument.

    Returns:
        The program for this platform and these shapes, and the shapes of its results.

    Raises:
        BuildError: it was not lowered for this platform, or does not work for these sizes.
    """
    ir = _jax_parts.import_mlir()
    with ir.Context():
        module = stablehlo_module(portable, platforms, platform)
    with module.context, ir.Location.unknown():
        main = _functions(module)["main"]
        block = main.regions[0].blocks[0]
        for argument, shape in zip(block.arguments, shapes, strict=True):
            symbolic = argument.type
            static = ir.RankedTensorType.get(shape, ir.RankedTensorType(symbolic).element_type)
            if static == symbolic:
                continue
            argument.set_type(static)
            with ir.InsertionPoint.at_block_begin(block):
                converted = ir.Operation.create(
                    "stablehlo.convert",
                    operands=[argument],
                    results=[symbolic],
                    loc=ir.Location.unknown(),
                )
            argument.replace_all_uses_except(converted.result, converted)
        kind = main.attributes["function_type"].value
        inputs = [argument.type for argument in block.arguments]
        main.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(inputs, kind.results)
        )
        try:
            static_portable = _jax_parts.refined(module, version_of(portable))
        except Exception as error:  # errors of MLIR, and assertions of the function on its sizes
            reason = str(error).strip().partition("\n")[0].rpartition('loc("shape_assertion"): ')[2]
            raise BuildError(
                f"this program does not work for these sizes: {reason.partition('  Using the')[0]}",
                hint="a number that its function computes of them may not fit an integer: give smaller ones",
            ) from error
    with ir.Context():
        module = _jax_parts.parse_stablehlo(static_portable)
        kind = _functions(module)["main"].attributes["function_type"].value
        return static_portable, [tuple(ir.RankedTensorType(t).shape) for t in kind.results]


def version_of(portable: bytes) -> str:
    """Return the version of StableHLO in the header of a portable artifact."""
    found = re.search(rb"StableHLO_v(\d+\.\d+\.\d+)", portable[:256])
    if found is None:
        raise BuildError("expected a portable program with a version of StableHLO, found none")
    return found[1].decode()


def _bind_platform(module: Any, index: int) -> Any:
    """Replace the first argument of `main`, the platform index, by a constant; return it."""
    ir = _jax_parts.import_mlir()

    main = _functions(module)["main"]
    block = main.regions[0].blocks[0]
    constant = _make_constant(block, 0, index)
    block.erase_argument(0)
    kind = main.attributes["function_type"].value
    main.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(kind.inputs[1:], kind.results)
    )
    notes = list(main.attributes["arg_attrs"])[1:]
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(notes)
    return constant


def _functions(module: Any) -> dict[str, Any]:
    """Return the functions of a module, by name."""
    ir = _jax_parts.import_mlir()

    operations = (op.operation for op in module.body.operations)
    return {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in operations
        if op.name == "func.func"
    }


def _make_constant(block: Any, place: int, index: int) -> Any:
    """Replace every use of an argument of a function's block, a scalar integer, by a constant; return it."""
    ir = _jax_parts.import_mlir()

    argument = block.arguments[place]
    width = ir.IntegerType(ir.RankedTensorType(argument.type).element_type).width
    with ir.InsertionPoint.at_block_begin(block), ir.Location.unknown():
        value = ir.DenseElementsAttr.get(np.array(index, f"int{width}"))
        constant = ir.Operation.create(
            "stablehlo.constant", results=[argument.type], attributes={"value": value}
        )
    argument.replace_all_uses_with(constant.result)
    return constant.result


def _drop_other_platforms(module: Any, constant: Any) -> None:
    """Replace every conditional over the platform index by its branch for this platform.

    XLA drops the other branches only where it sees that the index is constant. Inside loops and other
    conditionals it does not see that, and there it looks for the custom calls of all platforms. On a mesh it
    splits all branches, and aborts at some.

    jax passes the index, a constant of `main`, from function to function, and marks the argument except in
    functions of `_emit_lowering_rule_as_fun`, such as of jnp.cumsum (jax/_src/interpreters/mlir.py,
    "_platform_index"). All calls of one function pass the same index.
    """
    functions = _functions(module)
    bound = {"main"}
    indices = [] if constant is None else [constant]

    def settle(block: Any) -> None:
        left = [op.operation for op in reversed(list(block.operations))]
        while left:
            op = left.pop()
            if op.name == "stablehlo.case" and (index := _constant_of(op.operands[0])) is not None:
                # An index out of range selects the last branch.
                place = index if 0 <= index < len(op.regions) else len(op.regions) - 1
                *inner, end = (each.operation for each in op.regions[place].blocks[0].operations)
                for each in inner:
                    each.move_before(op)
                for result, value in zip(op.results, end.operands, strict=True):
                    result.replace_all_uses_with(value)
                op.erase()
                left.extend(reversed(inner))
            elif op.name in _CALLS:
                called = op.attributes[_CALLS[op.name]].value
                if called not in bound:
                    bound.add(called)
                    body = functions[called].regions[0].blocks[0]
                    marked = _platform_arguments(functions[called])
                    for place, operand in enumerate(op.operands):
                        if place not in marked and operand not in indices:
                            continue
                        if (index := _constant_of(operand)) is not None:
                            indices.append(_make_constant(body, place, index))
                    settle(body)
            else:
                for region in op.regions:
                    for inside in region.blocks:
                        settle(inside)

    settle(functions["main"].regions[0].blocks[0])


_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""The operations that call a function with their own operands, and the attribute that names the function."""


def _platform_arguments(function: Any) -> list[int]:
    """Return the places of the arguments of a function that are the platform index."""
    ir = _jax_parts.import_mlir()

    if "arg_attrs" not in function.attributes:
        return []
    notes = [ir.DictAttr(note) for note in function.attributes["arg_attrs"]]
    mark = "jax.global_constant"
    return [
        place
        for place, note in enumerate(notes)
        if mark in note and ir.StringAttr(note[mark]).value == "_platform_index"
    ]


def _constant_of(value: Any) -> int | None:
    """Return the value of a scalar integer; None: it is not a constant."""
    ir = _jax_parts.import_mlir()

    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    owner = owner.operation
    if owner.name == "stablehlo.convert":
        return _constant_of(owner.operands[0])
    if owner.name != "stablehlo.constant":
        return None
    constant = owner.attributes["value"]
    return int(constant[0]) if isinstance(constant, ir.DenseIntElementsAttr) else None
