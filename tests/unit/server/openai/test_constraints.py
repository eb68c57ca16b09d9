"""The schema that forces calls of tools."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from prejit.server.gate.http_errors import ApiError
from prejit.server.openai.answer_bodies import chosen_tools
from prejit.server.openai.chat_messages import Function
from prejit.server.openai.constraints import Tool, forced_calls

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Point"}},
    "$defs": {"Point": {"type": "array", "items": {"type": "number"}}},
}


def test_definitions_of_tools_stay_where_their_references_look() -> None:
    tools = [Tool("move", POINT), Tool("stop", {"type": "object"})]
    schema = forced_calls(tools, only_one=False).schema
    assert schema is not None
    jsonschema.validate([{"name": "move", "arguments": {"at": [1]}}], schema)
    jsonschema.validate([{"name": "stop", "arguments": {}}] * 2, schema)
    for wrong in (
        [],
        [{"name": "go", "arguments": {}}],
        [{"name": "move", "arguments": {"at": ["x"]}}],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    assert "$defs" in POINT  # the request's own schema is unchanged


def test_one_call_is_the_most_without_parallel_calls() -> None:
    schema = forced_calls([Tool("stop", {"type": "object"})], only_one=True).schema
    assert schema is not None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "stop", "arguments": {}}] * 2, schema)


def test_two_definitions_of_one_name_are_refused() -> None:
    other = {"type": "object", "$defs": {"Point": {"type": "string"}}}
    with pytest.raises(ApiError, match="one definition of 'Point'"):
        forced_calls([Tool("a", POINT), Tool("b", other)], only_one=False)


@pytest.mark.parametrize(
    ("choice", "name", "param"),
    [("required", None, "tool_choice"), (None, "missing", "tool_choice")],
)
def test_a_call_of_a_tool_that_is_not_there_is_refused(
    choice: str | None, name: str | None, param: str
) -> None:
    functions = [] if choice else [Function(name="there")]
    with pytest.raises(ApiError) as raised:
        chosen_tools(functions, choice, name, parallel=None)
    assert raised.value.param == param


def test_none_hides_the_tools() -> None:
    assert chosen_tools([Function(name="f")], "none", None, parallel=None).functions == ()
