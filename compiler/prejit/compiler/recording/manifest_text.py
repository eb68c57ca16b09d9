"""The manifest of the functions and shapes that a recording saw, as `prejit build` takes it.

Calls that differ in sizes or static values are one [[program]] section. TOML has no tuples, no None and no
classes. Arguments that need these are made by a function in a Python file beside the manifest.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prejit.compiler.manifest.shape_string import KEY, split_shape
from prejit.runtime.recorded.watched_command import JaxRequest

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
        call: one of its calls, as `outer_call` describes it.
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


_HEAD = """\
# The functions and shapes that `prejit record` saw. `prejit build` imports their modules, beside this file or
# installed: what a script shall not do then belongs behind `if __name__ == "__main__":`.
[bundle]
name = "{name}-functions"
"""
_HEAD_X64 = """\
# Build it with JAX_ENABLE_X64=1 in the environment: the program sets jax_enable_x64 after the import.
"""
_TAIL = """
[[target]]
name = "cpu-host"
"""
_EXAMPLES_HEAD = '''\
"""Arguments of the programs in {manifest}: only classes, shapes and dtypes count."""

'''
_LINE = 100
"""Longest line of arguments that stand in one table."""


@dataclass(frozen=True)
class RecordedManifest:
    """A manifest of recorded functions.

    Attributes:
        text: the TOML.
        examples: the Python file beside it; empty: it needs none.
        programs: the number of its sections.
        left_out: why functions are not in it, one line each.
        homes: the directories in which the functions' modules are found.
    """

    text: str
    examples: str
    programs: int
    left_out: tuple[str, ...]
    homes: frozenset[Path]


def examples_path(manifest: Path) -> Path:
    """Return the path of the Python file beside a manifest."""
    return manifest.with_name(re.sub(r"\W", "_", f"{manifest.stem}_examples") + ".py")


def code_of_calls(requests: Sequence[JaxRequest], module: str) -> str:
    """Return a Python module with `args_N()` and `fixed_N()` of the requests whose call has no trouble."""
    writer = _Writer(module)
    for place, request in enumerate(requests):
        if request.call is not None and not request.call["trouble"]:
            section = ProgramSection(request.call, request.call["arguments"], {}, {})
            writer.call(str(place), section)
    return writer.examples(module)


def with_troubles(requests: Iterable[JaxRequest]) -> tuple[JaxRequest, ...]:
    """Return requests with the trouble of calls whose arguments no manifest can have."""
    return tuple(
        request
        if request.call is None or request.call["trouble"]
        else replace(request, call={**request.call, "trouble": _unbuildable(request.call)})
        for request in requests
    )


def recorded_manifest(
    name: str, requests: Iterable[JaxRequest], path: Path, *, needs_x64: bool = False
) -> RecordedManifest:
    """Return a manifest.

    Args:
        name: the name of the recording.
        requests: the programs of a run. Those whose call has no trouble become sections; the others are
            named in comments.
        path: where it will be written.
        needs_x64: whether a build needs JAX_ENABLE_X64=1.
    """
    calls, others, left_out = [], Counter[str](), dict[str, None]()
    for request in with_troubles(requests):
        if request.call is None:
            others[request.name] += 1
        elif trouble := request.call["trouble"]:
            left_out[f"{request.name} at {request.where}: {trouble}"] = None
        else:
            calls.append(request.call)
    writer = _Writer(examples_path(path).stem)
    head = _HEAD_X64 * needs_x64 + _HEAD.format(name=name)
    parts = [head, *map(writer.section, sections_of(calls)), _TAIL]
    if left_out:
        parts.append("\n# Functions that are left out:\n")
        parts += [f"#   {line}\n" for line in left_out]
    if others:
        parts.append("\n# Compiled too, by functions of jax or ahead of a call:\n")
        parts += [f"#   {count} x {name}\n" for name, count in sorted(others.items())]
    homes = frozenset(Path(call["home"]) for call in calls if call["home"] is not None)
    return RecordedManifest(
        "".join(parts), writer.examples(path.name), len(writer.labels), (*left_out,), homes
    )


def _unbuildable(call: Mapping[str, Any]) -> str:
    """Return why no manifest can have the arguments of a call; empty: one can."""
    for shape in shapes_in(call["arguments"]):
        try:
            split_shape(shape)
        except ValueError as error:
            return str(error)
    return ""


class _Writer:
    """Writes sections, and the Python code that they need."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._imports = set[str]()
        self._code: list[str] = []
        self.labels: list[str] = []

    def section(self, section: ProgramSection) -> str:
        """Return a section as TOML."""
        call = section.call
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", call["name"].rpartition(":")[2].rpartition(".")[2])
        plain = plain.lstrip("._-") or "f"
        count = sum(
            re.fullmatch(rf"{re.escape(plain)}(-\d+)?", each) is not None for each in self.labels
        )
        label = f"{plain}-{count + 1}" if count else plain
        self.labels.append(label)
        identifier = re.sub(r"\W", "_", label)
        function = call["name"]
        if call["fixed"]:
            self._fix(identifier, call)
            function = f"{self._module}:{identifier}"
        lines = ["", "[[program]]", f"name = {_quoted(label)}", f"function = {_quoted(function)}"]
        tables: list[str] = []
        values = [_toml(tree) for _, tree in section.arguments]
        if None in values:
            self._example(f"{identifier}_args", section)
            lines.append(f'args = "{self._module}:{identifier}_args"')
        elif call["by_place"]:
            lines.append(f"args = [{', '.join(map(str, values))}]")
        else:
            args = _inline(zip((name for name, _ in section.arguments), values, strict=True))
            if len(args) < _LINE:
                lines.append(f"args = {args}")
            else:
                tables = _tables("program.args", section.arguments)
        if section.buckets:
            lines.append(f"buckets = {_inline((n, [*v]) for n, v in section.buckets.items())}")
        if section.static:
            lines.append(
                f"static = {_inline((n, json.dumps(v)) for n, v in section.static.items())}"
            )
        if donated := call["donated"]:
            names = [name for name, _ in section.arguments]
            found = [names.index(each) for each in donated] if call["by_place"] else donated
            lines.append(f"donate = {json.dumps(found)}")
        return "\n".join([*lines, *tables]) + "\n"

    def examples(self, manifest: str) -> str:
        """Return the Python file; empty: no section needs it."""
        if not self._code:
            return ""
        lines = [f"import {each}\n" for each in sorted(self._imports)]
        return _EXAMPLES_HEAD.format(manifest=manifest) + "".join([*lines, *self._code])

    def call(self, place: str, section: ProgramSection) -> None:
        """Add the functions of `code_of_calls` for a call."""
        self._example(f"args_{place}", section)
        fixed = self._fixed(section.call)
        self._code.append(f"\n\ndef fixed_{place}():\n    return dict({fixed})\n")
        self._imports.add(section.call["name"].partition(":")[0])

    def _fixed(self, call: Mapping[str, Any]) -> str:
        """Return the fixed arguments of a call as keyword arguments."""
        return ", ".join(
            f"{key}={each[1:] if each.startswith('=') else self._imported(each)}"
            for key, each in call["fixed"].items()
        )

    def _fix(self, identifier: str, call: Mapping[str, Any]) -> None:
        self._imports.add("functools")
        function = self._imported(call["name"])
        fixed = self._fixed(call)
        self._code.append(f"\n{identifier} = functools.partial({function}, {fixed})\n")

    def _example(self, identifier: str, section: ProgramSection) -> None:
        lines = [f"\n\ndef {identifier}({', '.join(section.buckets)}):\n"]
        if section.call["by_place"]:
            lines += ["    return [\n"]
            lines += [f"        {self._python(tree)},\n" for _, tree in section.arguments]
            lines += ["    ]\n"]
        else:
            lines += ["    return {\n"]
            lines += [
                f"        {json.dumps(name)}: {self._python(tree)},\n"
                for name, tree in section.arguments
            ]
            lines += ["    }\n"]
        self._code.append("".join(lines))

    def _python(self, tree: Mapping[str, Any]) -> str:
        """Return the Python expression of an argument."""
        kind, of = tree["kind"], tree.get("of", "")
        items = [(key, self._python(each)) for key, each in tree.get("items", ())]
        if kind == "none":
            return "None"
        if kind == "number":
            return {"bool": "False", "int": "0", "float": "0.0", "complex": "0j"}[of]
        if kind == "object":
            return self._imported(of)
        if kind in ("array", "weak"):
            return self._array(of, is_weak=kind == "weak")
        if kind == "list":
            return f"[{', '.join(each for _, each in items)}]"
        if kind == "tuple":
            return _tuple([each for _, each in items])
        if kind == "new":
            constants = [(key, each[1:]) for key, each in tree["constants"]]
            given = ", ".join(f"{key}={each}" for key, each in (*items, *constants))
            return f"{self._imported(of)}({given})"
        text = f"{{{', '.join(f'{key!r}: {each}' for key, each in items)}}}"
        return text if kind == "dict" else f"{self._imported(of)}({text})"

    def _array(self, shape: str, *, is_weak: bool) -> str:
        self._imports.add("jax.numpy")
        dtype, extents, _ = split_shape(shape)
        sizes = _tuple([*map(str, extents)])
        if dtype == KEY:
            self._imports.add("jax")
            return f"jax.numpy.broadcast_to(jax.random.key(0), {sizes})"
        if is_weak:
            zero = {"b": "False", "i": "0", "c": "0j"}.get(dtype[0], "0.0")
            return f"jax.numpy.full({sizes}, {zero})"
        return f'jax.numpy.zeros({sizes}, "{dtype}")'

    def _imported(self, name: str) -> str:
        module, _, attribute = name.partition(":")
        self._imports.add(module)
        return f"{module}.{attribute}"


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' * (len(items) == 1)})"


def _toml(tree: Mapping[str, Any]) -> str | None:
    """Return an argument as TOML; None: only Python can write it."""
    kind, items = tree["kind"], tree.get("items", ())
    if kind == "array":
        return _quoted(tree["of"])
    values = [_toml(each) for _, each in items]
    if None in values or not items:
        return None
    if kind == "list":
        return f"[{', '.join(map(str, values))}]"
    if kind == "dict" and all(isinstance(key, str) for key, _ in items):
        return _inline((key, value) for (key, _), value in zip(items, values, strict=True))
    return None


def _tables(path: str, items: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Return a table of arguments, a line for each array."""
    lines, below = [f"[{path}]"], list[str]()
    for key, tree in items:
        if tree["kind"] == "dict":
            below += _tables(f"{path}.{_key(key)}", tree["items"])
        else:
            lines.append(f"{_key(key)} = {_toml(tree)}")
    return [*lines, *below]


def _inline(pairs: Iterable[tuple[str, Any]]) -> str:
    found = [f"{_key(key)} = {value}" for key, value in pairs]
    return f"{{ {', '.join(found)} }}" if found else "{}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
