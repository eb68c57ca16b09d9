"""Canonical JSON, read strictly into frozen dataclasses."""

from __future__ import annotations

import json
import math
import reprlib
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from prejit.runtime.errors import RejectError
from prejit.runtime.records import fields, is_dataclass

MAX_INTEGER = (1 << 63) - 1
"""The largest integer that a file may hold; the smallest is its negative."""

MAX_JSON_ITEMS = 1 << 19
"""Maximum number of keys, and of lists and objects, in a config or a header of weights. 15,000 programs or
100,000 tensors have as many."""
_BYTES_AN_ITEM = 8
"""Minimum number of bytes of JSON for each key, and for each list or object, on average. Configs have 20."""
_FREE_JSON_ITEMS = 1 << 12
"""JSON is never refused for fewer items: they cannot take much memory or time."""

T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """Return canonical JSON of a dataclass or of plain data. Fields that are None are left out."""
    return _dumps(_plain(value))


def from_json(cls: type[T], content: bytes, path: str) -> T:
    """Read canonical JSON, as `to_json` writes it, as a dataclass; `path` is the file, for errors.

    Raises:
        RejectError: the content is not JSON or not canonical, or a key is missing, unknown or of another
        type.
    """
    # Canonical JSON has no spaces between these characters, and strings hold few of them.
    check_amount(content, (b'":',), (b":{", b",{", b"[{", b":[", b",[", b"[["), path)
    value, plain = _from_json(cls, content, path, None)
    if _dumps(plain) != content:
        raise RejectError(
            path, "expected canonical JSON (sorted keys, no spaces, no repeated keys)"
        )
    return value


def depth(value: object) -> int:
    """Return how many lists and objects of JSON are inside each other; 0: the value is neither."""
    count, level = 0, [value] if isinstance(value, dict | list) else []
    while level:
        count += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return count


def check_amount(
    content: bytes, keys: tuple[bytes, ...], containers: tuple[bytes, ...], path: str
) -> None:
    """Refuse JSON that takes too much memory and time as Python values: of brackets 30 times its size.

    Every key in JSON comes with at least one of the byte strings `keys`, every list or object with one of
    `containers`.

    Raises:
        RejectError: the content has more keys, or more lists and objects, than any bundle needs.
    """
    most = min(MAX_JSON_ITEMS, max(_FREE_JSON_ITEMS, len(content) // _BYTES_AN_ITEM))
    if len(content) <= most:
        return
    for what, marks in (("keys", keys), ("lists and objects", containers)):
        if (found := sum(map(content.count, marks))) > most:
            raise RejectError(
                path, f"expected at most {most} {what} in {len(content)} bytes, found {found}"
            )


def from_any_json(cls: type[T], content: bytes, path: str) -> T:
    """Read JSON that a person or a tool may have edited as a dataclass.

    Other than in `from_json`, keys may come in any order, with white space between them. No key may come
    twice.

    Raises:
        RejectError: the content is not JSON, or a key is missing, unknown, repeated or of another type.
    """
    value, _ = _from_json(cls, content, path, each_key_once)
    return value


def from_plain(cls: type[T], plain: Any) -> T:
    """Read parsed JSON as a dataclass, for files that newer versions may extend.

    Unknown keys are ignored. All fields must be there; null is a value for those that may be None. An
    integer is a number for a field of type float; infinity and NaN are not.

    Raises:
        ValueError: a key is missing, or a value has another type.
    """
    try:
        value: T = _reader(typing.cast(Any, cls), True)(plain, None)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return value


def parse_object(content: bytes) -> dict[str, Any]:
    """Return an object in JSON that any program may have written; empty: it is none."""
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _from_json(
    cls: type[T], content: bytes, path: str, pairs_hook: Callable[[Any], Any] | None
) -> tuple[T, Any]:
    """Return JSON as a dataclass and as plain data. `pairs_hook` is `object_pairs_hook` of `json.loads`."""
    try:
        plain = json.loads(content, object_pairs_hook=pairs_hook)
    except (ValueError, RecursionError) as error:
        raise RejectError(path, f"expected JSON: {error}") from error
    try:
        value: T = _reader(typing.cast(Any, cls))(plain, (None, "$"))
    except (TypeError, ValueError) as error:
        in_python = ".__init__() missing 1 required positional argument: "
        raise RejectError(path, str(error).replace(in_python, ": expected the key ")) from error
    return value, plain


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object made of its pairs, for `object_pairs_hook`.

    Raises:
        ValueError: a key comes twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {shown(twice)} comes twice")
    return found


_LIMITED = reprlib.Repr()
_LIMITED.maxlevel = 2
_LIMITED.maxstring = _LIMITED.maxlong = _LIMITED.maxother = 80


def shown(value: Any) -> str:
    """Return a short text of a value for an error, however large or deep the value is."""
    return f"{_LIMITED.repr(value):.80}"


def _dumps(plain: Any) -> bytes:
    """Return canonical JSON of plain data."""
    text = json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def _plain(value: Any) -> Any:
    """Return dataclasses as dicts without the fields that are None, and tuples as lists, at any depth."""
    if is_dataclass(value):
        pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: _plain(item) for name, item in pairs if item is not None}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


_Where = tuple["_Where | None", object]
"""The place of a JSON value: the place of its container, and its key or index there. Only an error needs it
as text."""


def _spell(where: _Where | None) -> str:
    """Return a place as text, such as `programs[3].name`."""
    parts = []
    while where is not None:
        where, key = where
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(parts)).removeprefix(".") or "file"


