"""POST /v1/responses: the next message of a conversation, as OpenAI's newer API has it. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from prejit.runtime.errors import PrejitError
from prejit.runtime.generation.finished_text import Result, Stats
from prejit.runtime.generation.sampling_arguments import Logprob
from prejit.server.gate.http_errors import as_api_error, field_error, json_response
from prejit.server.gate.server_settings import Settings
from prejit.server.openai import engine_calls, prompts
from prejit.server.openai.bodies import check_only, encode, read
from prejit.server.openai.chat_messages import (
    JsonObjectFormat,
    images_of,
    joined,
    parted,
    picture_files,
    plain_call,
    plain_tools,
)
from prejit.server.openai.engine_calls import EventStream, TextCall
from prejit.server.openai.logprobs import TokenLogprob, for_chat, token_names
from prejit.server.openai.responses_schema import (
    DECODER,
    AllowedResponseTools,
    ChosenResponseTool,
    IncompleteDetails,
    InputItem,
    InputTokensDetails,
    OutputCall,
    OutputMessage,
    OutputPart,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseRequest,
    ResponseSchemaFormat,
    ResponseUsage,
)
from prejit.server.openai.text_request_fields import OBJECT, AnyConstraint, Constraint, check_fields
from prejit.server.openai.token_masks import token_masks
from prejit.server.openai.tool_calls import Parts, ToolCall, Tools, chosen_tools
from prejit.server.openai.tool_calls import read as read_parts
from prejit.server.served.served import Models, Served


async def respond(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /v1/responses."""
    body = await read(request, DECODER, settings)
    check_only(body, {"store": False, "background": False, "prompt_logprobs": None})
    check_fields(body)
    wants_logprobs = _wants_logprobs(body)
    if body.top_logprobs is not None and not wants_logprobs:
        raise field_error(
            "top_logprobs", "expected include with 'message.output_text.logprobs' beside it"
        )
    top = (body.top_logprobs or 0) if wants_logprobs else None
    asked = engine_calls.asked(
        models, settings, request, body, most="max_output_tokens", logprobs=top
    )
    tools = _tools(body)
    items = () if isinstance(body.input, str) else body.input
    files = picture_files(items, asked.served, "input")
    prompt = await prompts.off_loop(
        len(await request.body()), lambda: _prompt(body, asked.served, tools)
    )
    mask = await token_masks(asked, _constraint(body), tools)
    wanted = engine_calls.text_call(asked, prompt, mask)
    wanted = await engine_calls.with_images(request, asked, wanted, files, "input")
    answer = _Answer(body, asked.served, tools)
    if body.stream:
        return EventStream(answer.events(wanted), answer.failed)
    [[result]] = await engine_calls.results(request, [wanted])
    return await prompts.off_loop(
        engine_calls.listed([[result]], []), lambda: json_response(answer.whole(result))
    )


def _tools(body: ResponseRequest) -> Tools:
    functions, choice, parallel = body.tools or (), body.tool_choice, body.parallel_tool_calls
    if isinstance(choice, ChosenResponseTool):
        return chosen_tools(functions, None, choice.name, parallel=parallel, inside="")
    if isinstance(choice, AllowedResponseTools):
        names = [each.name for each in choice.tools]
        return chosen_tools(
            functions, choice.mode, None, allowed=names, parallel=parallel, inside=""
        )
    return chosen_tools(functions, choice, None, parallel=parallel, inside="")


def _constraint(body: ResponseRequest) -> AnyConstraint | None:
    wanted, found = None if body.text is None else body.text.format, None
    if isinstance(wanted, JsonObjectFormat):
        found = Constraint(OBJECT, "text.format", strict=True)
    elif isinstance(wanted, ResponseSchemaFormat):
        found = Constraint(wanted.schema, "text.format", strict=bool(wanted.strict))
    return body.constraint(found)


def _prompt(body: ResponseRequest, served: Served, tools: Tools) -> list[int]:
    return prompts.of_messages(
        served,
        messages_of(body),
        tools=plain_tools(tools.functions) if tools.functions else None,
        variables=body.chat_template_kwargs,
        effort=None if body.reasoning is None else body.reasoning.effort,
    )


