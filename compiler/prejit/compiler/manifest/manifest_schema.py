"""The JSON Schema of manifests, for editors: completion, types and the meaning of every key.

The classes of the sections decide it: pydantic gives the types, the `Attributes:` of each docstring give the
descriptions. Rules between keys are in `checks`, which a build runs.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from prejit.compiler.manifest.expected import CACHE_DTYPES, DTYPES, MAX_DRAFT
from prejit.compiler.manifest.manifest_checks import OWN_NAMES
from prejit.compiler.manifest.manifest_tables import SECTIONS
from prejit.compiler.manifest.shape_string import MAX_SIZE
from prejit.compiler.targets.target_table import names as target_names
from prejit.runtime.format.arrays import MESH_AXES
from prejit.runtime.machine.requirement import PLATFORMS

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
    },
    "encode": {
        "shapes": {
            "items": {"type": "array", "items": _SIZE, "minItems": 2, "maxItems": 2},
            "minItems": 1,
            "uniqueItems": True,
        }
    },
    "mesh": {name: {"minimum": 1} for name in ("data", "tensor")},
    "program": {
        "name": {"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$", "not": {"enum": list(OWN_NAMES)}},
        "function": {
            "pattern": "^[^:]+:[^:]+$|[./]",
            "examples": ["package.module:attribute", "model.mlir"],
        },
        "args": {"anyOf": [{"type": "string", "pattern": "^[^:]+:[^:]+$"}, *_TREE["anyOf"][1:]]},
        "repeat": {"items": _SIZE, "uniqueItems": True},
        "shardings": {
            "additionalProperties": {
                "type": "array",
                "items": {"enum": ["", *MESH_AXES]},
                "minItems": 1,
            }
        },
        "static": {
            "additionalProperties": {
                "type": "array",
                "items": {"type": ["string", "integer", "boolean"]},
                "minItems": 1,
                "uniqueItems": True,
            }
        },
        "buckets": {"additionalProperties": _SIZES},
    },
    "target": {"platform": {"enum": list(PLATFORMS)}},
}
"""What the classes do not say: the values of each key, by section."""


def manifest_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a manifest."""
    sections = {name: _section(name, kind) for name, (kind, _) in SECTIONS.items()}
    sections["model"] |= {
        "anyOf": [{"required": ["source"]}, {"required": ["module"]}],
        "dependentRequired": {"params": ["module"]},
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
    """Return the schema of one section."""
    import pydantic

    schema = pydantic.TypeAdapter(kind).json_schema()
    definitions = schema.pop("$defs", {})
    schema = _tidy(_inlined(schema, definitions))
    summary, attributes = documented(kind)
    schema["description"] = summary
    schema["additionalProperties"] = False
    for key, value in schema["properties"].items():
        value |= _NARROWED.get(name, {}).get(key, {})
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
    return _described(inspect.getdoc(kind) or "")


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