@cache
def _annotation(text: str, module: str) -> Any:
    """Return a type annotation of a module, as `typing.get_type_hints` reads it, but each text once."""
    return eval(text, vars(sys.modules[module]))  # noqa: S307  the text is in our own source


_Read = Callable[[Any, "_Where | None"], Any]
"""Checks a JSON value at a place and builds the Python value."""


@cache
def _reader(kind: Any, is_open: bool = False) -> _Read:
    """Return the function that checks JSON values against a type annotation and builds Python values.

    It is made once for each type, because a program table has thousands of values of a dozen types.
    `is_open`: whether the rules of `from_plain` hold.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(kind, is_open)
    if origin is tuple:
        return _list_reader(args[0], is_open)
    if origin is dict:
        return _object_reader(args[1], is_open)
    if is_dataclass(kind):
        return _dataclass_reader(typing.cast(Any, kind), is_open)
    if kind is Any:
        return lambda value, where: value
    if kind is float:
        return _read_float

    def read(value: Any, where: _Where | None) -> Any:
        if type(value) is not kind:  # not isinstance, because True is no integer here
            raise TypeError(f"{_spell(where)}: expected {kind.__name__}, found {shown(value)}")
        if kind is int and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise ValueError(
                f"{_spell(where)}: expected an integer of 64 bits, found {shown(value)}"
            )
        return value

    return read


def _read_float(value: Any, where: _Where | None) -> float:
    """Return a finite number as a float."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"{_spell(where)}: expected float, found {shown(value)}")
    return float(value)


def _union_reader(kind: Any, is_open: bool) -> _Read:
    """Return the reader of a union: the first option whose type fits reads the value."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    takes_null = is_open and len(options) < len(typing.get_args(kind))

    def read(value: Any, where: _Where | None) -> Any:
        if value is None:
            if takes_null:
                return None
            raise TypeError(f"{_spell(where)}: expected a value, found null")
        for option in options:
            is_class = isinstance(option, type) and not is_dataclass(option)
            if not is_class or option is float or type(value) is option:
                return _reader(typing.cast(Any, option), is_open)(value, where)
        raise TypeError(f"{_spell(where)}: expected {kind}, found {shown(value)}")

    return read


def _list_reader(item: Any, is_open: bool) -> _Read:
    """Return the reader of a list, which becomes a tuple."""
    read_item = _reader(item, is_open)

    def read(value: Any, where: _Where | None) -> Any:
        if type(value) is not list:
            raise TypeError(f"{_spell(where)}: expected a list, found {shown(value)}")
        if item is str and all(type(one) is str for one in value):
            return tuple(value)
        return tuple(read_item(one, (where, i)) for i, one in enumerate(value))

    return read


def _object_reader(item: Any, is_open: bool) -> _Read:
    """Return the reader of an object with any keys, which becomes a dict."""
    read_item = _reader(item, is_open)

    def read(value: Any, where: _Where | None) -> Any:
        if type(value) is not dict:
            raise TypeError(f"{_spell(where)}: expected an object, found {shown(value)}")
        return {key: read_item(one, (where, key)) for key, one in value.items()}

    return read


def _dataclass_reader(kind: Any, is_open: bool) -> _Read:
    """Return the reader of an object whose keys are the fields of a dataclass."""
    readers = {
        field.name: _reader(_annotation(typing.cast(str, field.type), kind.__module__), is_open)
        for field in fields(kind)
    }

    def read(value: Any, where: _Where | None) -> Any:
        if type(value) is not dict:
            raise TypeError(f"{_spell(where)}: expected an object, found {shown(value)}")
        if not is_open:
            if unknown := value.keys() - readers.keys():
                raise TypeError(f"{_spell(where)}: unknown key {shown(min(unknown))}")
            return kind(**{key: readers[key](one, (where, key)) for key, one in value.items()})
        if missing := [key for key in readers if key not in value]:
            raise TypeError(f"{_spell((where, missing[0]))}: expected it, found nothing")
        return kind(
            **{key: read_one(value[key], (where, key)) for key, read_one in readers.items()}
        )

    return read
