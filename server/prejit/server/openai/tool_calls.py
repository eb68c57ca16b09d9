"""Calls of tools in the text of a model: found while the text comes, in the syntaxes that templates teach.

    Hermes, Qwen     <tool_call>{"name": ..., "arguments": {...}}</tool_call>, also several, after any text
    Llama 3          {"name": ..., "parameters": {...}}, also several with ";" between, alone
    Mistral          [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], alone

Marks that are special tokens, such as Mistral's, are not in the text of a generation: only what is left tells
the syntaxes apart. Lists and objects without a mark count only if they name a tool of the request, because an
answer may be JSON too.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, final

import msgspec

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
