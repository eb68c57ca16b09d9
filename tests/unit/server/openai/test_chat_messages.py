"""Messages become what chat templates take, and what templates could not take is refused by name."""

import msgspec
import pytest

from prejit.server.gate.http_errors import ApiError
from prejit.server.openai.chat_messages import Function, Message, for_template, plain_tools
from prejit.server.openai.responses import messages_of
from prejit.server.openai.responses_schema import ResponseRequest


def templated(*messages):
    return for_template(msgspec.convert([*messages], list[Message]))


def test_messages_items_and_tools_become_what_templates_take():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    system, assistant = templated(
        {"role": "developer", "content": parts}, {"role": "assistant", "tool_calls": [call]}
    )
    assert system == {"role": "system", "content": "one\ntwo"}
    assert assistant["content"] is None
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    call = {"type": "function_call", "name": "add"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {**call, "call_id": "c", "arguments": "{}"},
        {**call, "call_id": "d", "arguments": ""},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    body = {"instructions": "Be short.", "input": items}
    system, user, assistant, tool = messages_of(msgspec.convert(body, ResponseRequest))
    assert system == {"role": "system", "content": "Be short."}
    assert user == {"role": "user", "content": "1+1?"}
    assert [call["id"] for call in assistant["tool_calls"]] == ["c", "d"]
    assert tool == {"role": "tool", "tool_call_id": "c", "content": "2"}
    [tool] = plain_tools([Function(name="f", strict=True)])
    assert tool["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}


def test_what_is_not_supported_is_no_object_or_lacks_a_field_is_named():
    for message, path in (
        ({"role": "user", "content": [{"type": "input_audio"}]}, "content[0].type"),
        ({"role": "function", "content": "a"}, "role"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call"),
    ):
        with pytest.raises(msgspec.ValidationError) as wrong:
            msgspec.json.decode(msgspec.json.encode([message]), type=list[Message])
        assert path in str(wrong.value)
    for arguments in ("{", "[1]", "[" * 100_000):
        call = {"function": {"name": "f", "arguments": arguments}}
        with pytest.raises(ApiError, match="arguments of the call of 'f'") as raised:
            templated({"role": "user"}, {"role": "assistant", "tool_calls": [call]})
        assert raised.value.param == "messages[1]"
    for item, param in (
        ({"type": "message", "content": "a"}, "role"),
        ({"role": "user"}, "content"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "output"),
    ):
        with pytest.raises(ApiError) as raised:
            messages_of(msgspec.convert({"input": [item]}, ResponseRequest))
        assert raised.value.param == f"input[0].{param}"
