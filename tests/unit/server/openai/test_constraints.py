"""The schema that forces calls of tools."""

import jsonschema
import pytest

from prejit.server.gate.http_errors import ApiError
from prejit.server.openai.chat_messages import Function
from prejit.server.openai.constraints import chosen_tools, forced_calls

POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Point"}},
    "$defs": {"Point": {"type": "array", "items": {"type": "number"}}},
}


def test_definitions_of_tools_stay_where_their_references_look_and_are_one_each():
    tools = [Function(name="move", parameters=POINT), Function(name="stop")]
    schema = forced_calls(tools, only_one=False).schema
    jsonschema.validate([{"name": "move", "arguments": {"at": [1]}}], schema)
    jsonschema.validate([{"name": "stop", "arguments": {}}] * 2, schema)
    other, letters = {"name": "go", "arguments": {}}, {"name": "move", "arguments": {"at": ["x"]}}
    for wrong in ([], [other], [letters]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    assert "$defs" in POINT  # the request's own schema is unchanged
    one = forced_calls([Function(name="stop")], only_one=True).schema
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "stop", "arguments": {}}] * 2, one)
    other = {"type": "object", "$defs": {"Point": {"type": "string"}}}
    both = [Function(name="a", parameters=POINT), Function(name="b", parameters=other)]
    with pytest.raises(ApiError, match="one definition of 'Point'"):
        forced_calls(both, only_one=False)


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
