"""What an answer must be: JSON, JSON of a schema, or calls of tools. A grammar makes a token mask of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from prejit.runtime.errors import UsageError
from prejit.runtime.grammar.tools import ToolForm
from prejit.runtime.server.errors import ApiError
from prejit.runtime.server.openai.messages import Function, plain_tools
from prejit.runtime.server.served import Served

if TYPE_CHECKING:
    from prejit.runtime.generation.options import TokenMask


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be.

    Attributes:
        schema: the JSON Schema that it must meet.
        field: the field of the request that wants it, for errors.
        strict: whether keywords that a grammar cannot enforce are an error; if not, they are ignored.
    """

    schema: dict[str, Any]
    field: str
    strict: bool


async def mask_of(
    served: Served, constraint: Constraint, stop_token_ids: Sequence[int] | None
) -> Callable[[], TokenMask]:
    """Return a function that returns a new token mask for a constraint.

    Args:
        served: the model.
        constraint: what an answer must be.
        stop_token_ids: of the request; None: those of the model.

    Raises:
        UsageError: the bundle has no tokenizer, the schema cannot be compiled, or the grammar library is not
            installed.
    """

    def make() -> TokenMask:
        return served.bundle.grammars.json_schema(
            constraint.schema, lenient=not constraint.strict, stop_token_ids=stop_token_ids
        )

    return await _compiled(make)


async def mask_of_calls(
    served: Served,
    functions: Sequence[Function],
    *,
    only_one: bool,
    stop_token_ids: Sequence[int] | None,
) -> Callable[[], TokenMask] | None:
    """Return a function that returns a new token mask for answers that may have calls, with right arguments.

    None: the bundle's chat template does not teach a form of calls that a grammar can follow.

    Args:
        served: the model.
        functions: the tools. Only the arguments of those that are strict follow every keyword.
        only_one: whether one call is the most.
        stop_token_ids: of the request; None: those of the model.

    Raises:
        UsageError: as `mask_of`; the message names the tool.
    """
    form = ToolForm()
    if not _teaches(served, form.begin.strip()):
        return None
    tools = [
        {"function": {"name": each.name, "parameters": each.parameters, "strict": each.strict}}
        for each in functions
    ]

    def make() -> TokenMask:
        return served.bundle.grammars.tools(
            tools, form, parallel=not only_one, stop_token_ids=stop_token_ids
        )

    return await _compiled(make)


def _teaches(served: Served, mark: str) -> bool:
    """Return whether the chat template shows a mark of calls, which is then in the text of an answer."""
    bundle = served.bundle
    if bundle.tokenizer.special_id(mark) is not None:  # the text of an answer has no special tokens
        return False
    probe = plain_tools([Function(name="probe")])
    try:
        return mark in bundle.render_chat_template([{"role": "user", "content": ""}], tools=probe)
    except UsageError:
        return False


async def _compiled(make: Callable[[], TokenMask]) -> Callable[[], TokenMask]:
    """Return what makes masks, after the first was made in a thread.

    The first mask of a grammar compiles it, and the first of a bundle reads the vocabulary.
    """
    first: list[TokenMask] = [await run_in_threadpool(make)]
    return lambda: first.pop() if first else make()


def forced_calls(tools: Sequence[Tool], *, only_one: bool) -> Constraint:
    """Return the constraint for `tool_choice` `required`: a list of at least one call.

    Raises:
        ApiError: two tools define different schemas of the same name.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.parameters)
        for keyword in ("$defs", "definitions"):
            for name, schema in parameters.pop(keyword, {}).items():
                # References are from the root of the whole schema.
                if definitions.setdefault(keyword, {}).setdefault(name, schema) != schema:
                    raise ApiError(
                        400,
                        f"tools: expected one definition of {name!r}, found two different ones",
                        param="tools",
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = {"maxItems": 1} if only_one else {}
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {"type": "array", "items": items, "minItems": 1, **most, **definitions}
    return Constraint(schema, "tool_choice", strict=all(tool.strict for tool in tools))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a request.

    Attributes:
        name: how the model calls it.
        parameters: the JSON Schema of its arguments.
        strict: whether keywords that a grammar cannot enforce are an error.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool = False
