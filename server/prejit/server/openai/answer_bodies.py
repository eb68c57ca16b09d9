"""How an answer is generated and read: what the chat API and the responses API have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

from starlette.requests import Request

from prejit.server.gate.http_errors import ApiError
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.chat_messages import Function
from prejit.server.openai.constraints import (
    AnyConstraint,
    Constraint,
    TextConstraint,
    Tool,
    forced_calls,
    limited,
    mask_of,
    mask_of_calls,
)
from prejit.server.openai.engine_calls import TextCall, text_call
from prejit.server.openai.fields import Sampled
from prejit.server.openai.prompts import off_loop
from prejit.server.openai.tool_calls import ForcedReader, Parts, ToolReader
from prejit.server.served.served import Served

if TYPE_CHECKING:
    from prejit.runtime.generation.options import TokenMask

_OBJECT: dict[str, Any] = {"type": "object"}


class Reader(Protocol):
    """Separates calls of tools from the text of an answer."""

    def push(self, text: str) -> Parts:
        """Add text; return what is settled."""

    def finish(self) -> Parts:
        """Return the rest when no more text comes."""


@final
class TextReader:
    """Passes everything: the answer is text."""

    def push(self, text: str) -> Parts:
        """Return the text."""
        return [text] if text else []

    def finish(self) -> Parts:
        """Return nothing."""
        return []


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request, and whether the model has to call one.

    Attributes:
        functions: the tools; none if the model may not call any.
        forced: whether it has to.
        name: the one that it has to call; None: any of them.
        only_one: whether one call is the most.
    """

    functions: tuple[Function, ...] = ()
    forced: bool = False
    name: str | None = None
    only_one: bool = False

    def constraint(self) -> Constraint | None:
        """Return what the answer must be so that it is a call; None: it may be anything."""
        if not self.forced:
            return None
        if self.name is not None:
            chosen = next(each for each in self.functions if each.name == self.name)
            schema = chosen.parameters or _OBJECT
            return Constraint(schema, "tool_choice", strict=bool(chosen.strict))
        tools = [
            Tool(each.name, each.parameters or _OBJECT, bool(each.strict))
            for each in self.functions
        ]
        return forced_calls(tools, only_one=self.only_one)

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
    parallel: bool | None,
) -> Tools:
    """Return the tools of a request.

    Args:
        functions: all tools.
        choice: `none`, `auto` or `required`; None: auto.
        name: the tool that the model has to call.
        parallel: whether it may make several calls in one answer; None: it may.

    Raises:
        ApiError: a call is wanted of a tool that is not there.
    """
    only_one = parallel is False
    names = [each.name for each in functions]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: expected each name once, found one twice", param="tools")
    if name is not None and name not in names:
        raise _no_such_tool(names, name)
    if choice == "required" and not names:
        raise ApiError(
            400, "tool_choice: expected tools beside it, found none", param="tool_choice"
        )
    if choice == "none":
        return Tools()
    forced = name is not None or choice == "required"
    return Tools(tuple(functions), forced, name, only_one)


def allowed_functions(functions: Sequence[Function], names: Collection[str]) -> list[Function]:
    """Return the functions of a request that the model may call.

    Raises:
        ApiError: a name is not that of a function.
    """
    known = [each.name for each in functions]
    for name in names:
        if name not in known:
            raise _no_such_tool(known, name)
    return [each for each in functions if each.name in names]


async def conversation_call(
    request: Request,
    settings: Settings,
    served: Served,
    body: Sampled,
    *,
    prompt: Callable[[], Sequence[int]],
    tools: Tools,
    format_constraint: AnyConstraint | None,
    options: dict[str, Any],
    choices: int = 1,
) -> TextCall:
    """Return what a request for the next message of a conversation asks of the engine.

    Args:
        request: as of `text_call`.
        settings: as of `text_call`.
        served: as of `text_call`.
        body: as of `text_call`.
        prompt: makes the token ids.
        tools: the tools of the request. A call that is forced is forced whatever the format is. If one is
            strict and the template's form of calls is known, calls that the model may make are right, too.
        format_constraint: what an answer without calls must be.
        options: as of `TextCall`.
        choices: as of `TextCall`.

    Raises:
        UsageError, ApiError, ContextError, ClientDisconnect: as `mask_of`, `limited` and `text_call`; or an
            answer that is no JSON is wanted beside tools, which the model could not call then.
    """
    stops = options["stop_token_ids"]
    token_ids = await off_loop(len(await request.body()), prompt)
    mask = await _mask(request, served, tools, format_constraint, stops)
    return text_call(
        request,
        settings,
        served,
        body,
        prompt=token_ids,
        options=options,
        choices=choices,
        mask=await limited(served, body.allowed_token_ids, body.bad_words or (), mask, stops),
    )


async def _mask(
    request: Request,
    served: Served,
    tools: Tools,
    format_constraint: AnyConstraint | None,
    stop_token_ids: Sequence[int] | None,
) -> Callable[[], TokenMask] | None:
    """Return what makes token masks for an answer; None: it may be anything."""
    constraint = tools.constraint() or format_constraint
    if tools.forced or not tools.functions:
        if constraint is None:
            return None
        return await mask_of(request, served, constraint, stop_token_ids)
    if isinstance(constraint, TextConstraint):
        raise ApiError(
            400,
            f"{constraint.field}: expected JSON or any text beside tools that the model may call, found "
            "another grammar",
            param=constraint.field,
            code="unsupported_parameter",
        )
    if constraint is None and not any(each.strict for each in tools.functions):
        return None
    return await mask_of_calls(
        request,
        served,
        tools.functions,
        only_one=tools.only_one,
        answer=constraint,
        stop_token_ids=stop_token_ids,
    )


def _no_such_tool(known: Sequence[str], name: str) -> ApiError:
    names = ", ".join(map(repr, known)) or "no tools"
    return ApiError(
        400, f"tool_choice: expected one of {names}, found {name!r:.128}", param="tool_choice"
    )
