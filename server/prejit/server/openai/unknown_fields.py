"""Unknown fields of requests: an error that names the nearest field there is, or left out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from prejit.runtime.base.wording import nearest
from prejit.server.gate.http_errors import ApiError

T = TypeVar("T")

_UNKNOWN = "Object contains unknown field"
"""The beginning of the error of msgspec about a field that a Struct has not."""


class _Stray(NamedTuple):
    """A field that no Struct has.

    Attributes:
        holder: the object with the field.
        name: of the field.
        path: where it is, such as `messages[0].nmae`.
        known: the names that the object may have.
    """

    holder: dict[str, Any]
    name: str
    path: str
    known: list[str]


def decode(content: bytes, decoder: msgspec.json.Decoder[T], *, ignore_unknown: bool) -> T:
    """Return the value of a JSON text.

    Args:
        content: the text.
        decoder: of Structs that forbid unknown fields.
        ignore_unknown: leave out the fields that no Struct has.

    Raises:
        ApiError: a field is unknown.
        msgspec.DecodeError, UnicodeDecodeError: it is no JSON, or a field has a wrong type.
    """
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        if not str(error).startswith(_UNKNOWN):
            raise
        value = msgspec.json.decode(content)
        strays = _strays(value, _described(decoder), "")
        if ignore_unknown:
            for stray in [*strays]:
                del stray.holder[stray.name]
            return decoder.decode(msgspec.json.encode(value))
        for stray in strays:
            raise _unknown(stray) from error
        raise


@cache
def _described(decoder: msgspec.json.Decoder[Any]) -> inspect.Type:
    return inspect.type_info(decoder.type)


def _unknown(stray: _Stray) -> ApiError:
    near = nearest(stray.name, stray.known)
    message = f"{stray.path}: expected fields that this endpoint knows, found another one"
    return ApiError(
        400,
        f"{message} (did you mean {near!r}?)" if near else message,
        param=stray.path,
        code="unknown_parameter",
    )


def _strays(value: Any, kind: inspect.Type, at: str) -> Iterator[_Stray]:
    """Yield the unknown fields of a value and of everything in it."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, dict):
        structs = [each for each in kinds if isinstance(each, inspect.StructType)]
        for struct in structs:
            if len(structs) > 1 and value.get(struct.tag_field) != struct.tag:
                continue
            fields = {field.encode_name: field.type for field in struct.fields}
            known = [*fields, *([struct.tag_field] if struct.tag_field is not None else [])]
            for name, inner in value.items():
                path = f"{at}.{name:.80}" if at else name[:80]
                if name not in known:
                    yield _Stray(value, name, path, known)
                elif name in fields:
                    yield from _strays(inner, fields[name], path)
    elif isinstance(value, list):
        for each in kinds:
            if isinstance(each, inspect.ListType):
                for place, item in enumerate(value):
                    yield from _strays(item, each.item_type, f"{at}[{place}]")
