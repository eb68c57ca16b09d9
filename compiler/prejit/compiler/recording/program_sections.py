"""The [[program]] sections of recorded calls: calls that differ in sizes or static values are one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prejit.compiler.manifest.shape_string import split_shape

_AXES = ("batch", "length")
"""The variables of the first axes; those of others are called size."""


_Rows = list[tuple[tuple[Any, ...], Mapping[str, Any]]]
"""Calls that differ in sizes and static values only, each behind these."""
Items = Iterable[tuple[Any, Mapping[str, Any]]]
"""Trees of arguments, each behind its name, key or index."""


@dataclass(frozen=True)
class ProgramSection:
    """A function with the sizes and static values that it was called with.

    Attributes:
        call: one of its calls, as `prejit.runtime.recorded.hook.outer_call` describes it.
        arguments: names and trees of its arguments, with the variables of buckets in shapes.
        buckets: the sizes of each variable.
        static: the values of each static argument.
    """

    call: Mapping[str, Any]
    arguments: Sequence[tuple[str, Mapping[str, Any]]]
    buckets: Mapping[str, tuple[int, ...]]
    static: Mapping[str, tuple[Any, ...]]


def sections_of(calls: Iterable[Mapping[str, Any]]) -> list[ProgramSection]:
    """Return the sections of calls, in their order."""
    alike = dict[str, dict[tuple[Any, ...], Mapping[str, Any]]]()
    for call in calls:
        form = {**call, "arguments": _mapped(call["arguments"], _rank), "static": [*call["static"]]}
        form.pop("lowering", None)
        columns = (*_sizes(call), *map(json.dumps, call["static"].values()))  # 1 is no True
        alike.setdefault(json.dumps(form), {}).setdefault(columns, call)
    return [_section(rows) for found in alike.values() for rows in _split(list(found.items()))]


def _split(rows: _Rows) -> list[_Rows]:
    """Return the calls in groups, each of which one section can build.

    A section builds every combination of its variables. Where one decides another, as n decides n + 1, their
    values are not combined.
    """
    varying = _varying(rows)
    for place, first in enumerate(varying):
        for second in varying[place + 1 :]:
            ones, others = ([*dict.fromkeys(row[at] for row, _ in rows)] for at in (first, second))
            pairs = {(row[first], row[second]) for row, _ in rows}
            if len(pairs) == max(len(ones), len(others)):
                at, values = (first, ones) if len(ones) <= len(others) else (second, others)
                groups = [[each for each in rows if each[0][at] == value] for value in values]
                return [part for group in groups for part in _split(group)]
    return [rows]


def _varying(rows: _Rows) -> list[int]:
    """Return the first of the columns of each variable: those of equal sizes in every call are one."""
    columns = list(zip(*(row for row, _ in rows), strict=True))
    first = dict[tuple[Any, ...], int]()
    for place, column in enumerate(columns):
        if len({*column}) > 1:
            first.setdefault(column, place)
    return [*first.values()]


def _section(rows: _Rows) -> ProgramSection:
    call = rows[0][1]
    columns = list(zip(*(row for row, _ in rows), strict=True))
    taken = {name for name, _ in call["arguments"]} | {*call["static"], *call["fixed"]}
    names, axes = dict[tuple[Any, ...], str](), iter(_axes(call))

    def variable(column: tuple[Any, ...], axis: int) -> str:
        if column not in names:
            plain = _AXES[axis] if axis < len(_AXES) else "size"
            free = (f"{plain}{n}" if n > 1 else plain for n in range(1, len(columns) + 2))
            names[column] = next(n for n in free if n not in {*taken, *names.values()})
        return f"{{{names[column]}}}"

    numbered = iter(columns)

    def shape(text: str) -> str:
        dtype, extents, _ = split_shape(text)
        found = []
        for extent in extents:
            column, axis = next(numbered), next(axes)
            found.append(variable(column, axis) if len({*column}) > 1 else str(extent))
        return f"{dtype}[{', '.join(found)}]"

    arguments = _mapped(call["arguments"], shape)
    buckets = {name: tuple(sorted({*column})) for column, name in names.items()}
    static = {
        name: tuple(map(json.loads, dict.fromkeys(column)))
        for name, column in zip(call["static"], numbered, strict=True)
    }
    return ProgramSection(call, arguments, buckets, static)


def _sizes(call: Mapping[str, Any]) -> Iterator[int]:
    for shape in shapes_in(call["arguments"]):
        yield from (int(extent) for extent in split_shape(shape)[1])


def _axes(call: Mapping[str, Any]) -> Iterator[int]:
    for shape in shapes_in(call["arguments"]):
        yield from range(len(split_shape(shape)[1]))


def shapes_in(items: Items) -> list[str]:
    """Return the shapes of all arrays, in order."""
    found = list[str]()

    def note(shape: str) -> str:
        found.append(shape)
        return shape

    _mapped(items, note)
    return found


def _rank(shape: str) -> str:
    dtype, extents, _ = split_shape(shape)
    return f"{dtype}[{len(extents)}]"


def _mapped(items: Items, change: Callable[[str], str]) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return named trees with other shapes."""
    changed = []
    for key, tree in items:
        if tree["kind"] in ("array", "weak"):
            tree = {**tree, "of": change(tree["of"])}
        elif "items" in tree:
            tree = {**tree, "items": _mapped(tree["items"], change)}
        changed.append((key, tree))
    return changed
