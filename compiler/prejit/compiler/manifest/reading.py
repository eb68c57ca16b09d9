"""Read manifests, and report every mistake of one at once: its line, its key, expected and found."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, final

from prejit.compiler.base.suggestions import shown
from prejit.compiler.manifest.manifest import Manifest, Model, Program
from prejit.compiler.manifest.manifest_checks import missing, value_problems
from prejit.compiler.manifest.manifest_tables import (
    TOO_DEEP,
    ProgramTable,
    parse_sections,
    respelt,
    unknown_sections,
)
from prejit.compiler.manifest.valid_values import KeyPath
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.target_table import TableError, TargetTable, resolve
from prejit.runtime.base import arguments
from prejit.runtime.base.wording import nearest_path
from prejit.runtime.errors import ManifestError, StoreError
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.format.constants import described

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*'""")
_SCALAR = re.compile(
    r'''"""(?:\\.|[^\\])*?""""{0,2}'''  # up to two quotes may stand before the closing three
    r"""|\'\'\'.*?\'\'\''{0,2}"""
    r"""|"(?:\\.|[^"\\\n])*"|'[^'\n]*'"""
    r"""|\d{4}-\d\d-\d\d\ \d\d:[^\s,\]}\#]+|[^\s,\[\]{}\#]+""",
    re.DOTALL,
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, of every table, key and list item of a TOML document.

    Args:
        text: TOML that `tomllib.loads` accepts. Other texts give the lines up to the first mistake.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    with suppress(AttributeError, RecursionError):  # no match: not TOML; or nested without end
        scanner.document()
    return scanner.lines


@final
class _Scanner:
    """Reads as much of TOML as is needed to find where keys are."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._line_at = 0  # the offset up to which newlines are counted, and their number
        self._line = 1
        self._tables: dict[KeyPath, int] = {}  # how many [[tables]] of an array were seen

    def document(self) -> None:
        table: KeyPath = ()
        while True:
            self._take(_BLANK)
            if self._at == len(self._text):
                return
            if self._skip("[["):
                *parents, last = self._key()
                array = (*self._resolve(parents), last)
                count = self._tables[array] = self._tables.get(array, 0) + 1
                self.lines.setdefault(array, self._here())
                table = (*array, count - 1)
                self.lines[table] = self._here()
                self._skip("]]")
            elif self._skip("["):
                table = self._resolve(self._key())
                self.lines[table] = self._here()
                self._skip("]")
            else:
                self._pair(table)

    def _pair(self, table: KeyPath) -> None:
        line = self._here()
        path = table
        for part in self._key():
            path = (*path, part)
            self.lines.setdefault(path, line)
        self._skip("=")
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        self._take(_BLANK)
        if self._skip("["):
            index = 0
            while not self._skip("]"):
                self.lines[*path, index] = self._here()
                self._value((*path, index))
                self._skip(",")
                index += 1
        elif self._skip("{"):
            while not self._skip("}"):
                self._pair(path)
                self._skip(",")
        else:
            self._take(_SCALAR)

    def _key(self) -> list[str]:
        parts = [self._key_part()]
        while self._skip("."):
            parts.append(self._key_part())
        return parts

    def _key_part(self) -> str:
        self._take(_BLANK)
        part = self._take(_KEY)
        return tomllib.loads(f"key = {part}")["key"] if part[0] in "\"'" else part

    def _resolve(self, parts: list[str]) -> KeyPath:
        """Return a header's path; each array of tables in it stands for its last table."""
        path: KeyPath = ()
        for part in parts:
            path = (*path, part)
            if path in self._tables:
                path = (*path, self._tables[path] - 1)
        return path

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        self._at = match.end()  # type: ignore[union-attr]  # caught in key_lines
        return match.group()  # type: ignore[union-attr]

    def _skip(self, token: str) -> bool:
        self._take(_BLANK)
        found = self._text.startswith(token, self._at)
        self._at += len(token) if found else 0
        return found

    def _here(self) -> int:
        self._line += self._text.count("\n", self._line_at, self._at)
        self._line_at = self._at
        return self._line


_CALLABLE = "python:callable"
"""Stands for a Python object where a manifest file names a function."""


def read_manifest(path: str | Path) -> Manifest:
    """Read and check a manifest. Sizes come back ascending.

    Raises:
        ManifestError: the manifest has mistakes; one line for each.
        StoreError: the file cannot be read.
    """
    path = Path(path)
    text = _read_text(path)
    try:
        data = _parse(path, text)
        problems: list[tuple[KeyPath, str]] = []
        sections = _sections(data, path.parent, problems)
        mesh = _mesh(sections.get("mesh"))
        targets = _targets(sections.get("target") or (), path.parent, mesh, problems)
        if problems:
            raise _manifest_error(path, key_lines(text), problems)
    except RecursionError as error:
        raise _syntax_error(path, text, TOO_DEEP) from error
    return Manifest(
        sections["bundle"],
        model=sections.get("model"),
        generate=sections.get("generate"),
        draft=sections.get("draft"),
        adapters=sections.get("adapters"),
        encode=sections.get("encode"),
        slo=sections.get("slo"),
        mesh=mesh,
        programs=map(_program, sections.get("program", ())),
        libraries=sections.get("library", ()),
        targets=targets,
        path=path,
    )


def check_manifest(manifest: Manifest) -> Manifest:
    """Check a manifest that was made in Python, and return it with sizes ascending."""
    problems: list[tuple[KeyPath, str]] = []
    sections = _sections(_as_data(manifest), manifest.directory, problems)
    _repeated_targets([target.name for target in manifest.targets], problems)
    problems += _static_problems(manifest.programs)
    if problems:
        raise _manifest_error(manifest.where, {}, problems)
    checked = zip(manifest.programs, sections.get("program", ()), strict=True)
    return replace(
        manifest,
        generate=sections.get("generate"),
        draft=sections.get("draft"),
        adapters=sections.get("adapters"),
        encode=sections.get("encode"),
        programs=tuple(replace(given, buckets=table.buckets) for given, table in checked),
    )


def _sections(
    data: dict[str, Any], directory: Path, problems: list[tuple[KeyPath, str]]
) -> dict[str, Any]:
    """Return the sections of a manifest, and add what is wrong with them to problems."""
    misspelt = respelt(data, problems)
    problems += missing(data)
    sections = parse_sections(data, problems)
    malformed = {where for where, _ in problems}
    too_deep = {where for where, problem in problems if problem == TOO_DEEP}
    for where, problem in (*unknown_sections(data), *value_problems(data, directory)):
        if where not in malformed and where[:1] not in too_deep:
            problems.append((where, problem))
    for meant, written in reversed(misspelt):  # a section is renamed before its keys
        for place, (where, problem) in enumerate(problems):
            if where[: len(meant)] == meant:
                problems[place] = ((*written, *where[len(meant) :]), problem)
    return sections


def _program(table: ProgramTable) -> Program:
    given = _fields(table)
    return Program(fn=given.pop("function"), **given)


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)}


