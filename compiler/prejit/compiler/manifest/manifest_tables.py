"""The form of a manifest: which keys each section has and of which types. pydantic checks it.

`manifest_schema` is the same for editors. The classes of the sections decide it: pydantic gives the types,
the `Attributes:` of each docstring the descriptions. Rules between keys are in `manifest_checks`.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from prejit.compiler.base.suggestions import shown
from prejit.compiler.manifest.manifest import (
    STRICT,
    AdapterSlots,
    AnswersTable,
    BundleTable,
    DraftTable,
    Encode,
    Generate,
    Library,
    Model,
    Program,
    ProgramCheck,
)
from prejit.compiler.manifest.manifest_checks import OWN_NAMES, Problems, is_int_list
from prejit.compiler.manifest.shape_string import MAX_SIZE
from prejit.compiler.manifest.valid_values import (
    CACHE_DTYPES,
    DTYPES,
    LEAST_PACKED,
    MAX_DRAFT,
    MAX_PACKED,
    MAX_RANK,
    MAX_SLOTS,
    KeyPath,
    expected,
    unknown_key,
)
from prejit.compiler.targets.target_classes import GpuTable
from prejit.compiler.targets.target_table import TargetTable
from prejit.compiler.targets.target_table import names as target_names
from prejit.runtime.base.wording import nearest
from prejit.runtime.format.arrays import MESH_AXES
from prejit.runtime.format.release_limits import DEFAULT_SHARES, SHARE_PATTERN, ReleaseLimits
from prejit.runtime.machine.fingerprint import PLATFORMS


@dataclass(frozen=True, slots=True)
class MeshTable:
    """`[mesh]`: the programs of a decoder, or of the user, run on several devices together.

    Attributes:
        data: rows of devices; each works on its own part of a batch.
        tensor: columns of devices; each holds its own part of the weights and of the KV cache.
        axes: names and sizes of the axes in their place, outermost first, for the user's functions.
    """

    __pydantic_config__: ClassVar = STRICT

    data: int = 1
    tensor: int = 1
    axes: dict[str, int] | None = None


# `documented` takes the meaning of the keys that are not listed here from `Program`.
@dataclass(frozen=True, slots=True)
class ProgramTable:
    """`[[program]]`: a function of the user.

    Attributes:
        function: `package.module:attribute`: a function, or a module of flax.linen, flax.nnx or equinox; or
            the path of a file, relative to the manifest: a `jax.export` artifact or StableHLO.
        args: shape strings such as `float32[{batch}, 128]`: a table of keyword arguments or a list of
            positional ones, nested as the pytrees that the function takes. Or `package.module:attribute`: a
            function that returns them as arrays, given a size for each variable of buckets. Not needed for
            a file.
        params: a .safetensors file or an orbax directory, relative to the manifest, with the first
            argument of the function.
        pad: variables of buckets that a call may have less of; arrays are padded with zeros, results are cut.
            The build tries some sizes, and refuses a program that gives other results than its function.
            "unchecked" means all variables, without this check; in the list, those beside it.
    """

    __pydantic_config__: ClassVar = STRICT

    name: str
    function: str
    args: Any = None
    buckets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    params: str | None = None
    static: dict[str, tuple[str | int | bool | float, ...]] = field(default_factory=dict)
    donate: tuple[str | int, ...] = ()
    pad: tuple[str, ...] | Literal["unchecked"] = ()
    mask: str | int | None = None
    open_sizes: tuple[str, ...] | Literal["unchecked"] = ()
    repeat: tuple[int, ...] = ()
    carry: tuple[str | int, ...] = ()
    shardings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    impure: bool = False
    check: ProgramCheck | None = None


SECTIONS: dict[str, tuple[type[Any], bool]] = {
    "bundle": (BundleTable, False),
    "model": (Model, False),
    "generate": (Generate, False),
    "draft": (DraftTable, False),
    "adapters": (AdapterSlots, False),
    "encode": (Encode, False),
    "slo": (ReleaseLimits, False),
    "mesh": (MeshTable, False),
    "program": (ProgramTable, True),
    "library": (Library, True),
    "target": (TargetTable, True),
}
"""The class of each section, and whether the section is an array of tables."""


_NESTED: dict[str | int, type[Any]] = {
    "gpu": GpuTable,
    "check": ProgramCheck,
    "answers": AnswersTable,
}
"""The classes of tables inside of sections."""
TOO_DEEP = "nested too deeply"

Respelt = list[tuple[KeyPath, KeyPath]]
"""Paths of misspelt keys: as they were probably meant, and as they are written."""


def respelt(data: dict[str, Any], problems: list[tuple[KeyPath, str]]) -> Respelt:
    """Rename the misspelt keys of a manifest, so that nothing that follows from them is a problem, too.

    Args:
        data: the manifest as tomllib returns it. A key that does not exist gets the name of the nearest one
            that is missing there; others stay.
        problems: gets each key that is renamed.
    """
    found = [*_respelt(data, (), SECTIONS, problems)]
    for name, (kind, _) in SECTIONS.items():
        keys = [each.name for each in fields(kind)]
        section = data.get(name)
        found += _respelt(section, (name,), keys, problems)
        for place, table in enumerate(section if isinstance(section, list) else ()):
            found += _respelt(table, (name, place), keys, problems)
    return found


def _respelt(
    table: Any, at: KeyPath, known: Collection[str], problems: list[tuple[KeyPath, str]]
) -> Iterator[tuple[KeyPath, KeyPath]]:
    for key in [key for key in table if key not in known] if isinstance(table, dict) else ():
        meant = nearest(key, known)
        if meant is not None and meant not in table:
            problems.append(((*at, key), unknown_key(key, known)))
            table[meant] = table.pop(key)
            yield (*at, meant), (*at, key)


def parse_sections(data: dict[str, Any], problems: list[tuple[KeyPath, str]]) -> dict[str, Any]:
    """Return the sections of a manifest as instances of their classes, sizes ascending.

    A section with a problem is None.
    """
    return {
        name: _parse_section(name, kind, repeated, data[name], problems)
        for name, (kind, repeated) in SECTIONS.items()
        if name in data
    }


def unknown_sections(data: dict[str, Any]) -> Problems:
    """Find the sections that do not exist."""
    for name in data:
        if name not in SECTIONS:
            yield (name,), unknown_key(name, SECTIONS)


def _parse_section(
    name: str, kind: type[Any], repeated: bool, value: Any, problems: list[tuple[KeyPath, str]]
) -> Any:
    import pydantic  # here: code that only names a section must not wait for it

    annotation: Any = list[kind] if repeated else kind  # type: ignore[valid-type]
    try:
        # JSON, because strict pydantic takes a dataclass from JSON only.
        content = json.dumps(_sorted_sizes(_as_json(value), name))
        return pydantic.TypeAdapter(annotation).validate_json(content)
    except pydantic.ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            where: KeyPath = (name, *detail["loc"])
            if detail["type"] == "json_invalid":
                problem = TOO_DEEP
            elif detail["type"] == "missing":
                problem = f"missing; expected {expected(where)}"
            elif detail["type"] == "unexpected_keyword_argument":
                nested = next((_NESTED[key] for key in where[:-1] if key in _NESTED), kind)
                allowed = [item.name for item in fields(nested)]
                problem = unknown_key(str(where[-1]), allowed)
            else:
                depth, found = _at(value, where[1:])
                where = where[: 1 + depth]
                problem = f"expected {expected(where)}; found {shown(found)}"
            if (where, problem) not in problems:  # each branch of a union has an error
                problems.append((where, problem))
        return None


def _as_json(value: Any) -> Any:
    """Return TOML as JSON. What JSON lacks becomes a table that no key accepts."""
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, str | bool) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return {"": 1.5}


def _sorted_sizes(value: Any, section: str) -> Any:
    """Return the section with its lists of sizes ascending, where they are lists of sizes."""
    if section == "generate" and isinstance(value, dict):
        return {key: _ascending(item) for key, item in value.items()}
    if section == "encode" and isinstance(value, dict):
        shapes = value.get("shapes")
        sizes = {name: _ascending(value[name]) for name in ("images", "packed") if name in value}
        value = {**value, **sizes}
        if isinstance(shapes, list) and all(map(is_int_list, shapes)):
            return {**value, "shapes": sorted(shapes)}
        return value
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


def _at(value: Any, path: KeyPath) -> tuple[int, Any]:
    """Return how much of a path leads to a value, and the value: pydantic adds the branch of a union."""
    for depth, key in enumerate(path):
        kind: type[Any] = list if isinstance(key, int) else dict
        if not isinstance(value, kind):
            return depth, value
        if isinstance(key, str) and key not in value:  # a branch of a union, at a table
            return depth, value
        value = value[key]
    return len(path), value


_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SIZE = {"type": "integer", "minimum": 1, "maximum": MAX_SIZE}
_SIZES = {"type": "array", "items": _SIZE, "minItems": 1, "uniqueItems": True}
_TREE = {
    "anyOf": [
        {"type": "string", "examples": ["float32[{batch}, 128]"]},
        {"type": "array", "items": {"$ref": "#/$defs/shapes"}},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/shapes"}},
    ]
}
_NARROWED: dict[str, dict[str, dict[str, Any]]] = {
    "bundle": {"name": {"maxLength": 128, "pattern": "^[a-z0-9]+((\\.|_|__|-+)[a-z0-9]+)*$"}},
    "model": {
        "dtype": {"enum": list(DTYPES)},
        "module": {
            "type": "string",
            "pattern": "^[^:]+:[^:]+$",
            "examples": ["package.module:attribute"],
        },
        "params": {"type": "string"},
    },
    "generate": {
        **{name: _SIZES for name in ("batch", "prompt", "context")},
        "draft_tokens": {"minimum": 0, "maximum": MAX_DRAFT},
        "cache_dtype": {"enum": list(CACHE_DTYPES)},
        "images": {"items": _SIZE, "uniqueItems": True},
    },
    "draft": {"dtype": {"enum": list(DTYPES)}},
    "adapters": {
        "slots": {"minimum": 1, "maximum": MAX_SLOTS},
        "rank": {"minimum": 1, "maximum": MAX_RANK},
        "targets": {"items": {"type": "string", "minLength": 1}, "uniqueItems": True},
    },
    "encode": {
        "shapes": {
            "items": {"type": "array", "items": _SIZE, "minItems": 2, "maxItems": 2},
            "minItems": 1,
            "uniqueItems": True,
        },
        "packed": {
            "items": {"type": "integer", "minimum": LEAST_PACKED, "maximum": MAX_PACKED},
            "minItems": 1,
            "uniqueItems": True,
        },
        "images": _SIZES,
        "heads": {"uniqueItems": True},
        "answers": {
            "properties": {
                "yes": {"type": "string", "minLength": 1},
                "no": {"type": "string", "minLength": 1},
                "template": {"type": "string"},
                "instruction": {"type": "string"},
            },
            "required": ["yes"],
        },
    },
    "mesh": {name: {"minimum": 1} for name in MESH_AXES},
    "slo": {
        each.name: {"pattern": SHARE_PATTERN} if each.name in DEFAULT_SHARES else {"minimum": 1}
        for each in fields(ReleaseLimits)
    },
    "program": {
        "name": {"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$", "not": {"enum": list(OWN_NAMES)}},
        "function": {
            "pattern": "^[^:]+:[^:]+$|[./]",
            "examples": ["package.module:attribute", "model.mlir"],
        },
        "args": {"anyOf": [{"type": "string", "pattern": "^[^:]+:[^:]+$"}, *_TREE["anyOf"][1:]]},
        "repeat": {"items": _SIZE, "uniqueItems": True},
        "check": {
            "properties": {
                "function": {"type": "string", "pattern": "^[^:]+:[^:]+$"},
                "files": {"items": {"type": "string"}},
                "tolerance": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
            }
        },
        "shardings": {
            "additionalProperties": {"type": "array", "items": {"type": "string"}, "minItems": 1}
        },
        "static": {
            "additionalProperties": {
                "type": "array",
                "items": {"type": ["string", "number", "boolean"]},
                "minItems": 1,
                "uniqueItems": True,
            }
        },
        "buckets": {"additionalProperties": _SIZES},
    },
    "target": {"platform": {"enum": list(PLATFORMS)}},
}
"""The values of each key, by section. The classes have only their types."""


def manifest_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a manifest."""
    sections = {name: _section(name, kind) for name, (kind, _) in SECTIONS.items()}
    sections["model"] |= {
        "anyOf": [{"required": ["source"]}, {"required": ["module"]}],
        "dependentRequired": {"params": ["module"], "adapters": ["source"]},
    }
    # A name outside the catalogue needs a table that describes the machine.
    sections["target"]["anyOf"] = [
        {"properties": {"name": {"enum": list(target_names())}}},
        {"required": ["fingerprint"]},
        {"required": ["platform"]},
    ]
    properties = {
        name: {"type": "array", "items": sections[name], "minItems": 1}
        if repeated
        else sections[name]
        for name, (_, repeated) in SECTIONS.items()
    }
    return {
        "$schema": _DIALECT,
        "title": "A manifest of prejit",
        "description": "What to compile ahead of time, and for which machines.",
        "type": "object",
        "properties": properties,
        "required": ["bundle", "target"],
        "additionalProperties": False,
        "anyOf": [
            {"required": ["model", "generate"], "not": {"required": ["encode"]}},
            {"required": ["model", "encode"], "not": {"required": ["generate"]}},
            {"required": ["program"], "not": {"required": ["model"]}},
        ],
        "$defs": {"shapes": _TREE},
    }


