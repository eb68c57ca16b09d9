"""The grammar of tool calls, in Lark with JSON schemas inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prejit.runtime.errors import UsageError
from prejit.server.grammar.grammar_sources import (
    GrammarSource,
    SchemaPart,
    check_numbers,
    part_text,
    schema_text,
)
from prejit.server.grammar.schema_paths import escaped, moved

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
_TEXT = r"TEXT: /(.|\n)*/"
_NO_CALL = r"NO_CALL: /[^{](.|\n)*/"


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model writes a call of a tool: an object of JSON, between two texts.

    Attributes:
        begin: before the object, such as `<tool_call>` and a line end. Empty: an answer that begins with `{`
            is a call.
        end: after it.
        name_key: the member of the object that holds the name of the function.
        arguments_key: the member that holds its arguments.
    """

    begin: str = "<tool_call>\n"
    end: str = "\n</tool_call>"
    name_key: str = "name"
    arguments_key: str = "arguments"


def tools_source(
    tools: Sequence[Mapping[str, Any]],
    form: ToolForm,
    *,
    required: bool,
    parallel: bool,
    answer: SchemaPart | None = None,
    special_id: Callable[[str], int | None],
) -> GrammarSource:
    """Return the grammar of answers that may or must call tools.

    Args:
        tools: as OpenAI's API has them: `{"type": "function", "function": {"name", "parameters"}}`.
        form: how the model writes a call.
        required: whether the answer must be calls; if not, it may have text around them, or be only text.
        parallel: whether there may be several calls.
        answer: the schema of an answer without calls, which then has nothing around calls either. None: any
            text.
        special_id: returns the id of a special token by its text, or None.

    Raises:
        UsageError: there is no tool, or one has no name.
    """
    written = None if answer is None else part_text(answer)
    if not tools:
        raise UsageError("tools: expected one or more, found none")
    schemas = [_call_schema(tool, form, f"tools[{place}]") for place, tool in enumerate(tools)]
    rules = [f"call_{place}: %json {schema}" for place, (schema, _) in enumerate(schemas)]
    parts = [part for _, part in schemas]
    rules.append("object: " + " | ".join(f"call_{place}" for place in range(len(tools))))
    begin, end = _words(form.begin, special_id), _words(form.end, special_id)
    if answer is not None:
        rules.append(f"answer: %json {written}")
        parts.append(answer)
    or_answer = "" if answer is None else " | answer"
    if not form.begin:  # nothing separates one call from the next
        rules.append(f"call: object {end}")
        if required or or_answer:
            rules.append(f"start: call{or_answer}")
        else:
            rules += [_NO_CALL, "start: (call | NO_CALL)?"]
    elif required or or_answer:
        rules.append(f"call: {begin} object {end}")
        more = r" (/\n?/ call)*" if parallel else ""
        rules.append(f"start: call{more}{or_answer}")
    else:
        first, rest = _trigger(form.begin, special_id)
        rules += [_TEXT, first, f"call: {rest} object {end}", "tail: TEXT"]
        rules.append("start: call* tail" if parallel else "start: call | tail")
    text = "\n".join(reversed(rules))
    return GrammarSource(text, "tools: expected tools that fit a grammar", tuple(parts))


def _call_schema(tool: Mapping[str, Any], form: ToolForm, at: str) -> tuple[str, SchemaPart]:
    """Return a call of a tool as the JSON to compile, and its parameters for errors.

    Keywords that a grammar cannot enforce are ignored, unless the function is `strict`.
    """
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise UsageError(f"{at}.function.name: expected a text, found {name!r:.80}")
    parameters = function.get("parameters") or _ANY_ARGUMENTS
    if not isinstance(parameters, Mapping):
        raise UsageError(f"{at}.function.parameters: expected an object, found {parameters!r:.80}")
    inside = moved(parameters, f"/properties/{escaped(form.arguments_key)}")
    call = {
        "type": "object",
        "properties": {form.name_key: {"const": name}, form.arguments_key: inside},
        "required": [form.name_key, form.arguments_key],
        "additionalProperties": False,
    }
    lenient = not function.get("strict")
    part = SchemaPart(f"{at}.function.parameters", function.get("parameters") or {}, lenient)
    text = schema_text(call, lenient)
    check_numbers(part)
    return text, part


def _words(text: str, special_id: Callable[[str], int | None]) -> str:
    """Return a text as a grammar has it, where a special token at its beginning or end is that token."""
    if not text:
        return ""
    stripped = text.strip()
    if stripped and (token_id := special_id(stripped)) is not None:
        before, _, after = text.partition(stripped)
        return " ".join(filter(None, (_quoted(before), f"<[{token_id}]>", _quoted(after))))
    return json.dumps(text)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _trigger(begin: str, special_id: Callable[[str], int | None]) -> tuple[str, str]:
    """Return the rule that reads text up to the beginning of a call, and the words of a call after it.

    The trigger is the beginning without the white space around it: with it, a model that writes other white
    space would never begin a call.
    """
    trigger = begin.strip() or begin
    rest = _quoted(begin.partition(trigger)[2])
    if (token_id := special_id(trigger)) is not None:
        return f"head: TEXT <[{token_id}]>", f"head {rest}"
    return f"head[lazy]: TEXT {json.dumps(trigger)}", f"head {rest}"
