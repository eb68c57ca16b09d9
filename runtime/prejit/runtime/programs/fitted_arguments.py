"""Arguments of a call as a bucket takes them: arrays of its dtypes and sizes, or why they are none."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.device.jax_arrays import (
    OnDevice,
    check_alive,
    is_jax_array,
    is_number,
    is_tracer,
    is_weak,
)
from prejit.runtime.device.transfer import aligned_zeros, dtype_of
from prejit.runtime.errors import UsageError
from prejit.runtime.format import constants, trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.constants import Constant, EncodedConstant
from prejit.runtime.programs import pytree
from prejit.runtime.programs.known_calls import Held
from prejit.runtime.programs.placing import is_random_key

EVERYTHING: Final = object()
"""In place of a mask that the caller leaves out: true for all that the caller gave."""

_TRUE: Final = np.ones((), np.bool_)  # in the place of a mask until its sizes are known

Value = np.ndarray[Any, Any] | OnDevice | Held


def fit(
    arrays: Sequence[Array],
    leaves: Iterable[trees.Leaf],
    given: Sequence[Any],
    open_sizes: Sequence[str] = (),
    *,
    any_size: bool = False,
    narrows: bool = False,
) -> tuple[list[Value], dict[str, int]] | str:
    """Return values as a program takes them, or why they are not its arguments.

    Where dimensions are variables in `open_sizes`, the values may have less, or any size. Then the sizes of
    these variables are returned too, and the values are still to be `padded`. If `narrows`, 64 bits become 32
    where the program takes 32 and holds the values.
    """
    values: list[Value] = []
    sizes: dict[str, int] = {}
    masks = [place for place, value in enumerate(given) if value is EVERYTHING]
    for array, leaf, value in zip(arrays, leaves, given, strict=True):
        if value is EVERYTHING:
            values.append(_TRUE)
            continue
        found = value if isinstance(value, Held | OnDevice) else _as_numpy(array, leaf, value)
        is_wide = array.dtype == _NARROW.get(found.dtype) and isinstance(found, np.ndarray)
        if narrows and is_wide and not is_jax_array(value):
            narrow = halved(np.asarray(found), dtype_of(array.dtype))
            if narrow is None:
                return (
                    f"{pytree.spell(array.path)}: expected {found.dtype} whose values are in the range of "
                    f"{array.dtype}, found others"
                )
            found = narrow
        is_type = found.dtype == dtype_of(array.dtype) and is_weak(value) == array.weak
        if not is_type or not _matches(array, found.shape, sizes, open_sizes, any_size):
            extents = ", ".join(
                f"<={extent}" if name and name in open_sizes else str(extent)
                for name, extent in itertools.zip_longest(array.variables, array.shape)
            )
            weak, found_weak = "weak " * array.weak, "weak " * is_weak(value)
            return (
                f"{pytree.spell(array.path)}: expected {weak}{array.dtype}[{extents}], "
                f"found {found_weak}{found.dtype}{list(found.shape)}"
            )
        values.append(found)
    largest = {
        name: extent
        for array in arrays
        for name, extent in zip(array.variables, array.shape, strict=False)
        if name in open_sizes
    }
    for place in masks:
        values[place] = np.ones(arrays[place].shape_at(sizes), np.bool_)
    return values, {} if all(largest[name] == size for name, size in sizes.items()) else sizes


_NARROW = {
    np.dtype(wide): narrow
    for wide, narrow in (
        *(("float64", "float32"), ("complex128", "complex64")),
        *(("int64", "int32"), ("uint64", "uint32")),
    )
}
"""The dtypes that jax takes for those of 64 bits where jax_enable_x64 is off."""


def narrows(program: ProgramEntry) -> bool:
    """Return whether arguments of 64 bits become those of 32, as in the trace of a program."""
    return program.settings is not None and "jax_enable_x64" not in program.settings


def halved(value: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """Return an array with half the bits; None: integers would wrap, or numbers become infinite."""
    with np.errstate(over="ignore"):
        narrow = value.astype(dtype)
    is_whole = dtype.kind in "iu"
    kept = narrow == value if is_whole else np.isfinite(narrow) == np.isfinite(value)
    return narrow if kept.all() else None


def _matches(
    array: Array,
    shape: tuple[int, ...],
    sizes: dict[str, int],
    open_sizes: Sequence[str],
    any_size: bool,
) -> bool:
    """Return whether a value has the shape of an argument, but for open sizes, which it adds to `sizes`."""
    if len(shape) != len(array.shape):
        return False
    for name, extent, size in itertools.zip_longest(array.variables, array.shape, shape):
        if not name or name not in open_sizes:
            if size != extent:
                return False
        elif size < 1 or (size > extent and not any_size) or sizes.setdefault(name, size) != size:
            return False
    return True


def static_misfit(built: Mapping[str, Constant], given: Mapping[str, Any]) -> str:
    """Return why static values are not those of a program's build; empty: they are."""
    for name, value in built.items():
        if name not in given:
            return f"{name} is missing: expected {constants.shown(value)}"
        if not constants.same(value, constants.encode(given[name])):
            return f"{name}: expected {constants.shown(value)}, found {instead(value, given[name])}"
    return ""


