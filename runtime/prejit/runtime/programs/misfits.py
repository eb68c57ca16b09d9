"""Hints of the errors about calls that no bucket takes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.programs import pytree
from prejit.runtime.programs.fitted_arguments import EVERYTHING, static_misfit
from prejit.runtime.programs.placing import is_random_key
from prejit.runtime.programs.ready_programs import Programs


def hint_of(
    programs: Programs,
    buckets: Sequence[ProgramEntry],
    static: Mapping[str, Any],
    known: Mapping[str, list[Any] | str],
    complaints: Sequence[str],
    compiles: bool,
) -> str:
    """Return what to do about a call that no bucket takes.

    `known`: the leaves of the call, or what is wrong with them, by the text of a tree of arguments.
    `complaints`: why each bucket does not take it. `compiles`: whether other open sizes may be compiled here.
    """
    hint = _hint(programs, buckets, static, known, compiles)
    if any("weak" in each for each in complaints):
        hint += "; Python numbers are weak, np.float32(2) is not"
    if any("as an array" in each for each in complaints):
        hint += "; numpy.asarray makes an array of a list"
    return hint


def _hint(
    programs: Programs,
    buckets: Sequence[ProgramEntry],
    static: Mapping[str, Any],
    known: Mapping[str, list[Any] | str],
    compiles: bool,
) -> str:
    last = buckets[-1]
    given = known[last.arguments_tree or last.name]
    arrays = programs.arguments(last.name)
    if isinstance(given, str):
        return _usage(programs, last)
    if all(static_misfit(programs.static(each.name), static) for each in buckets):
        return "give a value that was built, or add this one to `static` in the manifest"
    alike = (each for each in buckets if each.arguments_tree == last.arguments_tree)
    columns = zip(*(programs.arguments(each.name) for each in alike), strict=True)
    if wrong := next(filter(None, map(_wrong_axis, columns, given)), ""):
        return wrong
    sizes: dict[str, set[int]] = {}
    for program in buckets:
        for variable, size in program.bucket.items():
            sizes.setdefault(variable, set()).add(size)
    if not sizes or not _differ_in_size(arrays, given):
        return "pass arrays of these shapes and dtypes, or add a bucket to the manifest"
    listed = "; ".join(f"{v} {', '.join(map(str, sorted(sizes[v])))}" for v in sizes)
    less = " or less" * any(program.pad for program in buckets)
    if any(program.open_sizes for program in buckets) and not compiles:
        more = 'load the bundle with on_mismatch="jit", which compiles other open sizes here'
    else:
        names = ", ".join(f'"{variable}"' for variable in sizes)
        more = f"add a bucket to the manifest, or set open_sizes = [{names}] there for any size"
    return f"the buckets have {listed}: pass arrays of these sizes{less}; or {more}"


def _usage(programs: Programs, program: ProgramEntry) -> str:
    """Return which arguments a program takes, for a call of another structure."""
    tree = programs.arguments_tree(program.name)
    keys = [str(key) for key in getattr(tree, "keys", ()) if str(key) != program.mask]
    names = [*keys, *sorted(program.static or ())]
    if not names:
        return "call it without arguments"
    by_name = isinstance(tree, trees.Node) and tree.kind == "dict"
    way = f"by name ({', '.join(names)})" if by_name else f"by position ({len(keys)})"
    return f"give its arguments {way}; `prejit inspect` shows their structure"


def _wrong_axis(arrays: Sequence[Array], value: Any) -> str:
    """Return which axis of a value no bucket takes, whatever its sizes; empty: there is none.

    `arrays` holds the argument in each bucket.
    """
    if value is EVERYTHING or is_random_key(value):
        return ""
    last, shape = arrays[-1], np.shape(value)
    if any(len(array.shape) != len(shape) for array in arrays):
        return ""
    extents = [{array.shape[axis] for array in arrays} for axis in range(len(shape))]
    named = itertools.zip_longest(last.variables, shape, extents)
    for axis, (name, size, each) in enumerate(named):
        if not size and each != {0}:
            row = "row" if not axis else "element"
            return f"pass at least one {row}: axis {axis} of {pytree.spell(last.path)} has none"
        if not name and len(each) == 1 and size not in each:
            wanted = f"expected {min(each)} in every bucket, found {size}"
            return f"axis {axis} of {pytree.spell(last.path)}: {wanted}"
    return ""


def _differ_in_size(arrays: Sequence[Array], given: Sequence[Any]) -> bool:
    """Return whether values have the dtypes and dimensions of arguments, and other sizes."""
    pairs = [
        (array, value)
        for array, value in zip(arrays, given, strict=True)
        if value is not EVERYTHING and not is_random_key(value)
    ]
    return any(np.shape(value) != array.shape for array, value in pairs) and all(
        np.ndim(value) == len(array.shape)
        and getattr(value, "dtype", None) in (None, dtype_of(array.dtype))
        for array, value in pairs
    )
