"""Canonical JSON, read strictly into frozen dataclasses."""

from __future__ import annotations

import json
import reprlib
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from prejit.runtime.errors import RejectError

MAX_INTEGER = (1 << 63) - 1
"""The largest integer that a file may hold; the smallest is its negative."""

MAX_JSON_ITEMS = 1 << 19
"""Keys, and lists and objects, of a config or a header of weights: 15,000 programs or 100,000 tensors."""
_SMALL_JSON_BYTES = 1 << 20

T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """Canonical JSON of a dataclass of this module or of plain data. Fields that are None are left out."""
    return _dumps(_plain(value))


def from_json(cls: type[T], content: bytes, path: str) -> T:
    """Reads canonical JSON as a dataclass of this module.

    Args:
        cls: the dataclass that the content must be.
        content: bytes as `to_json` writes them.
        path: the file that they came from, for errors.

    Raises:
        RejectError: not JSON, not canonical, a key missing, unknown or of another type.
    """
    # Of canonical JSON, where nothing stands between these; strings hold few of them.
    check_amount(content, (b'":',), (b":{", b",{", b"[{", b":[", b",[", b"[["), path)
    value, plain = _from_json(cls, content, path, None)
    if _dumps(plain) != content:
        raise RejectError(
            path, "expected canonical JSON (sorted keys, no spaces, no repeated keys)"
        )
    return value


def check_amount(
    content: bytes, keys: tuple[bytes, ...], containers: tuple[bytes, ...], path: str
) -> None:
    """Bounds what JSON takes as Python values: up to 30 bytes for each of its own, where it is all brackets.

    Args:
        content: JSON.
        keys: what every key has at least one of.
        containers: what every list and object has at least one of.
        path: the file, for errors.

    Raises:
        RejectError: it has more than any bundle.
    """
    if len(content) <= _SMALL_JSON_BYTES:
        return
    for what, marks in (("keys", keys), ("lists and objects", containers)):
        if (found := sum(map(content.count, marks))) > MAX_JSON_ITEMS:
            raise RejectError(path, f"expected at most {MAX_JSON_ITEMS} {what}, found {found}")


def from_any_json(cls: type[T], content: bytes, path: str) -> T:
    """Reads JSON as a dataclass, as `from_json`, but spelled as a person or their tools like it.

    Keys may come in any order, with white space between; no key may come twice.

    Raises:
        RejectError: not JSON, a key missing, unknown, repeated or of another type.
    """
    value, _ = _from_json(cls, content, path, each_key_once)
    return value


def _from_json(
    cls: type[T], content: bytes, path: str, pairs_hook: Callable[[Any], Any] | None
) -> tuple[T, Any]:
    try:
        plain = json.loads(content, object_pairs_hook=pairs_hook)
    except (ValueError, RecursionError) as error:
        raise RejectError(path, f"expected JSON: {error}") from error
    try:
        value: T = _reader(typing.cast(Any, cls))(plain, (None, "$"))
    except (TypeError, ValueError) as error:
        raise RejectError(path, str(error)) from error
    return value, plain


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs, for `object_pairs_hook`.

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
    """A value in an error: short, however large or deep it is."""
    return f"{_LIMITED.repr(value):.80}"


def _dumps(plain: Any) -> bytes:
    text = json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: _plain(item) for name, item in pairs if item is not None}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


_Where = tuple["_Where | None", object]
"""Where in a JSON value: the place of what holds it, and the key or index there. Errors alone spell it."""


def _spell(where: _Where) -> str:
    parts = []
    at: _Where | None = where
    while at is not None:
        at, key = at
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(parts)).removeprefix(".")


@cache
def _annotation(text: str, module: str) -> Any:
    """A type annotation of a module, as `typing.get_type_hints` reads it, but each text once."""
    return eval(text, vars(sys.modules[module]))  # noqa: S307  it stands in our own source


@cache
def _reader(kind: Any) -> Callable[[Any, _Where], Any]:
    """What checks a JSON value against a type annotation of this module and builds it.

    Made once for each type: a program table has thousands of values of a dozen types.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(kind, [option for option in args if option is not type(None)])
    if origin is tuple:
        return _list_reader(args[0])
    if origin is dict:
        return _object_reader(args[1])
    if is_dataclass(kind):
        return _dataclass_reader(typing.cast(Any, kind))

    def read(value: Any, where: _Where) -> Any:
        if type(value) is not kind:  # `type is`, not isinstance: True is no integer here
            raise TypeError(f"{_spell(where)}: expected {kind.__name__}, found {shown(value)}")
        if kind is int and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise ValueError(
                f"{_spell(where)}: expected an integer of 64 bits, found {shown(value)}"
            )
        return value

    return read


def _union_reader(kind: Any, options: list[Any]) -> Callable[[Any, _Where], Any]:
    def read(value: Any, where: _Where) -> Any:
        if value is None:
            raise TypeError(f"{_spell(where)}: expected a value, found null")
        for option in options:
            if not isinstance(option, type) or is_dataclass(option) or type(value) is option:
                return _reader(typing.cast(Any, option))(value, where)
        raise TypeError(f"{_spell(where)}: expected {kind}, found {shown(value)}")

    return read


def _list_reader(item: Any) -> Callable[[Any, _Where], Any]:
    read_item = _reader(item)

    def read(value: Any, where: _Where) -> Any:
        if type(value) is not list:
            raise TypeError(f"{_spell(where)}: expected a list, found {shown(value)}")
        if item is str and all(type(one) is str for one in value):
            return tuple(value)
        return tuple(read_item(one, (where, i)) for i, one in enumerate(value))

    return read


def _object_reader(item: Any) -> Callable[[Any, _Where], Any]:
    read_item = _reader(item)

    def read(value: Any, where: _Where) -> Any:
        if type(value) is not dict:
            raise TypeError(f"{_spell(where)}: expected an object, found {shown(value)}")
        return {key: read_item(one, (where, key)) for key, one in value.items()}

    return read


def _dataclass_reader(kind: Any) -> Callable[[Any, _Where], Any]:
    readers = {
        field.name: _reader(_annotation(typing.cast(str, field.type), kind.__module__))
        for field in fields(kind)
    }

    def read(value: Any, where: _Where) -> Any:
        if type(value) is not dict:
            raise TypeError(f"{_spell(where)}: expected an object, found {shown(value)}")
        if unknown := value.keys() - readers.keys():
            raise TypeError(f"{_spell(where)}: unknown key {shown(min(unknown))}")
        return kind(**{key: readers[key](one, (where, key)) for key, one in value.items()})

    return read
