"""Calls of tools are found in text, however it is cut; what is no call stays text; a schema forces them."""

import json
import re
from decimal import Decimal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.server.gate.http_errors import ApiError
from prejit.server.openai.chat_messages import Function
from prejit.server.openai.tool_calls import (
    ForcedReader,
    ToolCall,
    ToolReader,
    alone,
    chosen_tools,
    forced_calls,
    new_call_id,
)

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'


def plain(parts):
    """Texts joined; calls as name and arguments."""
    found = []
    for part in parts:
        if isinstance(part, ToolCall):
            found.append((part.name, json.loads(part.arguments)))
        elif found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


def read(pieces, names=("add",), *, one=False):
    reader = ToolReader(names, only_one=one)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return plain([*parts, *reader.finish()])


CALL = ("add", {"a": 1, "b": "ü"})
CASES = {
    "nothing": ("", []),
    "text": ("Hello <tool, a < b", ["Hello <tool, a < b"]),
    "hermes": (HERMES, [CALL]),
    "text before": (f"I add.\n{HERMES}", ["I add.\n", CALL]),
    "two": (f"{HERMES}\n{HERMES}\n", [CALL, CALL]),
    "text between": (f"{HERMES}\n\nI add.\n{HERMES}\n ", [CALL, "\n\nI add.\n", CALL]),
    "without the last mark": (HERMES.removesuffix("</tool_call>"), [CALL]),
    "broken JSON": ("<tool_call>{a}</tool_call>!", ["<tool_call>{a}</tool_call>!"]),
    "its marks in a string": (
        '<tool_call>{"name": "add", "arguments": {"a": "\\"</tool_call>"}}</tool_call>!',
        [("add", {"a": '"</tool_call>'}), "!"],
    ),
    "cut off": ('<tool_call>{"name": "ad', ['<tool_call>{"name": "ad']),
    "arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [("add", {"a": 1})],
    ),
    "llama": ('{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
    "llama, two": (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}',
        [("add", {"a": 1}), ("add", {})],
    ),
    "llama with its mark": ('<|python_tag|>{"name": "add"}', [("add", {})]),
    "mistral": ('[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
    "mistral with its mark": ('[TOOL_CALLS] [{"name": "add", "arguments": {}}]', [("add", {})]),
    "an answer in JSON": ('{"name": "Ada", "age": 36}', ['{"name": "Ada", "age": 36}']),
    "another list": ("[1, 2]", ["[1, 2]"]),
    "an empty list": ("[]", ["[]"]),
    "text that begins like a list": (f"[Hm] {HERMES}\n{HERMES}", ["[Hm] ", CALL, CALL]),
    "JSON before": ('{"why": 1}' + HERMES + "!", ['{"why": 1}', CALL, "!"]),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_are_found_however_the_text_is_cut(case):
    text, expected = CASES[case]
    for width in (1, 2, 3, 7, 1000):
        assert read([text[i : i + width] for i in range(0, len(text), width)]) == expected, width


def test_text_is_not_held_back_and_numbers_and_nesting_in_calls_cannot_raise():
    reader = ToolReader(["add"])
    assert reader.push("Hello") == ["Hello"]
    assert reader.push(" <to") == [" "]
    assert reader.push("morrow") == ["<tomorrow"]
    deep = "[" * 100_000
    assert alone(deep, ["add"]) == []
    assert read([f"<tool_call>{deep}</tool_call>"]) == [f"<tool_call>{deep}</tool_call>"]
    huge = '{"name": "add", "arguments": {"a": 1e99999999999999999999}}'
    assert alone(huge, ["add"]) == []
    assert read(['<tool_call>{"name": "add", "arguments": NaN}</tool_call>'])[0] != ("add", None)


def test_forced_answers_are_calls_and_parallel_ones_are_dropped_where_one_is_the_most():
    assert read([f"{HERMES}\n{HERMES}"], one=True) == [CALL]
    both = '[{"name": "add", "arguments": {}}, {"name": "add", "arguments": {"a": 2}}]'
    assert read([both], one=True) == [("add", {})]

    def forced(name, text):
        reader = ForcedReader(name)
        assert [part for letter in text for part in reader.push(letter)] == []
        return plain(reader.finish())

    assert forced("add", ' {"a": 1}') == [("add", {"a": 1})]
    assert forced("add", '{"a": ') == ['{"a": ']
    assert forced(None, '[{"name": "add", "arguments": {"a": 1}}]') == [("add", {"a": 1})]
    assert forced(None, '[{"name": "add"') == ['[{"name": "add"']
    cut = '[{"name": "add", "arguments": {"a": "}]"}}, {"name": "add", "arguments": {"a": {"b": 1}'
    assert forced(None, cut) == [("add", {"a": "}]"})]
    numbers = [1.10, 12345678901234567890123, Decimal("0.12345678901234567890"), Decimal("1E+999")]
    written = ",".join(map(str, numbers))
    reader = ForcedReader(None)
    reader.push(f'[{{"name": "add", "arguments": [{written}]}}]')
    assert reader.finish()[0].arguments == f"[{written}]"
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in ids)  # what Mistral takes


@given(st.lists(st.text(alphabet='<tool_cal>/{}"name:[], \n', max_size=12), max_size=8))
def test_nothing_is_lost_of_what_is_no_call(pieces):
    assert "".join(map(str, read(pieces, names=("never",)))) == "".join(pieces)


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
