"""Errors as clients get them: status, headers, and the JSON of OpenAI's API or the inference protocol."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.errors import (
    ClosedError,
    ContextError,
    DeadlineError,
    NumbersError,
    PrejitError,
    QueueFullError,
    UsageError,
)
from prejit.server.served.served import ModelNotFoundError

RETRY_SECONDS = 1
"""Retry-After of a server that loads or ends. It is short, because another server may answer at once."""
GONE = 499
"""Status of a request whose client has closed its connection, as nginx has it in its log."""


class ApiError(Exception):
    """A request that a handler refuses itself.

    Attributes:
        status: the HTTP status.
        message: one sentence with where, what was expected and what was found.
        type: OpenAI's kind of error.
        param: the field of the body that is at fault, or None.
        code: a stable name of the error, or None.
        headers: more headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}


def field_error(field: str, problem: str, *, code: str | None = None) -> ApiError:
    """Return the error of a field of the body that does not have a value that it may have."""
    return ApiError(400, f"{field}: {problem}", param=field, code=code)


_KINDS: dict[type[PrejitError], tuple[int, str, str]] = {
    ContextError: (400, "invalid_request_error", "context_length_exceeded"),
    ModelNotFoundError: (404, "invalid_request_error", "model_not_found"),
    UsageError: (400, "invalid_request_error", ""),
    QueueFullError: (429, "rate_limit_error", "queue_full"),
    ClosedError: (503, "server_error", "closed"),
    DeadlineError: (504, "timeout_error", "deadline"),
    NumbersError: (500, "server_error", "no_numbers"),
}
"""The status of an error, OpenAI's kind of error, and a stable name; empty: the code of the error's class.
The first class in the order of inheritance decides. All other errors are status 500."""

_AT = re.compile(r" - at (?:`key` in )?`(?P<path>.*)`$", re.DOTALL)
"""How msgspec ends a message: with the path of the value, `$.messages[0].role`."""
_LACKING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
"""How msgspec says that an object lacks a field."""


def as_api_error(error: Exception) -> ApiError:
    """Return an error as the client gets it.

    An error that the client cannot mend has no details: those are for the server's log.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientDisconnect):
        # Nobody reads the answer; the log of requests has its status.
        return ApiError(GONE, "expected a client that waits for the answer, found it gone")
    if isinstance(error, HTTPException):  # Starlette's own: no such path, or another method
        return ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))
    if isinstance(error, msgspec.ValidationError):
        message, param = str(error), None
        if found := _AT.search(message):
            param = found["path"].removeprefix("$").removeprefix(".") or None
            message = message[: found.start()]
        if lacking := _LACKING.fullmatch(message):
            field = ".".join(filter(None, (param, lacking["name"])))
            problem = "expected a value, found none"
            return field_error(field, problem, code="missing_required_parameter")
        return ApiError(400, f"{param or 'body'}: {message}", param=param, code="invalid_type")
    if isinstance(error, msgspec.DecodeError | UnicodeDecodeError):
        return ApiError(400, f"body: expected JSON in UTF-8, found {error}", code="invalid_json")
    if isinstance(error, RecursionError):  # nothing here recurses but over what a client sent
        return ApiError(400, "body: expected values nested less deeply", code="invalid_json")
    if isinstance(error, PrejitError):
        for each in type(error).__mro__:
            if each in _KINDS:
                return _of_prejit(error, *_KINDS[each])
        return ApiError(
            500,
            f"the bundle cannot be used: error[{error.code}]",
            type="server_error",
            code=error.code,
        )
    return ApiError(500, "internal error", type="server_error", code="internal")


def _of_prejit(error: PrejitError, status: int, kind: str, code: str) -> ApiError:
    text = f"{error} ({error.hint})" if error.hint else str(error)
    headers = {}
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    elif isinstance(error, ClosedError):
        headers = {"Retry-After": str(RETRY_SECONDS)}
    param = "model" if isinstance(error, ModelNotFoundError) else None
    return ApiError(status, text, type=kind, param=param, code=code or error.code, headers=headers)


class ErrorFields(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a response.

    Attributes:
        message: one sentence with where, what was expected and what was found.
        type: the kind of error.
        param: the field at fault.
        code: a stable name of the error.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response that is an error."""

    error: ErrorFields


def error_json(error: ApiError) -> ErrorBody:
    """Return the error object of OpenAI's API."""
    return ErrorBody(error=msgspec.convert(error, ErrorFields, from_attributes=True))


def response(error: ApiError, path: str) -> Response:
    """Return the response for an error, in the form that clients of the path read."""
    of_inference = path == "/v2" or (path.startswith("/v2/") and path != "/v2/rerank")
    content = {"error": error.message} if of_inference else error_json(error)
    return json_response(content, error.status, error.headers)


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with this JSON."""
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


async def handle(request: Request, error: Exception) -> Response:
    """Answer a request whose handler raised, or which has none; Starlette calls it."""
    path, refused = request.url.path, as_api_error(error)
    if refused.status == 405 and isinstance(error, HTTPException):
        refused.message = (
            f"{path:.200}: expected {refused.headers['Allow']}, found {request.method}"
        )
    elif refused.status == 404 and isinstance(error, HTTPException):
        # A client's base URL often lacks /v1, or has it twice.
        known = [each.path for each in request.app.routes if hasattr(each, "path")]
        meant = did_you_mean(path.rstrip("/")[:200], known)
        refused.message = (
            f"{request.method} {path:.200}: expected a path of this server, found another{meant}"
        )
    return response(refused, path)