_OF_DATA = ("generate", "draft", "adapters", "encode", "slo")
"""The sections that hold nothing but what TOML can write."""


def _as_data(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as tomllib returns one."""
    programs = []
    for program in manifest.programs:
        table = {**_fields(program), "args": _args(program.args), "static": _static(program)}
        function = table.pop("fn")
        del table["mesh"]
        if not isinstance(function, str):
            function = _CALLABLE if callable(function) else repr(function)
        params = program.params if isinstance(program.params, str) else None
        if program.check is not None:
            table["check"] = _plain(_fields(program.check))
            if callable(program.check.function):
                table["check"]["function"] = _CALLABLE
        programs.append({**table, "function": function, "params": params})
    mesh = manifest.mesh
    return _plain(
        {
            "bundle": asdict(manifest.bundle),
            "model": None if manifest.model is None else _model_data(manifest.model),
            **{name: asdict(value) for name in _OF_DATA if (value := getattr(manifest, name))},
            "mesh": None if mesh is None else {"axes": mesh.sizes} if mesh.axes else mesh.sizes,
            "program": programs or None,
            "library": [asdict(library) for library in manifest.libraries] or None,
            "target": [{"name": target.name} for target in manifest.targets],
        }
    )


def _model_data(model: Model) -> dict[str, Any]:
    """Return a [model] as tomllib returns one; objects have no form there."""
    data = _fields(model)
    if model.module is not None and not isinstance(model.module, str):
        data["module"] = _CALLABLE
    if not isinstance(model.params, str):
        data["params"] = None
    return data


def _static(program: Program) -> Any:
    """Return the static values of a program as tomllib returns them: a text for what TOML cannot write."""
    if not isinstance(program.static, dict):
        return program.static
    return {
        name: [each if type(each) in _OF_TOML else described(each).text for each in values]
        if isinstance(values, list | tuple)
        else values
        for name, values in program.static.items()
    }


_OF_TOML = (str, int, bool, float)


def _static_problems(programs: Sequence[Program]) -> Iterator[tuple[KeyPath, str]]:
    """Find static values that jax.jit does not take, or that no other process could compare."""
    for place, program in enumerate(programs):
        for name, values in program.static.items() if isinstance(program.static, dict) else ():
            for index, value in enumerate(values if isinstance(values, list | tuple) else ()):
                wanted = ""
                try:
                    hash(value)
                except Exception:  # of the value's own code
                    wanted = "a value that Python hashes, as jax.jit does"
                if not wanted and described(value).is_unknown:
                    wanted = (
                        "a value that another process can compare, such as a frozen dataclass, an enum or a "
                        "function of a module"
                    )
                if wanted:
                    kind = f"{type(value).__module__}.{type(value).__qualname__}"
                    found = f"{arguments.described(value)}, a {kind}"
                    yield (
                        ("program", place, "static", name, index),
                        f"expected {wanted}; found {found}",
                    )


def _args(args: Any) -> Any:
    """Return the args of a program as tomllib returns them; None: those of its file."""
    if args is None:
        return None
    return _CALLABLE if callable(args) else _shapes(args)


def _shapes(args: Any) -> Any:
    """Return args made in Python as a file could have them: a shape for any other leaf, a table for None."""
    if isinstance(args, dict):
        return {key: _shapes(item) for key, item in args.items()}
    if isinstance(args, list | tuple):
        return list(map(_shapes, args))
    if args is None:  # jax has no leaf there
        return {}
    return args if isinstance(args, str) else "float32[]"


def _plain(value: Any) -> Any:
    """Return a value with lists for tuples, and without the keys of a table that are None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or int() on a number of thousands of digits
        raise _syntax_error(path, text, str(error)) from error


def _mesh(table: Any) -> Mesh | None:
    if table is None:
        return None
    axes = table.axes and tuple(f"{name}={size}" for name, size in table.axes.items())
    with suppress(ValueError):  # a mistake, which is reported
        mesh = Mesh(table.data, table.tensor, axes)
        return mesh if mesh.size > 1 else None
    return None


def _targets(
    tables: Sequence[TargetTable],
    directory: Path,
    mesh: Mesh | None,
    problems: list[tuple[KeyPath, str]],
) -> tuple[Target, ...]:
    """Return the targets that the tables describe, and add what is wrong with them to problems."""
    places, targets = [], []
    for place, table in enumerate(tables):
        try:
            targets.append(resolve(table, directory, mesh))
            places.append(place)
        except TableError as error:
            problems.append((("target", place, error.key), str(error)))
    _repeated_targets([target.name for target in targets], problems, places)
    return tuple(targets)


def _repeated_targets(
    names: Sequence[str], problems: list[tuple[KeyPath, str]], places: Sequence[int] | None = None
) -> None:
    first: dict[str, int] = {}
    for place, name in zip(places or range(len(names)), names, strict=True):
        if (other := first.setdefault(name, place)) != place:
            problem = (
                f"expected each target once; found {shown(name)}, which is target[{other}] too"
            )
            problems.append((("target", place, "name"), problem))


def _key_path(where: KeyPath) -> str:
    text = ""
    for key in where:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += f".{key if re.fullmatch('[A-Za-z0-9_-]+', key) else shown(key)}"
    return text.removeprefix(".")


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        guess = nearest_path(path, "*.toml")
        raise StoreError(
            f"{path}: cannot read the manifest: {error.strerror or error}",
            hint=f"did you mean {guess}?" if guess else "give the path of a TOML file",
        ) from error
    try:
        return content.decode("utf-8-sig")  # editors of Windows put a mark before it
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise ManifestError(
            f"{path}:{line}:{column}: expected UTF-8, found byte 0x{content[error.start]:02x}",
            hint="save the file as UTF-8",
        ) from error


def _syntax_error(path: Path, text: str, problem: str) -> ManifestError:
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", problem)
    if match is None:
        return ManifestError(f"{path}: not TOML: {problem}", hint="see https://toml.io")
    line = match[2] or str(text.count("\n") + 1)
    column = match[3] or str(len(text) - text.rfind("\n"))
    return ManifestError(
        f"{path}:{line}:{column}: not TOML: {match[1]}", hint="see https://toml.io"
    )


def _manifest_error(
    source: Path | str, lines: dict[KeyPath, int], problems: list[tuple[KeyPath, str]]
) -> ManifestError:
    """Return the error that reports all problems, in the order of the file."""
    order = {where: number for number, where in enumerate(lines)}
    reported = []
    for where, problem in problems:
        known = next((n for n in range(len(where), 0, -1) if where[:n] in lines), 0)
        line = lines.get(where[:known], 0)
        place = f"{source}:{line}" if line else f"{source}"
        key = f"{_key_path(where)}: " if where else ""
        reported.append((order.get(where[:known], len(order)), f"{place}: {key}{problem}"))
    reported.sort(key=lambda pair: pair[0])
    count = "one key" if len(reported) == 1 else f"{len(reported)} keys"
    return ManifestError(
        "\n".join(line for _, line in reported),
        hint=f"correct {count} of {source}; nothing was built",
    )
