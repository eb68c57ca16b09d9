"""Calls of tools in the text of a model: found while the text comes, in the syntaxes that templates teach.

    Hermes, Qwen     <tool_call>{"name": ..., "arguments": {...}}</tool_call>, also several, after any text
    Llama 3          {"name": ..., "parameters": {...}}, also several with ";" between, alone
    Mistral          [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], alone

Marks that are special tokens, such as Mistral's, are not in the text of a generation: only what is left tells
the syntaxes apart. Lists and objects without a mark count only if they name a tool of the request, because an
answer may be JSON too.

Also the tools of a request: which of them the model may or must call, and what that makes of its answer.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, final

import msgspec

from prejit.server.gate.http_errors import ApiError, field_error
from prejit.server.grammar.grammar_sources import moved
from prejit.server.openai.chat_messages import Function
from prejit.server.openai.text_request_fields import OBJECT, Constraint

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKS = re.compile(r"\s*(?:<\|python_tag\|>|\[TOOL_CALLS\])?\s*")
"""Marks before calls that stand alone, where a tokenizer does not have them as special tokens."""
_PYTHON_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"\s*;\s*(?=\{)")
_JSON = msgspec.json.Decoder(float_hook=Decimal)
"""Keeps numbers as they are written, also those that no float holds, such as 1e999."""
_ENCODER = msgspec.json.Encoder(decimal_format="number")
_ID_LETTERS = string.ascii_letters + string.digits
_ID_CHARACTERS = 9
"""Mistral's templates refuse ids of another length; other clients and templates take any."""
_IN_GRAMMAR = re.compile(
    r"(?:tools\[(?P<tool>\d+)\]\.function\.parameters|schema(?:/items/anyOf/(?P<call>\d+)/properties/arguments)?)"
    r"(?=[/:])"
)
"""How an error of a grammar of calls begins: with the place of a schema there."""


def new_call_id() -> str:
    """Return an id for a call."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_CHARACTERS))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model.

    Attributes:
        name: of the tool.
        arguments: JSON.
        id: what the result of the call refers to.
    """

    name: str
    arguments: str
    id: str = field(default_factory=new_call_id)


Parts = list[str | ToolCall]
"""Text and calls in their order."""


@final
class ToolReader:
    """Separates the calls of tools from the other text, which passes as soon as it cannot be part of one."""

    def __init__(self, names: Collection[str], *, only_one: bool = False) -> None:
        """Begin to read an answer.

        Args:
            names: of the tools of the request.
            only_one: keep the first call only.
        """
        self._names = frozenset(names)
        self._only_one = only_one
        self._state: Literal["start", "text", "call", "alone"] = "start"
        self._held = ""
        self._calls = 0
        self._follows_call = False

    def push(self, text: str) -> Parts:
        """Add text; return what is settled."""
        self._held += text
        parts: Parts = []
        if self._state == "start":
            self._start()
        while self._state in ("text", "call"):
            end = self._held.find(_OPEN) if self._state == "text" else _end_of_call(self._held)
            if end < 0:
                break
            before = self._held[:end]
            if self._state == "text":
                self._held = self._held[end + len(_OPEN) :]
                self._add_text(parts, before)
                self._state = "call"
            else:
                self._held = self._held[end + len(_CLOSE) :]
                self._add_call(parts, before, f"{_OPEN}{before}{_CLOSE}")
                self._state = "text"
        if self._state == "text":
            settled = len(self._held) - _overlap(self._held, _OPEN)
            if self._follows_call and self._held[:settled].isspace():
                settled = 0  # it goes before another call, and stays before text
            self._add_text(parts, self._held[:settled])
            self._held = self._held[settled:]
        return parts

    def finish(self) -> Parts:
        """Return the rest when no more text comes."""
        parts: Parts = []
        held, self._held = self._held, ""
        if self._state == "alone":
            if calls := alone(held, self._names):
                return calls[:1] if self._only_one else calls
            self._state = "text"  # it only begins like calls, and may have some behind it
            return [*self.push(held), *self.finish()]
        if self._state == "call":  # the stop token came before the mark
            self._add_call(parts, held, _OPEN + held)
        else:
            self._add_text(parts, held)
        return parts

    def _start(self) -> None:
        begun = self._held.lstrip()
        if not begun or (_PYTHON_TAG.startswith(begun) and begun != _PYTHON_TAG):
            return  # not decided yet
        is_alone = begun[0] in "{[" or begun.startswith(_PYTHON_TAG)
        self._state = "alone" if is_alone else "text"

    def _add_text(self, parts: Parts, text: str) -> None:
        if text and not (self._follows_call and text.isspace()):  # line ends between calls
            parts.append(text)
            self._follows_call = False

    def _add_call(self, parts: Parts, content: str, raw: str) -> None:
        call = _call(_decoded(content))
        self._follows_call = call is not None
        if call is None:
            parts.append(raw)
            return
        self._calls += 1
        if self._calls == 1 or not self._only_one:
            parts.append(call)


@final
class ForcedReader:
    """Reads an answer that a grammar forces to be calls and nothing else."""

    def __init__(self, name: str | None) -> None:
        """Begin to read an answer.

        Args:
            name: the tool whose arguments the answer is; None: the answer is a list of calls.
        """
        self._name = name
        self._text = ""

    def push(self, text: str) -> Parts:
        """Add text. Nothing is settled before the end."""
        self._text += text
        return []

    def finish(self) -> Parts:
        """Return the calls, or the text itself. Of a list that a limit cut off they are the whole ones."""
        value, end = _decoded(self._text), len(self._text)
        if self._name is not None:
            return [self._text if value is None else ToolCall(self._name, self._text.strip())]
        while value is None and (end := self._text.rfind("}", 0, end)) >= 0:
            value = _decoded(self._text[: end + 1] + "]")
        calls = [_call(each) for each in value] if isinstance(value, list) else [None]
        found: Parts = [call for call in calls if call is not None]
        return found if len(found) == len(calls) else [self._text]