def _section(name: str, kind: type[Any]) -> dict[str, Any]:
    import pydantic

    schema = pydantic.TypeAdapter(kind).json_schema()
    definitions = schema.pop("$defs", {})
    schema = _tidy(_inlined(schema, definitions))
    summary, attributes = documented(kind)
    schema["description"] = summary
    schema["additionalProperties"] = False
    for key, value in schema["properties"].items():
        narrowed = dict(_NARROWED.get(name, {}).get(key, {}))
        for inner, more in narrowed.pop("properties", {}).items():
            value["properties"][inner] |= more
        value |= narrowed
        value["description"] = attributes[key]
    return schema


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema with its references to other classes replaced by what they refer to."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        found = _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        _, attributes = _described(found["description"])
        for key, value in found["properties"].items():
            value["description"] = attributes[key]
        return found
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def _tidy(schema: Any) -> Any:
    """Return a schema without titles and without null: TOML has no null, a key is left out instead."""
    if isinstance(schema, list):
        return [_tidy(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title"}
    if kept.get("default", 0) is None:
        del kept["default"]
    if isinstance(choices := kept.get("anyOf"), list):
        kept["anyOf"] = [each for each in choices if each != {"type": "null"}]
        if len(kept["anyOf"]) == 1:
            [only] = kept.pop("anyOf")
            kept |= only
    return {key: _tidy(value) for key, value in kept.items()}


def documented(kind: type[Any]) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a class's docstring, and the description of each attribute."""
    summary, attributes = _described(inspect.getdoc(kind) or "")
    return summary, documented(Program)[1] | attributes if kind is ProgramTable else attributes


def _described(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the description of each attribute."""
    summary, _, rest = text.partition("\n\nAttributes:\n")
    described: dict[str, str] = {}
    names: list[str] = []
    for line in rest.splitlines():
        if found := re.fullmatch(r"    (\w[\w, ]*): (.*)", line):
            names = [name.strip() for name in found[1].split(",")]
            described |= dict.fromkeys(names, found[2])
        elif line.strip():
            described |= {name: f"{described[name]} {line.strip()}" for name in names}
    return summary.replace("`", "").replace("\n", " "), described