def messages_of(body: ResponseRequest) -> list[dict[str, Any]]:
    """Return the conversation of a request as chat templates take it.

    Raises:
        ApiError: an item does not have the fields of its type.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for place, item in enumerate(body.input):
        where = f"input[{place}]"
        if item.type == "function_call":
            call = plain_call(
                _needed(item, "call_id", where),
                _needed(item, "name", where),
                _needed(item, "arguments", where),
                where,
            )
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif item.type == "function_call_output":
            text = joined(_needed(item, "output", where))
            call_id = _needed(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            role = _needed(item, "role", where)
            content = _needed(item, "content", where)
            parts = parted(content) if images_of(content) else joined(content)
            role = "system" if role == "developer" else role
            messages.append({"role": role, "content": parts})
    return messages


def _needed(item: InputItem, name: str, where: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise field_error(f"{where}.{name}", f"expected it in a {item.type}, found none")
    return value


def _wants_logprobs(body: ResponseRequest) -> bool:
    return "message.output_text.logprobs" in (body.include or ())


class _Answer:
    """The response to a request, whole or in events."""

    def __init__(self, body: ResponseRequest, served: Served, tools: Tools) -> None:
        self._body = body
        self._reader = tools.reader()
        self._names = token_names(served, wanted=_wants_logprobs(body))
        builtins = msgspec.to_builtins
        text = {"format": {"type": "text"}}
        if body.text is not None and body.text.format is not None:
            text = {"format": builtins(body.text.format)}
        effort = None if body.reasoning is None else body.reasoning.effort
        self._begun = ResponseObject(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=served.name,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": effort, "summary": None},
            temperature=body.chosen_temperature(served),
            text=text,
            tool_choice="auto" if body.tool_choice is None else builtins(body.tool_choice),
            tools=[builtins(tool) for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            usage=None,
        )
        self._output = _Output()

    def whole(self, result: Result) -> ResponseObject:
        """Return the whole response."""
        found = [self._token(each) for each in result.logprobs or ()]
        self._take(read_parts(self._reader, result.text, ends=True), found)
        self._output.finish(found, complete=_is_complete(result.finish_reason))
        return self._ended(result.finish_reason, result.stats)

    async def events(self, wanted: TextCall) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        output = self._output
        events = [
            output.event("response.created", response=self._begun),
            output.event("response.in_progress", response=self._begun),
        ]
        logprobs: list[TokenLogprob] = []
        async with engine_calls.pieces([wanted]) as pieces:
            yield b"".join(events)
            async for _, piece in pieces:
                events = []
                if piece.logprob is not None:
                    logprobs.append(self._token(piece.logprob))
                ends = piece.finish_reason is not None
                events += self._take(read_parts(self._reader, piece.text, ends=ends), logprobs)
                if piece.finish_reason is not None:
                    assert piece.stats is not None
                    events += output.finish(logprobs, complete=_is_complete(piece.finish_reason))
                    ended = self._ended(piece.finish_reason, piece.stats)
                    events.append(output.event(f"response.{ended.status}", response=ended))
                if events:
                    yield b"".join(events)

    def failed(self, error: Exception) -> bytes:
        """Return the event of an error."""
        assert isinstance(error, PrejitError)
        shown = ResponseError(code="server_error", message=as_api_error(error).message)
        ended = replace(self._begun, status="failed", error=shown, output=self._output.items)
        return self._output.event("response.failed", response=ended)

    def _take(self, parts: Parts, logprobs: list[TokenLogprob]) -> list[bytes]:
        """Return the events of parts of the answer. The first text takes the log-probabilities."""
        events: list[bytes] = []
        for part in parts:
            if isinstance(part, str):
                events += self._output.text(part, logprobs[:])
                logprobs.clear()
            else:
                events += self._output.call(part)
        return events

    def _ended(self, reason: str, stats: Stats) -> ResponseObject:
        complete = _is_complete(reason)
        return replace(
            self._begun,
            status="completed" if complete else "incomplete",
            incomplete_details=None if complete else IncompleteDetails(reason="max_output_tokens"),
            output=self._output.items,
            usage=ResponseUsage(
                input_tokens=stats.prompt_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=stats.reused_tokens),
                output_tokens=stats.new_tokens,
                output_tokens_details=OutputTokensDetails(),
                total_tokens=stats.prompt_tokens + stats.new_tokens,
            ),
        )

    def _token(self, found: Logprob) -> TokenLogprob:
        return for_chat(found, self._names, self._body.top_logprobs or 0)


class _Output:
    """The items of an answer as they come, and the events that say so.

    Attributes:
        items: the finished ones.
    """

    def __init__(self) -> None:
        self.items: list[OutputMessage | OutputCall] = []
        self._number = 0
        self._message: str | None = None
        self._head = b""
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def event(self, kind: str, **content: Any) -> bytes:
        """Return an event with the next number."""
        data = encode({"type": kind, "sequence_number": self._number, **content})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def text(self, text: str, logprobs: list[TokenLogprob]) -> list[bytes]:
        """Add text to the message; begin one if there is none."""
        events = [] if self._message is not None else self._begin_message()
        self._texts.append(text)
        self._logprobs += logprobs
        number = b"%d" % self._number
        self._number += 1
        likely = encode(logprobs) if logprobs else b"[]"
        events.append(
            b'%b%b,"logprobs":%b,"delta":%b}\n\n' % (self._head, number, likely, encode(text))
        )
        return events

    def call(self, call: ToolCall) -> list[bytes]:
        """Add a call. It ends the message before it."""
        events = self._end_message("completed")
        place = len(self.items)
        item = OutputCall(
            id=f"fc_{uuid.uuid4().hex}",
            status="completed",
            call_id=call.id,
            name=call.name,
            arguments=call.arguments,
        )
        self.items.append(item)
        of_item = {"item_id": item.id, "output_index": place}
        begun = replace(item, status="in_progress", arguments="")
        kind = "response.function_call_arguments"
        return [
            *events,
            self.event("response.output_item.added", output_index=place, item=begun),
            self.event(f"{kind}.delta", **of_item, delta=call.arguments),
            self.event(f"{kind}.done", **of_item, name=call.name, arguments=call.arguments),
            self.event("response.output_item.done", output_index=place, item=item),
        ]

    def finish(self, logprobs: list[TokenLogprob], *, complete: bool) -> list[bytes]:
        """End the answer. One without any item gets an empty message.

        `logprobs`: of the last tokens, if they have no text: a special token, or a part of a stop string.
        """
        events: list[bytes] = []
        if logprobs and (self._message is not None or not self.items):
            events = self.text("", logprobs)
        elif self._message is None and not self.items:
            events = self._begin_message()
        return [*events, *self._end_message("completed" if complete else "incomplete")]

    def _begin_message(self) -> list[bytes]:
        self._message = f"msg_{uuid.uuid4().hex}"
        place = len(self.items)
        item = OutputMessage(id=self._message, status="in_progress", content=[])
        at = {"item_id": self._message, "output_index": place, "content_index": 0}
        # Everything before the number is the same in all events of the text, so it is encoded once.
        constant = encode({"type": "response.output_text.delta", **at})
        self._head = (
            b"event: response.output_text.delta\ndata: " + constant[:-1] + b',"sequence_number":'
        )
        return [
            self.event("response.output_item.added", output_index=place, item=item),
            self.event("response.content_part.added", **at, part=_part("", [])),
        ]

    def _end_message(self, status: Any) -> list[bytes]:
        if self._message is None:
            return []
        place = len(self.items)
        part = _part("".join(self._texts), self._logprobs)
        item = OutputMessage(id=self._message, status=status, content=[part])
        at = {"item_id": self._message, "output_index": place, "content_index": 0}
        self.items.append(item)
        self._message, self._texts, self._logprobs = None, [], []
        return [
            self.event("response.output_text.done", **at, text=part.text, logprobs=part.logprobs),
            self.event("response.content_part.done", **at, part=part),
            self.event("response.output_item.done", output_index=place, item=item),
        ]


def _part(text: str, logprobs: list[TokenLogprob]) -> OutputPart:
    return OutputPart(text=text, annotations=[], logprobs=logprobs)


def _is_complete(reason: str) -> bool:
    return engine_calls.openai_reason(reason) == "stop"
