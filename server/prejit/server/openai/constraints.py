"""Constraints on answers: JSON, texts of grammars, calls of tools; and the tools of a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from prejit.server.gate.http_errors import ApiError, field_error
from prejit.server.grammar.grammar_sources import GrammarSource, schema_source
from prejit.server.grammar.schema_paths import moved
from prejit.server.openai.chat_messages import Function
from prejit.server.openai.tool_calls import ForcedReader, Reader, TextReader, ToolReader

OBJECT: dict[str, Any] = {"type": "object"}
"""The JSON Schema of any object."""


_IN_GRAMMAR = re.compile(
    r"(?:tools\[(?P<tool>\d+)\]\.function\.parameters|schema(?:/items/anyOf/(?P<call>\d+)/properties/arguments)?)"
    r"(?=[/:])"
)
"""How an error of a grammar of calls begins: with the place of a schema there."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """JSON that an answer must be.

    Attributes:
        schema: the JSON Schema that it must meet.
        field: the field of the request that wants it, for errors.
        strict: whether keywords that a grammar cannot enforce are an error; if not, they are ignored.
    """

    schema: dict[str, Any]
    field: str
    strict: bool

    def source(self) -> GrammarSource:
        """Return the grammar."""
        return schema_source(self.schema, lenient=not self.strict)


@dataclass(frozen=True, slots=True)
class TextConstraint:
    """Text that an answer must be.

    Attributes:
        field: the field of the request that wants it, for errors.
        source: returns the grammar.
    """

    field: str
    source: Callable[[], GrammarSource]


AnyConstraint = Constraint | TextConstraint
"""A constraint on an answer."""


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
