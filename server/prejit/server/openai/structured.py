"""Fields that say what an answer must be, as vLLM and llama.cpp have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from prejit.server.gate.http_errors import ApiError
from prejit.server.grammar.grammar_sources import (
    GrammarSource,
    any_source,
    choice_source,
    regex_source,
)
from prejit.server.openai.bodies import RequestFields, Unused
from prejit.server.openai.constraints import AnyConstraint, Constraint, TextConstraint

Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
"""The texts that an answer may be."""
Schema = dict[str, Any] | str
"""A JSON Schema, or its JSON as a text."""


class StructuredOutputs(RequestFields, frozen=True, kw_only=True):
    """A constraint on an answer: exactly one of these.

    Attributes:
        json: JSON that meets a schema.
        regex: a match of a regular expression.
        choice: one of these texts.
        grammar: a text of a grammar in Lark or GBNF.
        json_object: true: any JSON object.
        disable_fallback: accepted: there is one library of grammars and no other to fall back to.
        disable_any_whitespace: accepted: JSON has at most one space between its parts anyway.
        disable_additional_properties, whitespace_pattern, structural_tag: not supported.
    """

    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: None = None
    whitespace_pattern: None = None
    structural_tag: None = None


class Structured(Unused, frozen=True, kw_only=True):
    """Constraints on an answer. A request has at most one of these.

    Attributes:
        structured_outputs: as vLLM has it.
        guided_json, guided_regex, guided_choice, guided_grammar: older names of its members.
        json_schema, grammar: as llama.cpp has them.
    """

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    grammar: str | None = None

    def constraint(self, other: AnyConstraint | None = None) -> AnyConstraint | None:
        """Return what an answer must be; None: any text.

        Args:
            other: what a field of the endpoint wants.

        Raises:
            ApiError: several fields say what it must be, or `structured_outputs` has nothing.
        """
        found = [] if other is None else [other]
        for owner, names, before in (
            (self, _MAKE_OF_OLDER, ""),
            (self.structured_outputs, _MAKE, "structured_outputs."),
        ):
            for name, make in names.items():
                value = getattr(owner, name, None)
                if value is not None and value is not False:
                    found.append(make(before + name, value))
        if len(found) > 1:
            fields = [each.field for each in found]
            raise ApiError(
                400,
                f"{fields[1]}: expected one field that says what an answer must be, found "
                f"{' and '.join(fields)}",
                param=fields[1],
            )
        if self.structured_outputs is not None and not found:
            raise ApiError(
                400,
                f"structured_outputs: expected one of {', '.join(_MAKE)}, found none",
                param="structured_outputs",
            )
        return found[0] if found else None


def _json(field: str, value: Schema) -> Constraint:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiError(
                400, f"{field}: expected a JSON Schema, found {value!r:.80}", param=field
            ) from error
    return Constraint(value, field, strict=True)


def _json_object(field: str, value: object) -> Constraint:
    return Constraint({"type": "object"}, field, strict=True)


def _text(source: Callable[[Any], GrammarSource], field: str, value: object) -> TextConstraint:
    return TextConstraint(field, partial(source, value))


_regex = partial(_text, regex_source)
_choice = partial(_text, choice_source)
_grammar = partial(_text, any_source)

_MAKE: Mapping[str, Callable[[str, Any], AnyConstraint]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
_MAKE_OF_OLDER: Mapping[str, Callable[[str, Any], AnyConstraint]] = {
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _json,
    "grammar": _grammar,
}
