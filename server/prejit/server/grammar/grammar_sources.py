"""Grammars in Lark, made from JSON schemas, expressions and tools, and the errors that name their part.

Patterns of schemas are corrected for the grammar library.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError

WHITESPACE = " "
"""White space that JSON may have between its parts: one space, as JSON in one line has. Small models repeat
white space until their last token if they may, and indents cost tokens without a meaning."""

_ESCAPES = 'nrbtf\\"'
"""The escapes of JSON but `\\u00e9`, in which llguidance 1.9.1 lets the name of an additional member have any
character: `"\\u0061"` would be a second `"a"` with a value of another schema."""
_CONTROLS = re.compile(r"\\u00[01]|\x7f|\\\\[xupPav]|\[:")
"""Signs that a schema, as JSON, may demand a control character, which is only there as such an escape."""

_LARK_START = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)


class SchemaPart(NamedTuple):
    """A JSON schema inside a grammar.

    Attributes:
        at: its place in the request, for errors.
        schema: the schema.
        lenient: whether keywords that a grammar cannot enforce are ignored.
    """

    at: str
    schema: Any
    lenient: bool


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar before it is compiled.

    Attributes:
        text: the grammar in llguidance's variant of Lark.
        expected: the beginning of the error of a grammar that does not compile.
        schemas: the JSON schemas in it.
        is_gbnf: whether the text is in llama.cpp's GBNF instead of Lark.
    """

    text: str
    expected: str
    schemas: tuple[SchemaPart, ...] = ()
    is_gbnf: bool = False

    def error(self, reason: str) -> UsageError:
        """Return the error of a grammar that does not compile, with the JSON pointer of the schema part."""
        for part in self.schemas:
            if found := _error_of(part.schema, part.lenient):
                return _schema_error(part, found)
        return UsageError(f"{self.expected}: {one_line(reason)}")


