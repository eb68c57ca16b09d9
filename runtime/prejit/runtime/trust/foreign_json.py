"""JSON that other tools wrote: any spelling, but no key twice, no other encoding, and limits."""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

from prejit.runtime.base.typed_json import MAX_INTEGER, each_key_once, shown
from prejit.runtime.trust.reasons import RefusedError

MAX_DEPTH = 32
"""Maximum number of lists and objects inside each other. Statements of SLSA have 8."""

_T = TypeVar("_T")
_NAMES = {str: "text", int: "an integer", list: "a list", dict: "an object"}


def read_object(content: bytes, max_bytes: int, case: str, what: str) -> dict[str, Any]:
    """Return a JSON object.

    Args:
        content: the bytes, in UTF-8.
        max_bytes: the most that there may be.
        case: name of the reason if it is none.
        what: what it is, for the reason.

    Raises:
        RefusedError: it is too large or no JSON object, has a key twice, or is nested too deeply.
    """
    if len(content) > max_bytes:
        raise RefusedError(
            f"{case}-size", f"{what}: expected at most {max_bytes} bytes, found {len(content)}"
        )
    try:
        text = content.decode("utf-8")
        found = json.loads(text, object_pairs_hook=each_key_once, parse_constant=_no_number)
        text.encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise RefusedError(case, f"{what}: expected JSON: {error!s:.80}") from error
    if type(found) is not dict:
        raise RefusedError(case, f"{what}: expected a JSON object, found {shown(found)}")
    if _depth(found) > MAX_DEPTH:
        raise RefusedError(case, f"{what}: expected at most {MAX_DEPTH} levels, found more")
    return found


def field(found: dict[str, Any], name: str, kind: type[_T], case: str, what: str) -> _T:
    """Return a value of an object, which must be there and have this type.

    Args:
        found: the object.
        name: the key.
        kind: str, int, list or dict.
        case: name of the reason if it is not there.
        what: what the object is, for the reason.

    Raises:
        RefusedError: the key is missing, or its value has another type.
    """
    value: Any = found.get(name)
    if type(value) is not kind or (kind is int and not _is_small(value)):
        raise RefusedError(case, f"{what}: {name}: expected {_NAMES[kind]}, found {shown(value)}")
    checked: _T = value
    return checked


def _is_small(value: Any) -> bool:
    return bool(-MAX_INTEGER <= value <= MAX_INTEGER)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _depth(found: Any) -> int:
    depth, level = 0, [found]
    while level:
        depth += 1
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return depth
