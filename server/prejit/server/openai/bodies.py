"""Bodies of requests and responses: JSON to Structs and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from prejit.server.gate.http_errors import ApiError
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.prompts import off_loop
from prejit.server.openai.unknown_fields import decode
from prejit.server.served.served import Models, Served

T = TypeVar("T")

encode = msgspec.json.Encoder().encode
"""Returns a value as compact JSON."""

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
    try:
        ignore = settings.ignore_unknown_fields
        return await off_loop(len(body), lambda: decode(body, decoder, ignore_unknown=ignore))
    except msgspec.ValidationError as error:
        text = str(error)
        if text.startswith(_NULL) and _AT in text:
            name = text.rpartition(_AT)[2].removesuffix("`")
            raise ApiError(
                400,
                f"{name}: this server does not support it; leave it out",
                param=name,
                code="unsupported_parameter",
            ) from error
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise
    except (RecursionError, ValueError) as error:  # nested too deeply, an integer of 5,000 digits
        raise ApiError(
            400, f"body: expected JSON within Python's limits, found {error}", code="invalid_json"
        ) from error


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
            raise ApiError(
                400,
                f"{name}: this server does not support {shown:.80}; leave it out",
                param=name,
                code="unsupported_parameter",
            )


def answered(content: Any) -> Response:
    """Return a response with this JSON."""
    return Response(encode(content), media_type="application/json")


def served_model(models: Models, name: str | None) -> Served:
    """Return the model of a request. A server of one model needs no name.

    Raises:
        ModelNotFoundError: there is no such model.
        ApiError: the name is missing, and there are several models.
    """
    if name is not None:
        return models.get(name)
    if len(models) == 1:
        return next(iter(models))
    names = ", ".join(repr(each.name) for each in models)
    raise ApiError(400, f"model: expected one of {names}, found none", param="model")


def fingerprint(served: Served) -> str:
    """Return the name of a bundle's content, as `system_fingerprint`."""
    return f"fp_{served.bundle.digest.removeprefix('sha256:')[:12]}"