def schema_source(schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> GrammarSource:
    """Return the grammar of the JSON texts of a schema. Arguments and errors as `Grammars.json_schema`."""
    part = SchemaPart("schema", schema, lenient)
    expected = "schema: expected a JSON schema that a grammar can follow"
    return GrammarSource(f"start: %json {part_text(part)}", expected, (part,))


def regex_source(pattern: str) -> GrammarSource:
    """Return the grammar of the matches of a regular expression. Errors as `Grammars.regex`."""
    arguments.text("regex", pattern)
    from llguidance import regex_to_lark

    expected = f"regex: expected a regular expression without look-around, found {pattern!r:.80}"
    return GrammarSource(f"start: /{regex_to_lark(pattern, '')}/", expected)


def lark_source(grammar: str) -> GrammarSource:
    """Return a grammar in Lark. Errors as `Grammars.lark`."""
    return GrammarSource(arguments.text("grammar", grammar), "grammar: expected a Lark grammar")


def any_source(grammar: str) -> GrammarSource:
    """Return a grammar in Lark, or in the EBNF of llama.cpp and xgrammar, GBNF: `root ::= "yes" | "no"`."""
    if "::=" not in grammar or _LARK_START.search(grammar):
        return lark_source(grammar)
    return GrammarSource(grammar, "grammar: expected a Lark or GBNF grammar", is_gbnf=True)


def choice_source(choices: Sequence[str]) -> GrammarSource:
    """Return the grammar whose texts are these."""
    words = " | ".join(map(json.dumps, choices))
    return GrammarSource(
        f"start: CHOICE\nCHOICE: {words}", "choice: expected texts that fit a grammar"
    )


def one_line(error: str) -> str:
    """Return an error of llguidance in one line: without the picture of the source that follows it."""
    lines = [" ".join(line.split()) for line in error.split("\n   1 |")[0].splitlines()]
    return " ".join(filter(None, lines))


def _schema_error(part: SchemaPart, error: str) -> UsageError:
    path = error_path(part.schema, error, lambda inner: _error_of(inner, part.lenient))
    if "coerce_one_of" in error:  # an option that we do not offer, because it allows wrong answers
        error = "alternatives of oneOf may fit the same value; use anyOf"
    return UsageError(
        f"{part.at}{path}: expected a JSON schema that a grammar can follow: {error}",
        hint="leave the keyword out, or check it after the answer",
    )


def _error_of(schema: Any, lenient: bool) -> str:
    from llguidance import LLMatcher

    text = schema_text(schema, lenient)
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    return one_line(error.partition("\n  while processing ")[0])  # it names the place of a $ref


def part_text(part: SchemaPart) -> str:
    """Return a schema as JSON. Raises as `check_numbers`."""
    text = schema_text(part.schema, part.lenient)
    check_numbers(part)
    return text


def check_numbers(part: SchemaPart) -> None:
    """Raise UsageError if a schema has a number that the grammar library would round, or could not keep."""
    if not part.lenient and (names := repeated_names(part.schema)):
        raise UsageError(
            f"{part.at}{names[0]}: expected at most {names[1]} beside members of any name, which could come "
            f"twice, found {names[2]}",
            hint="name more members in `required`, set additionalProperties to false, or check it after the "
            "answer",
        )
    if not part.lenient and (found := rounded_number(part.schema)):
        raise UsageError(
            f"{part.at}{found[0]}: expected numbers that float64 and int64 hold exactly, found {found[1]}",
            hint="leave the keyword out, or give the number as a text",
        )


def schema_text(schema: Mapping[str, Any] | bool, lenient: bool) -> str:
    """Return a schema as JSON, with llguidance's own options instead of those that it has."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise UsageError(
            f"schema: expected a JSON schema that a value satisfies, found {schema!r:.80}"
        )
    ways: dict[str, Any] = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    try:
        if has_names_beside_others(schema) and not _CONTROLS.search(json.dumps(schema)):
            ways["json_allowed_escapes"] = _ESCAPES
        return json.dumps({**corrected(schema, lenient), "x-guidance": ways}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"schema: expected values of JSON, found others: {error}") from error


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


_PATH_ROOT = "whole"
"""The name under which the whole schema stands in `$defs` while one of its parts is tried."""
_OF_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas."""
_OF_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
"""Keywords whose value is a list of schemas."""
_OF_ONE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
"""Keywords whose value is a schema."""
_PATH_TRIES = 500
"""Maximum number of parts that are compiled to find one error; the place is less exact beyond it."""
_PATH_SECONDS = 0.5
"""Maximum CPU time of the same."""

_VALUE_KEYWORDS = ("const", "enum", "default", "examples", "example")
"""Keywords whose value is a value, or a list of values, and no schema."""
_NUMBER_KEYWORDS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
"""Keywords whose numbers the grammar library reads as float64."""

_NEGATED = re.compile(r"(\\.)|\[\^(-?)(?!\])", re.DOTALL)
"""An escape in a regular expression, or the beginning of a class of all characters but some."""


def error_path(schema: Any, error: str, error_of: Callable[[Any], str]) -> str:
    """Return the JSON pointer of the smallest part of a schema that has an error, such as `/properties/a`.

    Returns:
        An empty text for the whole schema.
    """
    try:
        whole = moved(schema, f"/$defs/{_PATH_ROOT}")
    except RecursionError:
        return ""
    left, until = _PATH_TRIES, time.thread_time() + _PATH_SECONDS
    pointer, found = "", schema
    while True:
        # References last: what is wrong behind one has a place of its own, unless the reference is wrong.
        for step, part in sorted(_parts(found), key=_is_reference):
            if (left := left - 1) < 0 or time.thread_time() > until:
                return pointer
            there = f"{pointer}{step}"
            tried = {"$ref": f"#/$defs/{_PATH_ROOT}{there}", "$defs": {_PATH_ROOT: whole}}
            if error_of(tried).replace(f"/$defs/{_PATH_ROOT}", "") == error:
                pointer, found = there, part
                break
        else:
            return pointer


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema, each with its step of a JSON pointer."""
    if not isinstance(schema, Mapping):
        return
    for keyword in schema:
        value = schema[keyword]
        if keyword in _OF_MAPS and isinstance(value, Mapping):
            for name, part in value.items():
                yield f"/{keyword}/{escaped(str(name))}", part
        elif keyword in _OF_LISTS and isinstance(value, list | tuple):
            for place, part in enumerate(value):
                yield f"/{keyword}/{place}", part
        elif keyword in _OF_ONE:
            yield f"/{keyword}", value


def _is_reference(step_and_part: tuple[str, Any]) -> bool:
    part = step_and_part[1]
    return isinstance(part, Mapping) and "$ref" in part


def escaped(name: str) -> str:
    """Return a name as a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def moved(schema: Any, to: str) -> Any:
    """Return a schema for a place in another one: its references to its own parts lead there."""
    if isinstance(schema, Mapping):
        copy = {key: moved(value, to) for key, value in schema.items()}
        target = schema.get("$ref")
        if isinstance(target, str) and (target == "#" or target.startswith("#/")):
            copy["$ref"] = f"#{to}{target[1:]}"
        return copy
    if isinstance(schema, list | tuple):
        return [moved(value, to) for value in schema]
    return schema


def has_names_beside_others(schema: Any) -> bool:
    """Return whether an object may have members that the schema names, and others."""
    if not isinstance(schema, Mapping):
        return False
    named = schema.get("properties") or schema.get("patternProperties")
    if named and schema.get("additionalProperties") is not False:
        return True
    return any(has_names_beside_others(part) for _, part in _parts(schema))


def repeated_names(schema: Any) -> tuple[str, int, int] | None:
    """Find a `minProperties` that members of one name would satisfy: a grammar does not know which came.

    Returns:
        The JSON pointer of the keyword, the largest number that works there, and the number found.
    """
    if not isinstance(schema, Mapping):
        return None
    least, required = schema.get("minProperties"), schema.get("required")
    # One more than those that come once in any case is another one.
    names = required if isinstance(required, list | tuple) else ()
    most = len({name for name in names if isinstance(name, str)}) + 1
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if isinstance(least, int | float) and least > most and is_open:
        return "/minProperties", most, int(least)
    for step, part in _parts(schema):
        if found := repeated_names(part):
            return f"{step}{found[0]}", *found[1:]
    return None


def rounded_number(schema: Any) -> tuple[str, int | float] | None:
    """Find a number of a schema that llguidance 1.9.1 would change.

    It reads numbers as float64 and whole ones then as int64, so that a `const` of 2**53 + 1 gave 2**53.

    Returns:
        The JSON pointer of the number's keyword, and the number.
    """
    if not isinstance(schema, Mapping):
        return None
    for keyword in _NUMBER_KEYWORDS:
        for number in _rounded(keyword, schema.get(keyword)):
            return f"/{keyword}", number
    for step, part in _parts(schema):
        if found := rounded_number(part):
            return f"{step}{found[0]}", found[1]
    return None


def _rounded(keyword: str, value: Any) -> Iterator[int | float]:
    """Yield the whole numbers in the value of a keyword that do not stay what they are."""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        # 2**63 becomes 2**63 - 1. A bound beyond int64 is refused there, or as good as none.
        is_exact = -(2**63) <= value < 2**63 and int(float(value)) == value
        is_far_bound = keyword not in _VALUE_KEYWORDS and abs(value) >= 2**63
        is_last = value == 2**63 - 1 and keyword != "exclusiveMaximum"
        if not (is_exact or is_far_bound or is_last):
            yield value
    elif keyword in _VALUE_KEYWORDS and isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _rounded(keyword, part)


def corrected(schema: Any, lenient: bool) -> Any:
    """Return a schema that llguidance 1.9.1 does not misread.

    It takes a class with all control characters for one with every escape of JSON, so that `[^"]` let a
    quotation mark come: patterns let no such class have NUL. If `lenient`, keywords with a number that it
    would round are left out.
    """
    if isinstance(schema, list | tuple):
        return [corrected(part, lenient) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {**schema}
    for keyword, value in schema.items():
        if lenient and keyword in _NUMBER_KEYWORDS and any(True for _ in _rounded(keyword, value)):
            del copy[keyword]
        elif keyword == "pattern" and isinstance(value, str):
            copy[keyword] = _without_nul(value)
        elif keyword in _OF_MAPS and isinstance(value, Mapping):
            is_pattern = keyword == "patternProperties"
            copy[keyword] = {
                _without_nul(name) if is_pattern else name: corrected(part, lenient)
                for name, part in value.items()
            }
        elif (
            keyword not in _VALUE_KEYWORDS
        ):  # a $ref may lead into a keyword of any name, as `components`
            copy[keyword] = corrected(value, lenient)
    return copy


def _without_nul(pattern: str) -> str:
    return _NEGATED.sub(lambda found: found[1] or "[^\\x00" + ("\\-" if found[2] else ""), pattern)
