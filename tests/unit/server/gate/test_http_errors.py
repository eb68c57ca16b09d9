"""A client's mistake must be a 4xx that names it; an error of the server must not show its insides."""

import json
from typing import Any

import msgspec
import pytest
from starlette.exceptions import HTTPException

from prejit.runtime import errors
from prejit.server.gate.http_errors import ApiError, as_api_error, response
from prejit.server.served.served import ModelNotFoundError


@pytest.mark.parametrize(
    ("error", "status", "code", "after"),
    [
        (errors.UsageError("top_p: expected less", hint="try 1"), 400, "usage", None),
        (errors.ContextError("too long"), 400, "context_length_exceeded", None),
        (ModelNotFoundError("model: no"), 404, "model_not_found", None),
        (errors.QueueFullError("full", retry_after=2.2), 429, "queue_full", "3"),
        (errors.QueueFullError("idle", retry_after=0), 429, "queue_full", "1"),
        (errors.ClosedError("closed"), 503, "closed", "1"),
        (errors.DeadlineError("late"), 504, "deadline", None),
        (errors.NumbersError("NaN"), 500, "no_numbers", None),
        (errors.RejectError("/srv/secret/path", "damaged"), 500, "reject", None),
        (ValueError("a secret"), 500, "internal", None),
        (HTTPException(405), 405, None, None),
        (ApiError(418, "a teapot", code="tea"), 418, "tea", None),
    ],
)
def test_each_error_has_its_status_and_who_may_come_again_learns_when(error, status, code, after):
    found = as_api_error(error)
    assert (found.status, found.code) == (status, code)
    content = json.loads(bytes(response(found, "/v1/completions").body))
    assert content["error"].keys() == {"message", "type", "param", "code"}
    assert "secret" not in content["error"]["message"]
    other = json.loads(bytes(response(found, "/v2/models/x/infer").body))
    assert other == {"error": content["error"]["message"]}
    assert found.headers == ({} if after is None else {"Retry-After": after})


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
