"""A client's mistake must be a 4xx that names it; an error of the server must not show its insides."""

import json
from typing import Any

import msgspec
import pytest
from starlette.exceptions import HTTPException

from prejit.runtime.errors import (
    ClosedError,
    ContextError,
    DeadlineError,
    NumbersError,
    QueueFullError,
    RejectError,
    UsageError,
)
from prejit.server.gate.http_errors import ApiError, as_api_error, response
from prejit.server.served.served import ModelNotFoundError


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UsageError("top_p: expected less", hint="try 1"), 400, "usage"),
        (ContextError("too long"), 400, "context_length_exceeded"),
        (ModelNotFoundError("model: no"), 404, "model_not_found"),
        (QueueFullError("full", retry_after=2.2), 429, "queue_full"),
        (ClosedError("closed"), 503, "closed"),
        (DeadlineError("late"), 504, "deadline"),
        (NumbersError("NaN"), 500, "no_numbers"),
        (RejectError("/srv/secret/path", "damaged"), 500, "reject"),
        (ValueError("a secret"), 500, "internal"),
        (HTTPException(405), 405, None),
        (ApiError(418, "a teapot", code="tea"), 418, "tea"),
    ],
)
def test_each_error_has_its_status(error, status, code):
    found = as_api_error(error)
    assert (found.status, found.code) == (status, code)
    content = json.loads(bytes(response(found, "/v1/completions").body))
    assert content["error"].keys() == {"message", "type", "param", "code"}
    assert "secret" not in content["error"]["message"]
    assert json.loads(bytes(response(found, "/v2/models/x/infer").body)) == {
        "error": content["error"]["message"]
    }


def test_those_who_should_come_again_learn_when():
    assert as_api_error(QueueFullError("full", retry_after=2.2)).headers == {"Retry-After": "3"}
    assert as_api_error(QueueFullError("full", retry_after=0)).headers == {"Retry-After": "1"}
    assert as_api_error(ClosedError("closed")).headers == {"Retry-After": "1"}


class Message(msgspec.Struct):
    role: str


class Body(msgspec.Struct):
    messages: list[Message]
    n: int = 1
    extra: Any = None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b'{"messages":[{"role":1}]}', "messages[0].role", "Expected `str`, got `int`"),
        (b'{"messages":[],"n":"x"}', "n", "Expected `int`, got `str`"),
        (b"{}", "messages", "messages: expected a value, found none"),
        (b'{"messages":[{}]}', "messages[0].role", "role: expected a value, found none"),
        (b"[]", None, "Expected `object`, got `array`"),
        (b"{", None, "expected JSON in UTF-8"),
        (b'{"messages":[{"role":"\xff"}]}', None, "expected JSON in UTF-8"),
        (b"", None, "expected JSON in UTF-8"),
        (b'{"extra":' + b"[" * 100_000, None, "nested less deeply"),
        (b'{"extra":' + b'{"a":' * 100_000, None, "nested less deeply"),
        (b'{"messages":' + b"[" * 10_000, "messages[0]", "Expected `object`, got `array`"),
    ],
)
def test_a_wrong_body_is_an_error_that_names_the_field(body, param, message):
    with pytest.raises(Exception) as raised:  # noqa: PT011 (of msgspec or of json)
        msgspec.json.decode(body, type=Body)
    error = as_api_error(raised.value)
    assert error.status == 400
    assert error.param == param
    assert message in error.message
