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

_VALUES = ("const", "enum", "default", "examples", "example")
"""Keywords whose value is a value, or a list of values, and no schema."""
_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
"""Keywords whose numbers the grammar library reads as float64."""

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


def has_names_beside_others(schema: Any) -> bool:
    """Return whether an object may have members that the schema names, and others."""
    if not isinstance(schema, Mapping):
        return False
    named = schema.get("properties") or schema.get("patternProperties")
    if named and schema.get("additionalProperties") is not False:
        return True
    return any(has_names_beside_others(part) for _, part in _parts(schema))


def repeated_names(schema: Any) -> tuple[str, int, int] | None:
    """Find a `minProperties` that members of one name would satisfy: a grammar does not know which came.

    Returns:
        The JSON pointer of the keyword, the largest number that works there, and the number found.
    """
    if not isinstance(schema, Mapping):
        return None
    least, required = schema.get("minProperties"), schema.get("required")
    # One more than those that come once in any case is another one.
    names = required if isinstance(required, list | tuple) else ()
    most = len({name for name in names if isinstance(name, str)}) + 1
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if isinstance(least, int | float) and least > most and is_open:
        return "/minProperties", most, int(least)
    for step, part in _parts(schema):
        if found := repeated_names(part):
            return f"{step}{found[0]}", *found[1:]
    return None


def rounded_number(schema: Any) -> tuple[str, int | float] | None:
    """Find a number of a schema that llguidance 1.9.1 would change.

    It reads numbers as float64 and whole ones then as int64, so that a `const` of 2**53 + 1 gave 2**53.

    Returns:
        The JSON pointer of the number's keyword, and the number.
    """
    if not isinstance(schema, Mapping):
        return None
    for keyword in _NUMBERS:
        for number in _rounded(keyword, schema.get(keyword)):
            return f"/{keyword}", number
    for step, part in _parts(schema):
        if found := rounded_number(part):
            return f"{step}{found[0]}", found[1]
    return None


def _rounded(keyword: str, value: Any) -> Iterator[int | float]:
    """Yield the whole numbers in the value of a keyword that do not stay what they are."""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        # 2**63 becomes 2**63 - 1. A bound beyond int64 is refused there, or as good as none.
        is_exact = -(2**63) <= value < 2**63 and int(float(value)) == value
        is_far_bound = keyword not in _VALUES and abs(value) >= 2**63
        is_last = value == 2**63 - 1 and keyword != "exclusiveMaximum"
        if not (is_exact or is_far_bound or is_last):
            yield value
    elif keyword in _VALUES and isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _rounded(keyword, part)


def corrected(schema: Any, lenient: bool) -> Any:
    """Return a schema that llguidance 1.9.1 does not misread.

    It takes a class with all control characters for one with every escape of JSON, so that `[^"]` let a
    quotation mark come: patterns let no such class have NUL. If `lenient`, keywords with a number that it
    would round are left out.
    """
    if isinstance(schema, list | tuple):
        return [corrected(part, lenient) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {**schema}
    for keyword, value in schema.items():
        if lenient and keyword in _NUMBERS and any(True for _ in _rounded(keyword, value)):
            del copy[keyword]
        elif keyword == "pattern" and isinstance(value, str):
            copy[keyword] = _without_nul(value)
        elif keyword in _OF_MAPS and isinstance(value, Mapping):
            is_pattern = keyword == "patternProperties"
            copy[keyword] = {
                _without_nul(name) if is_pattern else name: corrected(part, lenient)
                for name, part in value.items()
            }
        elif keyword not in _VALUES:  # a $ref may lead into a keyword of any name, as `components`
            copy[keyword] = corrected(value, lenient)
    return copy


def _without_nul(pattern: str) -> str:
    return _NEGATED.sub(lambda found: found[1] or "[^\\x00" + ("\\-" if found[2] else ""), pattern)