@final
class TextReader:
    """Passes everything: the answer is text."""

    def push(self, text: str) -> Parts:
        """Return the text."""
        return [text] if text else []

    def finish(self) -> Parts:
        """Return nothing."""
        return []


Reader = ToolReader | ForcedReader | TextReader
"""Separates calls of tools from the text of an answer."""


def read(reader: Reader, text: str, *, ends: bool) -> Parts:
    """Return what is settled with more text of an answer, which may be its last."""
    parts = reader.push(text)
    return [*parts, *reader.finish()] if ends else parts


def alone(text: str, names: Collection[str]) -> Parts:
    """Return the calls of a text that is nothing but calls of these tools; none if it is something else."""
    content = text[_MARKS.match(text).end() :]  # type: ignore[union-attr] # it matches the empty text
    value = _decoded(content)
    values = value if isinstance(value, list) else [value]
    if value is None:
        values = [_decoded(each) for each in _BETWEEN.split(content)]
    calls = [_call(each) for each in values]
    if any(call is None or call.name not in names for call in calls):
        return []
    return [call for call in calls if call is not None]


def _decoded(text: str) -> Any:
    """Return a JSON value; None: the text is something else."""
    try:
        return _JSON.decode(text)
    except (
        ValueError,
        RecursionError,
        ArithmeticError,
    ):  # the last one: of an exponent with 20 digits
        return None


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):  # some models write the JSON as a string, as OpenAI's API has it
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], _ENCODER.encode(arguments).decode())


def _end_of_call(text: str) -> int:
    """Return where the mark stands that ends a call; -1: not yet. Strings may have such a mark, too."""
    for mark in re.finditer(_CLOSE, text):
        quotes = re.sub(r"\\.", "", text[: mark.start()], flags=re.DOTALL).count('"')
        if quotes % 2 == 0:
            return mark.start()
    return -1


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that begins a mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def forced_calls(tools: Sequence[Function], *, only_one: bool) -> Constraint:
    """Return the constraint for `tool_choice` `required`: a list of at least one call."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                # References are from the root of the whole schema.
                "arguments": moved(
                    tool.parameters or OBJECT, f"/items/anyOf/{place}/properties/arguments"
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, tool in enumerate(tools)
    ]
    most = {"maxItems": 1} if only_one else {}
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}
    return Constraint(schema, "tool_choice", strict=all(tool.strict for tool in tools))


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request, and whether the model has to call one.

    Attributes:
        functions: the tools; none if the model may not call any.
        forced: whether it has to.
        name: the one that it has to call; None: any of them.
        only_one: whether one call is the most.
        places: where the request has each function, such as `tools[1].function`.
    """

    functions: tuple[Function, ...] = ()
    forced: bool = False
    name: str | None = None
    only_one: bool = False
    places: tuple[str, ...] = ()

    def placed(self, message: str) -> str:
        """Return the error of a grammar of calls with the place of the schema in the request."""
        found = _IN_GRAMMAR.match(message)
        if found is None:
            return message
        names = [each.name for each in self.functions]
        number = found["tool"] or found["call"]
        place = int(number) if number else names.index(self.name) if self.name else None
        if place is None:
            return message
        return f"{self.places[place]}.parameters{message[found.end() :]}"

    def constraint(self) -> Constraint | None:
        """Return what the answer must be so that it is a call; None: it may be anything."""
        if not self.forced:
            return None
        if self.name is None:
            return forced_calls(self.functions, only_one=self.only_one)
        chosen = next(each for each in self.functions if each.name == self.name)
        return Constraint(chosen.parameters or OBJECT, "tool_choice", strict=bool(chosen.strict))

    def reader(self) -> Reader:
        """Return a new reader for an answer."""
        if self.forced:
            return ForcedReader(self.name)
        if self.functions:
            return ToolReader([each.name for each in self.functions], only_one=self.only_one)
        return TextReader()


def chosen_tools(
    functions: Sequence[Function],
    choice: str | None,
    name: str | None,
    *,
    allowed: Collection[str] | None = None,
    parallel: bool | None,
    inside: str = ".function",
) -> Tools:
    """Return the tools of a request.

    Args:
        functions: all tools.
        choice: `none`, `auto` or `required`; None: auto.
        name: the tool that the model has to call.
        allowed: names of the tools that it may call; None: all.
        parallel: whether it may make several calls in one answer; None: it may.
        inside: where each of the request's `tools` has its function.

    Raises:
        ApiError: a call is wanted of a tool that is not there.
    """
    names = [each.name for each in functions]
    place_of = {name: f"tools[{place}]{inside}" for place, name in enumerate(names)}
    for wanted in allowed or ():
        if wanted not in names:
            raise _no_such_tool(names, wanted)
    if allowed is not None:
        functions = [each for each in functions if each.name in allowed]
        names = [each.name for each in functions]
    if len(set(names)) < len(names):
        raise field_error("tools", "expected each name once, found one twice")
    if name is not None and name not in names:
        raise _no_such_tool(names, name)
    if choice == "required" and not names:
        raise field_error("tool_choice", "expected tools beside it, found none")
    if choice == "none":
        return Tools()
    forced = name is not None or choice == "required"
    places = tuple(place_of[each] for each in names)
    return Tools(tuple(functions), forced, name, only_one=parallel is False, places=places)


def _no_such_tool(known: Sequence[str], name: str) -> ApiError:
    names = ", ".join(map(repr, known)) or "no tools"
    return field_error("tool_choice", f"expected one of {names}, found {name!r:.128}")
