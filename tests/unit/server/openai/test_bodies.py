"""Unknown fields of bodies are named with the nearest or left out; too many parts are never made."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.server.gate.http_errors import ApiError
from prejit.server.openai import bodies
from prejit.server.openai.bodies import check_parts, decode
from prejit.server.openai.chat_completions import ChatRequest
from prejit.server.openai.completions import CompletionRequest
from prejit.server.openai.responses_schema import ResponseRequest

USER = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "", "txt": ""}
STREAMED = {"prompt": "a", "stream_options": {"include_usages": True}}
PARTS = {"messages": [{"role": "user", "content": [PART]}]}
CALL = {"function": {"name": "f", "argments": "{}"}}
CALLS = {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "strct": 1}}
FORMED = {"messages": [USER], "response_format": FORM}
UNKNOWN = [
    (CompletionRequest, {"prompt": "a", "max_token": 1}, "max_token", "max_tokens"),
    (CompletionRequest, {"prompt": "a", "zzzzzz": None}, "zzzzzz", None),
    (CompletionRequest, STREAMED, "stream_options.include_usages", "include_usage"),
    (ChatRequest, {"messages": [USER, {**USER, "nmae": ""}]}, "messages[1].nmae", "name"),
    (ChatRequest, PARTS, "messages[0].content[0].txt", "text"),
    (ChatRequest, CALLS, "messages[0].tool_calls[0].function.argments", "arguments"),
    (ChatRequest, FORMED, "response_format.json_schema.strct", "strict"),
    (ResponseRequest, {"input": [{**USER, "rol": "user"}]}, "input[0].rol", "role"),
]


@pytest.mark.parametrize(("kind", "body", "path", "near"), UNKNOWN)
def test_an_unknown_field_is_named_with_the_nearest_or_left_out(kind, body, path, near):
    decoder, content = msgspec.json.Decoder(kind), json.dumps(body).encode()
    with pytest.raises(ApiError) as raised:
        decode(content, decoder, ignore_unknown=False)
    assert (raised.value.status, raised.value.code) == (400, "unknown_parameter")
    assert raised.value.param == path
    assert path in raised.value.message
    assert (f"did you mean {near!r}" in raised.value.message) == (near is not None)
    if "argments" not in path:  # a field that must be there is missing without it
        assert isinstance(decode(content, decoder, ignore_unknown=True), kind)


def test_schemas_have_any_field_and_a_long_name_is_cut():
    function = {"name": "f", "parameters": {"x": {"y": 1}}}
    body = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
    body |= {"chat_template_kwargs": {"anything": {"a": 1}}, "metadata": {"note": "b"}}
    decoder = msgspec.json.Decoder(ChatRequest)
    assert decode(json.dumps(body).encode(), decoder, ignore_unknown=False).tools is not None
    content = json.dumps({"prompt": "a", "x" * 100_000: 1}).encode()
    with pytest.raises(ApiError) as raised:
        decode(content, msgspec.json.Decoder(CompletionRequest), ignore_unknown=False)
    assert max(len(raised.value.message), len(raised.value.param or "")) < 300


def parts(value):
    """How many lists, objects, members and texts a value has, names of members included."""
    if isinstance(value, dict):
        return 1 + sum(2 + parts(each) for each in value.values())
    if isinstance(value, list):
        return 1 + sum(map(parts, value))
    return int(isinstance(value, str))


VALUES = st.recursive(
    st.none() | st.integers() | st.text('ab"\\[{:,é', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('a"\\:[', max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(1, 9), st.booleans())
def test_parts_are_counted_whatever_the_texts_hold(value, piece, ascii):
    content = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_PIECE_BYTES", piece)
        patch.setattr(bodies, "_MOST_PARTS", parts(value))
        check_parts(content)
        patch.setattr(bodies, "_MOST_PARTS", parts(value) - 1)
        if parts(value):
            with pytest.raises(ApiError, match="expected at most") as raised:
                check_parts(content)
            assert raised.value.status == 413


def test_a_body_of_very_many_small_lists_is_refused_before_they_are_made():
    with pytest.raises(ApiError, match="131072 lists"):
        check_parts(b'{"prompt":[' + b"[]," * (1 << 20) + b"[]]}")
    check_parts(b'{"prompt":[' + b"1," * (1 << 20) + b"1]}")
