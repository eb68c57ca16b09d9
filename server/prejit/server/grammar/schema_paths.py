"""Find the part of a JSON schema that an error is about, and correct patterns for the grammar library."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ROOT = "whole"
"""The name under which the whole schema stands in `$defs` while one of its parts is tried."""
_OF_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas."""
_OF_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
"""Keywords whose value is a list of schemas."""
_OF_ONE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
"""Keywords whose value is a schema."""
_TRIES = 500
"""Maximum number of parts that are compiled to find one error; the place is less exact beyond it."""
_SECONDS = 0.5
"""Maximum CPU time of the same."""

_NEGATED = re.compile(r"(\\.)|\[\^(-?)(?!\])", re.DOTALL)
"""An escape in a regular expression, or the beginning of a class of all characters but some."""


def error_path(schema: Any, error: str, error_of: Callable[[Any], str]) -> str:
    """Return the JSON pointer of the smallest part of a schema that has an error, such as `/properties/a`.

    Returns:
        An empty text for the whole schema.
    """
    try:
        whole = moved(schema, f"/$defs/{_ROOT}")
    except RecursionError:
        return ""
    left, until = _TRIES, time.thread_time() + _SECONDS
    pointer, found = "", schema
    while True:
        # References last: what is wrong behind one has a place of its own, unless the reference is wrong.
        for step, part in sorted(_parts(found), key=_is_reference):
            if (left := left - 1) < 0 or time.thread_time() > until:
                return pointer
            there = f"{pointer}{step}"
            tried = {"$ref": f"#/$defs/{_ROOT}{there}", "$defs": {_ROOT: whole}}
            if error_of(tried).replace(f"/$defs/{_ROOT}", "") == error:
                pointer, found = there, part
                break
        else:
            return pointer


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema, each with its step of a JSON pointer."""
    if not isinstance(schema, Mapping):
        return
    for keyword in schema:
        value = schema[keyword]
        if keyword in _OF_MAPS and isinstance(value, Mapping):
            for name, part in value.items():
                yield f"/{keyword}/{escaped(str(name))}", part
        elif keyword in _OF_LISTS and isinstance(value, list | tuple):
            for place, part in enumerate(value):
                yield f"/{keyword}/{place}", part
        elif keyword in _OF_ONE:
            yield f"/{keyword}", value


def _is_reference(step_and_part: tuple[str, Any]) -> bool:
    part = step_and_part[1]
    return isinstance(part, Mapping) and "$ref" in part


def escaped(name: str) -> str:
    """Return a name as a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def moved(schema: Any, to: str) -> Any:
    """Return a schema for a place in another one: its references to its own parts lead there."""
    if isinstance(schema, Mapping):
        copy = {key: moved(value, to) for key, value in schema.items()}
        target = schema.get("$ref")
        if isinstance(target, str) and (target == "#" or target.startswith("#/")):
            copy["$ref"] = f"#{to}{target[1:]}"
        return copy
    if isinstance(schema, list | tuple):
        return [moved(value, to) for value in schema]
    return schema


def without_nul(schema: Any) -> Any:
    """Return a schema whose patterns let no class like `[^"]` have NUL.

    llguidance 1.9.1 takes a class with all control characters for one with every escape of JSON, so that
    `[^"]` let a quotation mark come.
    """
    if not isinstance(schema, Mapping):
        return schema
    copy = {**schema}
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            copy[keyword] = _NEGATED.sub(
                lambda found: found[1] or "[^\\x00" + ("\\-" if found[2] else ""), value
            )
        elif keyword in _OF_MAPS and isinstance(value, Mapping):
            copy[keyword] = {name: without_nul(part) for name, part in value.items()}
        elif keyword in _OF_LISTS and isinstance(value, list | tuple):
            copy[keyword] = [without_nul(part) for part in value]
        elif keyword in _OF_ONE:
            copy[keyword] = without_nul(value)
    return copy
