"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from prejit.runtime.generation.finished_text import Result, Stats
from prejit.runtime.generation.generate import Piece
from prejit.runtime.generation.sampling_arguments import Logprob
from prejit.server.gate.http_errors import field_error, json_response
from prejit.server.gate.server_settings import Settings
from prejit.server.openai import engine_calls, prompts
from prejit.server.openai.bodies import (
    RequestFields,
    ResponseFields,
    check_only,
    encode,
    identity,
    read,
)
from prejit.server.openai.chat_messages import (
    AllowedTools,
    ChosenTool,
    FunctionTools,
    JsonObjectFormat,
    Message,
    TextFormat,
    for_template,
    picture_files,
    plain_tools,
)
from prejit.server.openai.engine_calls import EventStream, TextCall, around_choices, ending
from prejit.server.openai.logprobs import (
    ChoiceLogprobs,
    PromptLogprobs,
    TokenLogprob,
    as_vllm,
    for_chat,
    scores_of_prompts,
    token_names,
)
from prejit.server.openai.text_request_fields import (
    OBJECT,
    AnyConstraint,
    Constraint,
    Logprobs,
    Sampled,
    Tokens,
    TokenUsage,
    check_fields,
)
from prejit.server.openai.token_masks import token_masks
from prejit.server.openai.tool_calls import Reader, ToolCall, Tools, chosen_tools
from prejit.server.openai.tool_calls import read as read_parts
from prejit.server.served.served import Models, Served

Reason = Literal["stop", "length", "tool_calls"]
"""Why an answer ended."""


class JsonSchema(RequestFields, frozen=True, kw_only=True):
    """A JSON Schema with a name.

    Attributes:
        name: of the schema.
        description: what it is for; the model does not see it.
        schema: the schema; missing: any object.
        strict: whether keywords that a grammar cannot enforce are an error; if not, they are ignored.
    """

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(
    RequestFields, frozen=True, kw_only=True, tag_field="type", tag="json_schema"
):
    """The answer is JSON that meets a schema."""

    json_schema: JsonSchema


