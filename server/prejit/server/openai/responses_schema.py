"""Requests and responses of the responses API, as far as they are text, images and calls of functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from prejit.server.openai.bodies import RequestFields, ResponseFields
from prejit.server.openai.chat_messages import (
    Function,
    JsonObjectFormat,
    RefusalPart,
    TextFormat,
    TextPart,
)
from prejit.server.openai.logprobs import TokenLogprob
from prejit.server.openai.text_request_fields import Logprobs, Sampled, Tokens


class InputText(RequestFields, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """A part of the input that is text.

    Attributes:
        text: the text.
        prompt_cache_breakpoint: accepted without effect.
    """

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputText(RequestFields, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """A part of an earlier answer that is text.

    Attributes:
        text: the text.
        annotations, logprobs: accepted without effect.
    """

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(RequestFields, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    """A part of a user's message that is an image.

    Attributes:
        image_url: a data URL in base64: the server fetches nothing.
        detail: accepted without effect, as the model takes images of one size.
        prompt_cache_breakpoint: accepted without effect.
    """

    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


Part = InputText | OutputText | TextPart | RefusalPart
"""A part of a message."""


class InputItem(RequestFields, frozen=True, kw_only=True):
    """A part of a conversation: a message, a call of an earlier answer, or the result of such a call.

    Attributes:
        type: what it is.
        role: of a message.
        content: of a message; a user's may have images, too.
        call_id: of a call, and of its result.
        name: the function that was called.
        arguments: of the call, a JSON object as text.
        output: the result of a call.
        id, status, phase: of an item of an earlier answer; accepted without effect.
        caller, namespace: not supported.
    """

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part | InputImage] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    caller: None = None
    namespace: None = None


class ResponseFunctionTool(Function, frozen=True, kw_only=True):
    """A function that the model may call.

    Attributes:
        type: what it is.
        allowed_callers, defer_loading, output_schema: not supported.
    """

    type: Literal["function"]
    allowed_callers: None = None
    defer_loading: None = None
    output_schema: None = None


class ChosenResponseTool(
    RequestFields, frozen=True, kw_only=True, tag_field="type", tag="function"
):
    """A function that the model has to call."""

    name: str


class AllowedResponseTools(
    RequestFields, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"
):
    """The functions that the model may call.

    Attributes:
        mode: whether it must call one of them.
        tools: their names.
    """

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenResponseTool], Meta(min_length=1, max_length=128)]


class ResponseSchemaFormat(
    RequestFields, frozen=True, kw_only=True, tag_field="type", tag="json_schema"
):
    """The answer is JSON that meets a schema."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseText(RequestFields, frozen=True, kw_only=True):
    """The form of the answer.

    Attributes:
        format: text, JSON, or JSON of a schema.
        verbosity: only `medium`.
    """

    format: TextFormat | JsonObjectFormat | ResponseSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningField(RequestFields, frozen=True, kw_only=True):
    """Reasoning options.

    Attributes:
        effort: a variable of the chat template.
        summary, generate_summary: accepted without effect: no answer has reasoning apart from its text.
        context, mode: not supported.
    """

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: None = None
    mode: None = None


class ResponseRequest(Sampled, frozen=True, kw_only=True):
    """The body of POST /v1/responses.

    Attributes:
        input: a text, or a conversation.
        instructions: a first message of the system.
        max_output_tokens: generate at most this many tokens.
        text: what the answer must be.
        tools: functions that the model may call.
        tool_choice: whether it may, or must, and which one, or which ones.
        parallel_tool_calls: whether an answer may have several calls.
        include: `message.output_text.logprobs` returns log-probabilities. `reasoning.encrypted_content` has
            no effect, as no answer has a part for reasoning.
        top_logprobs: how many of the most likely tokens these have.
        metadata: returned as it is.
        reasoning: its effort is a variable of the chat template.
        chat_template_kwargs: variables of the chat template. As vLLM has it.
        store: responses are never stored; true is refused.
        truncation: prompts are never truncated.
        access_programs, background, background_options, context_management: not supported.
        conversation, image, max_tool_calls, moderation, previous_response_id, prompt: not supported.
    """

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    text: ResponseText | None = None
    tools: Annotated[list[ResponseFunctionTool], Meta(max_length=128)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | ChosenResponseTool | AllowedResponseTools | None
    ) = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    top_logprobs: Logprobs | None = None
    reasoning: ReasoningField | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    access_programs: None = None
    background_options: None = None
    context_management: None = None
    image: None = None
    moderation: None = None
    conversation: None = None
    max_tool_calls: None = None
    previous_response_id: None = None
    prompt: None = None


class OutputPart(ResponseFields, frozen=True, kw_only=True):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None]
    logprobs: list[TokenLogprob]


class OutputMessage(ResponseFields, frozen=True, kw_only=True):
    """A message of an answer."""

    id: str
    type: Literal["message"] = "message"
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputPart]


class OutputCall(ResponseFields, frozen=True, kw_only=True):
    """A call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class IncompleteDetails(ResponseFields, frozen=True, kw_only=True):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseError(ResponseFields, frozen=True, kw_only=True):
    """Why an answer failed."""

    code: Literal["server_error"]
    message: str


class InputTokensDetails(ResponseFields, frozen=True, kw_only=True):
    """Tokens of the input by where they came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(ResponseFields, frozen=True, kw_only=True):
    """Tokens of the answer by kind."""

    reasoning_tokens: int = 0


class ResponseUsage(ResponseFields, frozen=True, kw_only=True):
    """How many tokens a request had."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(ResponseFields, frozen=True, kw_only=True):
    """The response of POST /v1/responses."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall | Any]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None


DECODER = msgspec.json.Decoder(ResponseRequest)
"""Reads the body of a request."""
