"""The schema that forces calls of tools."""

import jsonschema
import pytest

from prejit.server.gate.http_errors import ApiError
from prejit.server.openai.chat_messages import Function
from prejit.server.openai.constraints import chosen_tools, forced_calls

REFERENCES = {"at": "#/$defs/Point", "next": "#", "from": "#/properties/at"}
POINT = {
    "type": "object",
    "properties": {name: {"$ref": target} for name, target in REFERENCES.items()},
    "additionalProperties": False,
    "$defs": {"Point": {"type": "array", "items": {"type": "number"}}},
}


def test_references_of_tools_lead_into_the_parameters_of_the_same_tool():
    letters = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Point"}}}
    letters["$defs"] = {"Point": {"type": "string"}}
    tools = [Function(name="move", parameters=POINT), Function(name="write", parameters=letters)]
    tools.append(Function(name="stop"))
    schema = forced_calls(tools, only_one=False).schema
    move = {"at": [1], "next": {"next": {"at": [2]}}, "from": [3]}
    jsonschema.validate([{"name": "move", "arguments": move}], schema)
    jsonschema.validate([{"name": "write", "arguments": {"at": "x"}}], schema)
    jsonschema.validate([{"name": "stop", "arguments": {}}] * 2, schema)
    call = {"name": "move", "arguments": {}}
    for wrong in ({"at": ["x"]}, {"at": "x"}, {"next": [call]}, {"next": {"at": 1}}, {"from": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{**call, "arguments": wrong}], schema)
    assert POINT["properties"]["next"] == {"$ref": "#"}  # the request's own schema is unchanged
    no_map = {"type": "object", "$defs": []}  # which the grammar library judges
    assert forced_calls([Function(name="f", parameters=no_map)], only_one=True).source().schemas
    one = forced_calls([Function(name="stop")], only_one=True).schema
    for wrong in ([], [{"name": "go", "arguments": {}}], [{"name": "stop", "arguments": {}}] * 2):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, one)


def test_only_the_allowed_tools_are_shown_and_called():
    there = [Function(name="there")]
    for functions, choice, name in (([], "required", None), (there, None, "missing")):
        with pytest.raises(ApiError) as raised:
            chosen_tools(functions, choice, name, parallel=None)
        assert raised.value.param == "tool_choice"
    with pytest.raises(ApiError, match="expected one of 'there', found 'missing'"):
        chosen_tools(there, "auto", None, allowed=["there", "missing"], parallel=None)
    functions = [Function(name="f"), Function(name="g")]
    assert chosen_tools(functions, "none", None, parallel=None).functions == ()
    some = chosen_tools(functions, "auto", None, allowed=["g"], parallel=None)
    assert [each.name for each in some.functions] == ["g"]