class ChatRequest(Sampled, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions.

    Attributes:
        messages: the conversation so far.
        max_tokens: generate at most this many tokens; the older name.
        max_completion_tokens: generate at most this many tokens.
        n: how many answers.
        logprobs: return log-probabilities of the tokens.
        top_logprobs: return those of this many of the most likely tokens too.
        response_format: what the answer must be.
        tools: functions that the model may call.
        tool_choice: whether it may, or must, and which one, or which ones.
        parallel_tool_calls: whether an answer may have several calls.
        chat_template_kwargs: variables of the chat template. As vLLM has it.
        add_generation_prompt: begin the model's answer. As vLLM has it.
        continue_final_message: leave the last message open. As vLLM has it.
        reasoning_effort: a variable of the chat template.
        store: answers are never stored; true is refused.
        modalities: text is the only one.
        verbosity: only `medium`.
        echo: begin the answer with the last message, if it is the model's. As vLLM has it.
        audio, chat_template, documents, functions, function_call, media_io_kwargs: not supported.
        mm_processor_kwargs, moderation, prediction, web_search_options: not supported.
    """

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: FunctionTools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    store: bool | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: str | None = None
    echo: bool | None = None
    audio: None = None
    chat_template: None = None
    documents: None = None
    functions: None = None
    function_call: None = None
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None


class AnswerFunction(ResponseFields, frozen=True, kw_only=True):
    """The function of a call by the model."""

    name: str
    arguments: str


class AnswerToolCall(ResponseFields, frozen=True, kw_only=True):
    """A call by the model."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class AnswerMessage(ResponseFields, frozen=True, kw_only=True, omit_defaults=True):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(ResponseFields, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Reason


class ChatCompletion(ResponseFields, frozen=True, kw_only=True):
    """The response of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(ResponseFields, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a stream, with its choices as they come."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: TokenUsage | msgspec.UnsetType | None = msgspec.UNSET


_DECODER = msgspec.json.Decoder(ChatRequest)


async def chat(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /v1/chat/completions."""
    body = await read(request, _DECODER, settings)
    _check(body)
    most = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    top = (body.top_logprobs or 0) if body.logprobs else None
    asked = engine_calls.asked(models, settings, request, body, most=most, logprobs=top)
    tools = _tools(body)
    files = picture_files(body.messages, asked.served)
    if files and body.prompt_logprobs is not None:
        raise field_error("prompt_logprobs", "expected none beside images")
    prompt = await prompts.off_loop(
        len(await request.body()), lambda: _prompt(body, asked.served, tools)
    )
    mask = await token_masks(asked, _constraint(body), tools)
    wanted = engine_calls.text_call(asked, prompt, mask, choices=body.n or 1)
    # After the length of the prompt was checked.
    wanted = await engine_calls.with_images(request, asked, wanted, files, "messages")
    [scores] = await scores_of_prompts(asked, [wanted], body.prompt_logprobs)
    answer = _Answer(body, asked.served, tools)
    if body.stream:
        return EventStream(answer.events(wanted))
    [found] = await engine_calls.results(request, [wanted])
    return await prompts.off_loop(
        engine_calls.listed([found], [scores]),
        lambda: json_response(answer.completion(found, wanted.prompt, scores)),
    )


def _tools(body: ChatRequest) -> Tools:
    functions = [tool.function for tool in body.tools or ()]
    choice, parallel = body.tool_choice, body.parallel_tool_calls
    if isinstance(choice, ChosenTool):
        return chosen_tools(functions, None, choice.function.name, parallel=parallel)
    if isinstance(choice, AllowedTools):
        names = [each.function.name for each in choice.allowed_tools.tools]
        mode = choice.allowed_tools.mode
        return chosen_tools(functions, mode, None, allowed=names, parallel=parallel)
    return chosen_tools(functions, choice, None, parallel=parallel)


def _check(body: ChatRequest) -> None:
    check_only(body, {"store": False, "verbosity": "medium"})
    if body.top_logprobs is not None and not body.logprobs:
        raise field_error("top_logprobs", "expected logprobs beside it")
    check_fields(body)
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise field_error("max_tokens", "expected it without max_completion_tokens, found both")


def _prompt(body: ChatRequest, served: Served, tools: Tools) -> list[int]:
    return prompts.of_messages(
        served,
        for_template(body.messages),
        tools=plain_tools(tools.functions) if tools.functions else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
        effort=body.reasoning_effort,
    )


def _constraint(body: ChatRequest) -> AnyConstraint | None:
    wanted, found = body.response_format, None
    if isinstance(wanted, JsonObjectFormat):
        found = Constraint(OBJECT, "response_format", strict=True)
    elif isinstance(wanted, JsonSchemaFormat):
        given = wanted.json_schema
        found = Constraint(given.schema or OBJECT, "response_format", strict=bool(given.strict))
    return body.constraint(found)


class _Answer:
    """The response to a request, whole or in events."""

    def __init__(self, body: ChatRequest, served: Served, tools: Tools) -> None:
        self._body = body
        self._tools = tools
        self._identity = identity(served, "chatcmpl")
        named = bool(body.logprobs) or body.prompt_logprobs is not None
        self._names = token_names(served, wanted=named)
        last = body.messages[-1]
        is_own = bool(body.echo) and last.role == "assistant"
        self._echo = for_template([last])[0]["content"] or "" if is_own else ""

    def completion(
        self, found: list[Result], prompt: Sequence[int], scores: list[Logprob]
    ) -> ChatCompletion:
        """Return the whole response."""
        top = self._body.prompt_logprobs
        likely = None if top is None else as_vllm(prompt, scores, top, self._names)
        return ChatCompletion(
            **self._identity,
            choices=[self._choice(index, result) for index, result in enumerate(found)],
            usage=engine_calls.usage([[result.stats for result in found]], were_cached=top is None),
            prompt_logprobs=msgspec.UNSET if likely is None else likely,
        )

    async def events(self, wanted: TextCall) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        with_usage = self._body.wants_usage
        around = around_choices(self._chunk(None if with_usage else msgspec.UNSET))
        choices = [
            _ChoiceEvents(index, around, self._tools.reader(), self._token, self._echo)
            for index in range(wanted.choices)
        ]
        stats: dict[int, Stats] = {}
        async with engine_calls.pieces([wanted]) as pieces:
            yield b""  # the head of the response need not wait in the queue
            async for index, piece in pieces:
                if piece.stats is not None:
                    stats[index] = piece.stats
                if events := choices[index].take(piece):
                    yield events
        # The first answer's count of cached tokens holds: the others find what it computed.
        in_order = [stats[index] for index in sorted(stats)]
        yield ending(self._chunk(engine_calls.usage([in_order])) if with_usage else None)

    def _choice(self, index: int, result: Result) -> ChatChoice:
        parts = read_parts(self._tools.reader(), result.text, ends=True)
        text = "".join(part for part in parts if isinstance(part, str))
        made = [part for part in parts if isinstance(part, ToolCall)]
        logprobs = None
        if result.logprobs is not None:
            logprobs = ChoiceLogprobs(content=[self._token(each) for each in result.logprobs])
        return ChatChoice(
            index=index,
            message=AnswerMessage(
                role="assistant",
                content=self._echo + text if self._echo or not made else text.strip() or None,
                refusal=None,
                tool_calls=[_described(call) for call in made] or None,
            ),
            logprobs=logprobs,
            finish_reason=_reason(result.finish_reason, called=bool(made)),
        )

    def _token(self, found: Any) -> TokenLogprob:
        return for_chat(found, self._names, self._body.top_logprobs or 0)

    def _chunk(self, usage: TokenUsage | msgspec.UnsetType | None) -> ChatChunk:
        kind = "chat.completion.chunk"
        return ChatChunk(**self._identity, object=kind, choices=[], usage=usage)


class _ChoiceEvents:
    """The events of one answer of a stream."""

    def __init__(
        self,
        index: int,
        around: tuple[bytes, bytes],
        reader: Reader,
        token: Callable[[Any], TokenLogprob],
        echo: str,
    ) -> None:
        head, tail = around
        self._head = b'%b{"index":%d,"delta":' % (head, index)
        self._tail = b"}" + tail
        self._end = b',"logprobs":null,"finish_reason":null' + self._tail
        self._reader = reader
        self._token = token
        self._logprobs: list[TokenLogprob] = []
        self._calls = 0
        self._is_first = True
        self._echo = echo

    def take(self, piece: Piece) -> bytes:
        """Return the events for a piece; nothing if its text is held back."""
        events = []
        if self._is_first:
            self._is_first = False
            content = encode(self._echo)
            events.append(
                self._event(b'{"role":"assistant","content":%b,"refusal":null}' % content)
            )
        if piece.logprob is not None:
            self._logprobs.append(self._token(piece.logprob))
        ends = piece.finish_reason is not None
        for part in read_parts(self._reader, piece.text, ends=ends):
            if isinstance(part, str):
                events.append(self._text(part))
            else:
                events.append(self._call(part))
        if piece.finish_reason is not None:
            if self._logprobs:
                events.append(self._text(""))
            reason = encode(_reason(piece.finish_reason, called=self._calls > 0))
            events.append(
                b'%b{},"logprobs":null,"finish_reason":%b%b' % (self._head, reason, self._tail)
            )
        return b"".join(events)

    def _event(self, delta: bytes) -> bytes:
        return self._head + delta + self._end

    def _text(self, text: str) -> bytes:
        if not self._logprobs:
            return b'%b{"content":%b}%b' % (self._head, encode(text), self._end)
        logprobs = encode(ChoiceLogprobs(content=self._logprobs))
        self._logprobs = []
        return b'%b{"content":%b},"logprobs":%b,"finish_reason":null%b' % (
            self._head,
            encode(text),
            logprobs,
            self._tail,
        )

    def _call(self, call: ToolCall) -> bytes:
        described = {"index": self._calls, **msgspec.to_builtins(_described(call))}
        self._calls += 1
        return self._event(encode({"tool_calls": [described]}))


def _described(call: ToolCall) -> AnswerToolCall:
    return AnswerToolCall(
        id=call.id, function=AnswerFunction(name=call.name, arguments=call.arguments)
    )


def _reason(reason: str, *, called: bool) -> Reason:
    found = engine_calls.openai_reason(reason)
    return "tool_calls" if called and found == "stop" else found