def padded(array: Array, value: Value) -> Value:
    """Return a value with zeros up to the shape that a program takes."""
    if isinstance(value, Held) or value.shape == array.shape:
        return value
    value = np.asarray(value)
    whole = aligned_zeros(array.shape, value.dtype)
    whole[tuple(map(slice, value.shape))] = value
    return whole


def _as_numpy(array: Array, leaf: trees.Leaf, value: Any) -> np.ndarray[Any, Any]:
    """Return a value as a NumPy array, and a random key as its data."""
    if leaf.key and is_jax_array(value):  # keys are of another class
        found = f"{value.dtype}{list(value.shape)}"
        raise UsageError(
            f"{pytree.spell(array.path)}: expected a random key of {leaf.key}, found {found}",
            hint=f'use jax.random.key, or jax.random.wrap_key_data(data, impl="{leaf.key}")',
        )
    if is_random_key(value):
        import jax

        if not isinstance(value, jax.Array):
            raise UsageError(
                f"{pytree.spell(array.path)}: expected an array, found a {type(value).__name__}",
                hint="pass the arrays of a module's state alone: nnx.to_pure_dict(state)",
            )
        if (found := str(jax.random.key_impl(value))) != leaf.key:
            wanted = (
                f"a random key of {leaf.key}" if leaf.key else f"{array.dtype}{list(array.shape)}"
            )
            raise UsageError(
                f"{pytree.spell(array.path)}: expected {wanted}, found a random key of {found}"
            )
        value = jax.random.key_data(value)
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise UsageError(
            f"{pytree.spell(array.path)}: expected an array without a mask, found a masked array of NumPy",
            hint="pass `.filled()`, or `.data` and `.mask` as two arguments",
        )
    if is_number(value):
        return _scalar(array, value)
    try:
        if is_jax_array(value) or hasattr(value, "__array__") or not hasattr(value, "__dlpack__"):
            return np.asarray(value)
        return np.from_dlpack(value)
    except Exception as error:  # a deleted buffer, another device: whatever the library raises
        at = pytree.spell(array.path)
        check_alive(at, value)
        if is_tracer(value):
            raise UsageError(
                f"{at}: expected an array, found a tracer: jax traces the caller",
                hint="in functions that jax traces, call the function itself or prejit.runtime.jit of it",
            ) from None
        raise UsageError(
            f"{at}: expected an array that NumPy or DLPack reads, found {type(value).__name__}: {error}",
            hint="pass the value of a Ref: ref[...]" if type(value).__name__ == "Ref" else None,
        ) from error


_NUMBERS = {
    int: ("int32", "int64"),
    float: ("float32", "float64"),
    complex: ("complex64", "complex128"),
}
"""The dtypes in which jax takes a Python number: the second one where jax_enable_x64 is set."""


def _scalar(array: Array, value: complex) -> np.ndarray[Any, Any]:
    """Return a Python number as an array of the dtype in which jax takes it."""
    kind = next(kind for kind in _NUMBERS if isinstance(value, kind))
    dtype = array.dtype if array.dtype in _NUMBERS[kind] else _NUMBERS[kind][0]
    try:
        with np.errstate(over="raise"):
            return np.asarray(kind(value), dtype)
    except (FloatingPointError, OverflowError):
        found = arguments.described(value)
        raise UsageError(
            f"{pytree.spell(array.path)}: expected a number in the range of {dtype}, found {found}"
        ) from None


def as_key(value: Any, leaf: trees.Leaf) -> Any:
    """Return the data of a random key as a key, if the caller uses jax."""
    if not leaf.key or not is_jax_array(value):
        return value
    import jax

    return jax.random.wrap_key_data(value, impl=leaf.key)


def instead(expected: Constant, found: object) -> str:
    """Return a value as an error shows it beside a constant that it is not."""
    text, kept = arguments.described(found), constants.encode(found)
    if text == constants.shown(expected):
        return f"{text} of class {type(found).__qualname__}"
    if isinstance(kept, EncodedConstant) and kept.is_unknown:
        return f"{text}, which only the process that made it can compare"
    return text
