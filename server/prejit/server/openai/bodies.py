"""Bodies of requests and responses: JSON to Structs and back, and fields that no Struct has."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import Request

from prejit.runtime.base.wording import did_you_mean
from prejit.server.gate.http_errors import ApiError, field_error
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.prompts import off_loop
from prejit.server.served.served import Models, Served
from prejit.server.served.served_adapters import adapted_model

T = TypeVar("T")

encode = msgspec.json.Encoder().encode
"""Returns a value as compact JSON."""

_MOST_PARTS = 1 << 17
"""Maximum number of lists, members of objects and texts of a body. No other thread runs while they are made:
40 ms for so many, and a second for those that 16 MB can hold. Numbers take a quarter of that."""
_PIECE_BYTES = 1 << 16
_ESCAPED = re.compile(rb"\\.", re.DOTALL)

_NULL, _AT = "Expected `null`, ", " - at `$."
"""How msgspec says that a field of the type None has a value, and where."""


class RequestFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of a request. Those of type None are not supported."""


class Unused(RequestFields, frozen=True, kw_only=True):
    """Fields that are accepted and have no effect here: no answer depends on them.

    Attributes:
        user, safety_identifier: who asks.
        metadata: notes of the client.
        service_tier: how soon OpenAI answers.
        prompt_cache_key, prompt_cache_retention, prompt_cache_options: how OpenAI keeps prompts.
    """

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class ResponseFields(msgspec.Struct, frozen=True):
    """A part of a response."""


async def read(request: Request, decoder: msgspec.json.Decoder[T], settings: Settings) -> T:
    """Return the body of a request.

    Raises:
        ApiError: it has an unknown field, asks for something that is not supported, or exceeds Python's
            limits.
        msgspec.DecodeError, UnicodeDecodeError: it is no JSON, or a field has a wrong type.
    """
    body = await request.body()

    def decoded() -> T:
        check_parts(body)
        return decode(body, decoder, ignore_unknown=settings.ignore_unknown_fields)

    try:
        return await off_loop(len(body), decoded)
    except msgspec.ValidationError as error:
        text = str(error)
        if text.startswith(_NULL) and _AT in text:
            name = text.rpartition(_AT)[2].removesuffix("`")
            raise field_error(
                name, "this server does not support it; leave it out", code="unsupported_parameter"
            ) from error
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise
    except (RecursionError, ValueError) as error:  # nested too deeply, an integer of 5,000 digits
        raise ApiError(
            400, f"body: expected JSON within Python's limits, found {error}", code="invalid_json"
        ) from error


def check_parts(body: bytes) -> None:
    """Check that a JSON text has not too many parts. Other threads run meanwhile.

    Raises:
        ApiError: it has.
    """
    if len(body) <= _MOST_PARTS:
        return
    found, is_text, rest = 0, 0, b""
    for start in range(0, len(body), _PIECE_BYTES):
        piece = rest + body[start : start + _PIECE_BYTES]
        rest = piece[-1:] if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        texts = _ESCAPED.sub(b"", piece[: len(piece) - len(rest)]).split(b'"')
        outside = b"".join(texts[is_text::2])
        ended, is_text = divmod(len(texts) - 1 + is_text, 2)
        found += ended + sum(map(outside.count, (b"[", b"{", b":")))
        if found > _MOST_PARTS:
            raise ApiError(
                413,
                f"body: expected at most {_MOST_PARTS} lists, members of objects and texts, found more",
                code="body_too_large",
            )


def check_only(body: RequestFields, only: Mapping[str, Any]) -> None:
    """Check that fields that a server cannot do have the one value that asks for nothing.

    Args:
        body: the request.
        only: the value of each such field.

    Raises:
        ApiError: a field has another value.
    """
    for name, value in only.items():
        found = getattr(body, name)
        if found is not None and found != value:
            shown = msgspec.json.encode(found).decode()
            raise field_error(
                name,
                f"this server does not support {shown:.80}; leave it out",
                code="unsupported_parameter",
            )


def asked_model(models: Models, name: str | None) -> Served:
    """Return the model of a request for text, with the adapter that its name chooses. As `served_model`."""
    return served_model(models, None) if name is None else adapted_model(models, name)


def served_model(models: Models, name: str | None) -> Served:
    """Return the model of a request. A server of one model needs no name.

    Raises:
        ModelNotFoundError: there is no such model.
        ApiError: the name is missing, and there are several models.
    """
    if name is not None:
        return models.get(name)
    if len(models) == 1:
        return models.get(next(iter(models)).name)
    names = ", ".join(repr(each.name) for each in models) or "the served models (none yet)"
    raise field_error("model", f"expected one of {names}, found none")


def identity(served: Served, prefix: str) -> dict[str, Any]:
    """Return the fields that say which answer of which model this is; `prefix` begins its id."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": f"fp_{served.bundle.digest.removeprefix('sha256:')[:12]}",
    }


_UNKNOWN = "Object contains unknown field"
"""The beginning of the error of msgspec about a field that a Struct has not."""


_NO_CHOICE = re.compile(
    r"Invalid (?:enum )?value (?P<value>.*) - at `\$\.(?P<at>[^`]*)`", re.DOTALL
)
"""The error of msgspec about a value that is none of a few texts or numbers."""
_STEP = re.compile(r"\[[^]]*\]|[^.[]+")
"""A step of a path: the name of a field, or a place in a list."""


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
        ApiError: a field is unknown, or has a value that is none of its choices.
        msgspec.DecodeError, UnicodeDecodeError: it is no JSON, or a field has a wrong type.
    """
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        if found := _NO_CHOICE.fullmatch(str(error)):
            choices = list(dict.fromkeys(_choices(_described(decoder), _STEP.findall(found["at"]))))
            known = f"{'one of ' * (len(choices) > 1)}{', '.join(map(repr, choices))}"
            raise field_error(
                found["at"],
                f"expected {known}, found {found['value']:.80}: this server does not support others",
                code="invalid_value",
            ) from error
        if not str(error).startswith(_UNKNOWN):
            raise
        value = msgspec.json.decode(content)
        strays = _strays(value, _described(decoder), "")
        if ignore_unknown:
            for stray in [*strays]:
                del stray.holder[stray.name]
            return decoder.decode(msgspec.json.encode(value))
        for stray in strays:
            problem = "expected fields that this endpoint knows, found another one"
            meant = did_you_mean(stray.name, stray.known)
            raise field_error(stray.path, problem + meant, code="unknown_parameter") from error
        raise


def _choices(kind: inspect.Type, steps: Sequence[str]) -> Iterator[str | int | bool | None]:
    """Yield the values that a field may have, at a place in a value."""
    for each in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(each, inspect.LiteralType) and not steps:
            yield from each.values
        elif isinstance(each, inspect.StructType) and steps:
            if steps == [each.tag_field] and each.tag is not None:
                yield each.tag
            for field in each.fields:
                if field.encode_name == steps[0]:
                    yield from _choices(field.type, steps[1:])
        elif isinstance(each, inspect.ListType) and steps and steps[0].startswith("["):
            yield from _choices(each.item_type, steps[1:])


@cache
def _described(decoder: msgspec.json.Decoder[Any]) -> inspect.Type:
    return inspect.type_info(decoder.type)


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
