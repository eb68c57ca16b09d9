"""What an answer must be: JSON, JSON of a schema, or calls of tools. A grammar makes a token mask of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from prejit.runtime.server.errors import ApiError
from prejit.runtime.server.served import Served

if TYPE_CHECKING:
    from prejit.runtime.generation.options import TokenMask


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be.

    Attributes:
        schema: the JSON Schema that it must meet; None: any JSON object.
        field: the field of the request that wants it, for errors.
    """

    schema: dict[str, Any] | None
    field: str


async def mask_of(served: Served, constraint: Constraint) -> Callable[[], TokenMask]:
    """Return a function that returns a new token mask for a constraint.

    Raises:
        UsageError: the bundle has no tokenizer, or the schema cannot be compiled.
    """

    def make() -> TokenMask:
        grammars = served.bundle.grammars
        if constraint.schema is None:
            return grammars.json_object()
        return grammars.json_schema(constraint.schema)

    # The first mask of a schema compiles it, and the first of a bundle reads the vocabulary.
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
    return Constraint(schema, "tool_choice")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a request.

    Attributes:
        name: how the model calls it.
        parameters: the JSON Schema of its arguments.
    """

    name: str
    parameters: dict[str, Any]
