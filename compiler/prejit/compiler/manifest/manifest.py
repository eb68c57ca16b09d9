"""Manifests: what to compile and for which machines, read from TOML and checked.

    [bundle]                             name, license
    [model]                              source, dtype, evaluation    ... and with it
    [generate]                           batch, prompt, context, draft_tokens, cache_dtype
    [encode]                             shapes                   ... or with this
    [mesh]                               data, tensor             more than one device
    [[program]]                          name, function, args, buckets, params
    [[target]]                           name, jax, ...           see target.TargetTable

pydantic checks the form (which keys, of which types), manifest_checks.py the values. All errors of
a file are reported together, each with its line, its key, what was found and what is allowed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from prejit.compiler.base.wording import nearest, shown
from prejit.compiler.manifest.checks import (
    Problems,
    expected,
    is_int_list,
    missing,
    unknown_key,
    value_problems,
)
from prejit.compiler.manifest.toml_lines import KeyPath, key_lines
from prejit.compiler.targets.target_table import TableError, TargetTable, resolve
from prejit.runtime.errors import ManifestError, StoreError
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.machine.target import Target

_STRICT = {"strict": True, "extra": "forbid"}


@dataclass(frozen=True, slots=True)
class Bundle:
    """`[bundle]`.

    Attributes:
        name: of the bundle; fit for an OCI reference.
        license: path of a file with its text, relative to the manifest.
    """

    __pydantic_config__: ClassVar = _STRICT

    name: str
    license: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """`[model]`.

    Attributes:
        source: a directory in the Hugging Face layout, relative to the manifest, or
            `hf://org/name@revision`.
        dtype: that the matrices are stored in: `float32`, `bfloat16` or `int8`. All arithmetic is float32.
        evaluation: path of a text, relative to the manifest, on whose end it is measured what the dtypes
            cost; None: on what a decoder itself writes, or on random tokens.
    """

    __pydantic_config__: ClassVar = _STRICT

    source: str
    dtype: str = "float32"
    evaluation: str | None = None


@dataclass(frozen=True, slots=True)
class Generate:
    """`[generate]`: the buckets of a decoder, each ascending.

    Attributes:
        batch: sequences decoded together.
        prompt: tokens that one prefill takes.
        context: lengths of the KV cache in tokens; a cache grows from one to the next as its text grows.
        draft_tokens: the most tokens of a draft (prompt lookup) that one pass verifies; 0: no drafts.
        cache_dtype: of the KV cache: `float32` or `bfloat16`.
    """

    __pydantic_config__: ClassVar = _STRICT

    batch: tuple[int, ...]
    prompt: tuple[int, ...]
    context: tuple[int, ...]
    draft_tokens: int = 0
    cache_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Encode:
    """`[encode]`: the buckets of an encoder.

    Attributes:
        shapes: sentences encoded together and tokens of each, ascending.
    """

    __pydantic_config__: ClassVar = _STRICT

    shapes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MeshTable:
    """`[mesh]`; the attributes of `prejit.runtime.format.arrays.Mesh`."""

    __pydantic_config__: ClassVar = _STRICT

    data: int = 1
    tensor: int = 1


@dataclass(frozen=True, slots=True)
class Program:
    """`[[program]]`: a function of the user's own.

    Attributes:
        name: unique in the bundle.
        function: `package.module:attribute`.
        args: shape strings: a table of keyword arguments or a list of positional ones, nested as
            the function's pytrees are.
        buckets: the sizes, ascending, that each variable of args takes.
        params: a checkpoint with the function's first argument: a .safetensors file or an orbax
            directory, relative to the manifest.
    """

    __pydantic_config__: ClassVar = _STRICT

    name: str
    function: str
    args: Any
    buckets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    params: str | None = None

    def expand(self) -> tuple[dict[str, int], ...]:
        """Every combination of bucket sizes, first variable outermost; without buckets one, {}."""
        combinations = itertools.product(*self.buckets.values())
        return tuple(dict(zip(self.buckets, sizes, strict=True)) for sizes in combinations)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that says what can be built.

    Attributes:
        path: the file.
        bundle: what is made.
        model: a decoder with `generate`, or an encoder with `encode`.
        generate: buckets of a decoder.
        encode: buckets of an encoder.
        mesh: the devices that a decoder's programs run on; None: one.
        programs: functions of the user's own.
        targets: the machines to compile for.
    """

    path: Path
    bundle: Bundle
    model: Model | None
    generate: Generate | None
    encode: Encode | None
    mesh: Mesh | None
    programs: tuple[Program, ...]
    targets: tuple[Target, ...]

    def resolve(self, path: str) -> Path:
        """The file or directory that a path of the manifest means."""
        return Path(os.path.abspath(self.path.parent / path))


_SECTIONS: dict[str, tuple[type[Any], bool]] = {
    # name in the file: (class, whether it is an array of tables)
    "bundle": (Bundle, False),
    "model": (Model, False),
    "generate": (Generate, False),
    "encode": (Encode, False),
    "mesh": (MeshTable, False),
    "program": (Program, True),
    "target": (TargetTable, True),
}


def read_manifest(path: Path) -> Manifest:
    """Reads and checks a manifest. Sizes come back ascending.

    Raises:
        ManifestError: it says something that cannot be built; one line for each error.
        StoreError: the file cannot be read.
    """
    text = _read_text(path)
    try:
        return _checked(path, text, _parse(path, text))
    except RecursionError as error:
        raise _syntax_error(path, text, "nested too deeply") from error


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or int() on a number of thousands of digits
        raise _syntax_error(path, text, str(error)) from error


def _checked(path: Path, text: str, data: dict[str, Any]) -> Manifest:
    problems = list(missing(data))
    parsed: dict[str, Any] = {}
    for name, (kind, repeated) in _SECTIONS.items():
        if name in data:
            parsed[name] = _parse_section(name, kind, repeated, data[name], problems)
    malformed = {where for where, _ in problems}
    for where, problem in (*_unknown_sections(data), *value_problems(data, path.parent)):
        if where not in malformed:
            problems.append((where, problem))
    mesh = None
    if (table := parsed.get("mesh")) is not None and min(table.data, table.tensor) > 0:
        mesh = Mesh(table.data, table.tensor) if table.data * table.tensor > 1 else None
    targets = _targets(parsed.get("target") or (), path.parent, mesh, problems)
    if problems:
        raise _manifest_error(path, text, problems)
    return Manifest(
        path,
        parsed["bundle"],
        parsed.get("model"),
        parsed.get("generate"),
        parsed.get("encode"),
        mesh,
        tuple(parsed.get("program", ())),
        targets,
    )


def _targets(
    tables: Sequence[TargetTable],
    directory: Path,
    mesh: Mesh | None,
    problems: list[tuple[KeyPath, str]],
) -> tuple[Target, ...]:
    """What the tables mean; what is wrong with them goes to problems."""
    found: dict[str, int] = {}
    targets = []
    for index, table in enumerate(tables):
        try:
            target = resolve(table, directory, mesh)
        except TableError as error:
            problems.append((("target", index, error.key), str(error)))
            continue
        if (first := found.setdefault(target.name, index)) != index:
            problem = f"expected each target once; found {shown(target.name)}, which is target[{first}] too"
            problems.append((("target", index, "name"), problem))
        targets.append(target)
    return tuple(targets)


def _parse_section(
    name: str, kind: type[Any], repeated: bool, value: Any, problems: list[tuple[KeyPath, str]]
) -> Any:
    """One section as its dataclass; what is wrong with its form goes to problems."""
    import pydantic  # here: what only names a Manifest need not wait for it

    annotation: Any = list[kind] if repeated else kind  # type: ignore[valid-type]
    try:
        # JSON, because strict pydantic takes a dataclass from JSON only.
        content = json.dumps(_sorted_sizes(_as_json(value), name))
        return pydantic.TypeAdapter(annotation).validate_json(content)
    except pydantic.ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            where: KeyPath = (name, *detail["loc"])
            if detail["type"] == "json_invalid":
                problem = "nested too deeply"
            elif detail["type"] == "missing":
                problem = f"missing; expected {expected(where)}"
            elif detail["type"] == "unexpected_keyword_argument":
                allowed = [item.name for item in fields(kind)]
                problem = unknown_key(str(where[-1]), allowed)
            else:
                found = shown(_at(value, where[1:]))
                problem = f"expected {expected(where)}; found {found}"
            problems.append((where, problem))
        return None


def _unknown_sections(data: dict[str, Any]) -> Problems:
    for name in data:
        if name not in _SECTIONS:
            yield (name,), unknown_key(name, _SECTIONS)


def _as_json(value: Any) -> Any:
    """TOML as JSON. What JSON lacks becomes 1.5, which is wrong wherever it may stand."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, str | bool) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return 1.5


def _sorted_sizes(value: Any, section: str) -> Any:
    """The section with its lists of sizes ascending, where they are lists of sizes."""
    if section == "generate" and isinstance(value, dict):
        return {key: _ascending(item) for key, item in value.items()}
    if section == "encode" and isinstance(value, dict):
        shapes = value.get("shapes")
        if isinstance(shapes, list) and all(map(is_int_list, shapes)):
            return {**value, "shapes": sorted(shapes)}
    if section == "program" and isinstance(value, list):
        return [_sorted_buckets(program) for program in value]
    return value


def _sorted_buckets(program: Any) -> Any:
    buckets = program.get("buckets") if isinstance(program, dict) else None
    if not isinstance(buckets, dict):
        return program
    return {**program, "buckets": {name: _ascending(sizes) for name, sizes in buckets.items()}}


def _ascending(sizes: Any) -> Any:
    return sorted(sizes) if is_int_list(sizes) else sizes


def _at(value: Any, path: KeyPath) -> Any:
    for key in path:
        value = value[key]
    return value


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
        try:
            manifests = [entry.name for entry in path.parent.glob("*.toml")]
        except OSError:
            manifests = []
        guess = nearest(path.name, manifests)
        raise StoreError(
            f"{path}: cannot read the manifest: {error.strerror or error}",
            hint=f"did you mean {path.parent / guess}?"
            if guess
            else "give the path of a TOML file",
        ) from error
    try:
        return content.decode()
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


def _manifest_error(path: Path, text: str, problems: list[tuple[KeyPath, str]]) -> ManifestError:
    lines = key_lines(text)
    order = {where: number for number, where in enumerate(lines)}
    told = []
    for where, problem in problems:
        known = next((n for n in range(len(where), 0, -1) if where[:n] in lines), 0)
        line = lines.get(where[:known], 0)
        place = f"{path}:{line}" if line else f"{path}"
        key = f"{_key_path(where)}: " if where else ""
        told.append((order.get(where[:known], len(order)), f"{place}: {key}{problem}"))
    told.sort(key=lambda pair: pair[0])
    count = "one key" if len(told) == 1 else f"{len(told)} keys"
    return ManifestError(
        "\n".join(line for _, line in told), hint=f"correct {count} of {path}; nothing was built"
    )
