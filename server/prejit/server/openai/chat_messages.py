"""Messages and tools of conversations: as requests have them, and as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from prejit.server.gate.http_errors import field_error
from prejit.server.openai.bodies import RequestFields
from prejit.server.openai.prompts import MAX_IMAGES, file_of
from prejit.server.served.served import Served

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]
"""The name of a tool."""


class TextPart(RequestFields, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A part of a message that is text.

    Attributes:
        text: the text.
        prompt_cache_breakpoint: accepted without effect.
    """

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class RefusalPart(RequestFields, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """A part of an earlier answer that is a refusal."""

    refusal: str


class ImageUrl(RequestFields, frozen=True, kw_only=True):
    """An image.

    Attributes:
        url: a data URL in base64: the server fetches nothing.
        detail: accepted without effect, as the model takes images of one size.
    """

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(RequestFields, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """A part of a user's message that is an image."""

    image_url: ImageUrl


class FunctionCall(RequestFields, frozen=True, kw_only=True):
    """The function of an earlier call.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


class MessageToolCall(RequestFields, frozen=True, kw_only=True):
    """A call of a tool in an earlier answer.

    Attributes:
        function: the function and its arguments.
        id: of the call.
        type: what it is.
        index: its place in the answer, which clients of streams send back; accepted without effect.
    """

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class Message(RequestFields, frozen=True, kw_only=True):
    """A message of a conversation.

    Attributes:
        role: who wrote it. `developer` is another name of `system`.
        content: text, or parts that are text; a user's may be images, too.
        name: of the writer, for templates that use it.
        tool_calls: calls of an earlier answer.
        tool_call_id: the call that this message is the result of.
        reasoning_content: the reasoning of an earlier answer, for templates that use it.
        refusal: text of an earlier answer that was a refusal.
        annotations: sources of an earlier answer; accepted without effect.
        audio: not supported.
        function_call: not supported; `tool_calls` replaced it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(RequestFields, frozen=True, kw_only=True):
    """A function that the model may call.

    Attributes:
        name: of the function.
        description: what it does.
        parameters: the JSON Schema of its arguments.
        strict: whether the arguments must follow the schema; keywords that a grammar cannot enforce are an
            error then. Arguments of forced calls always follow what a grammar can enforce.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(RequestFields, frozen=True, kw_only=True):
    """A tool that is a function."""

    function: Function
    type: Literal["function"]


FunctionTools = Annotated[list[FunctionTool], Meta(max_length=128)]
"""The tools of a request."""


class ChosenFunction(RequestFields, frozen=True, kw_only=True):
    """The name of a function."""

    name: str


class ChosenTool(RequestFields, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A tool that the model has to call."""

    function: ChosenFunction


class AllowedChoice(RequestFields, frozen=True, kw_only=True):
    """The tools of a request that the model may call.

    Attributes:
        mode: whether it must call one of them.
        tools: their names.
    """

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=128)]


class AllowedTools(RequestFields, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """The model may call some of the tools."""

    allowed_tools: AllowedChoice


class TextFormat(RequestFields, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """The answer is any text."""


class JsonObjectFormat(
    RequestFields, frozen=True, kw_only=True, tag_field="type", tag="json_object"
):
    """The answer is a JSON object."""


def joined(content: Any) -> str:
    """Return the text of a message, which may be in parts with texts and refusals."""
    if isinstance(content, str):
        return content
    return "\n".join(p.refusal if isinstance(p, RefusalPart) else p.text for p in content)


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them, by the conventions of transformers.

    Raises:
        ApiError: the arguments of a call are no JSON object.
    """
    return [_plain(message, place) for place, message in enumerate(messages)]


def _plain(message: Message, place: int) -> dict[str, Any]:
    content = message.content if message.content is not None else message.refusal
    texts: Any = None
    if content is not None:
        texts = parted(content) if images_of(content) else joined(content)
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": texts,
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            plain_call(call.id, call.function.name, call.function.arguments, f"messages[{place}]")
            for call in message.tool_calls
        ]
    return plain


def parted(content: Any) -> list[dict[str, str]]:
    """Return parts as templates take them, each image without its file."""
    return [
        {"type": "image"}
        if hasattr(part, "image_url")
        else {"type": "text", "text": joined([part])}
        for part in content
    ]


def images_of(content: Any) -> list[tuple[int, str]]:
    """Return the URLs of the images of a message, each with its place."""
    parts = content if isinstance(content, list) else ()
    urls = [(place, getattr(part, "image_url", None)) for place, part in enumerate(parts)]
    return [
        (n, url.url if isinstance(url, ImageUrl) else url) for n, url in urls if url is not None
    ]


def picture_files(messages: Sequence[Any], served: Served, field: str = "messages") -> list[bytes]:
    """Return the files of the images of a conversation, in order.

    Args:
        messages: each with a role and content.
        served: the model.
        field: of the request, for errors.

    Raises:
        ApiError: the model reads none; one is in a message that is no user's; or it is no data URL.
    """
    files = []
    for number, message in enumerate(messages):
        for place, url in images_of(message.content):
            where = f"[{number}].content[{place}]"
            images = served.bundle.config.images
            if images is None or images.tokens is None:
                found = f"found an image, and {served.name!r} reads texts alone"
                raise field_error(field, f"{where}: expected text, {found}")
            if message.role != "user":
                raise field_error(field, f"{where}: expected images of a user alone")
            files.append(file_of(url, field, f"{where}.image_url"))
    if len(files) > MAX_IMAGES:
        raise field_error(field, f"expected at most {MAX_IMAGES} images, found {len(files)}")
    return files


def plain_call(call_id: str, name: str, arguments: str, where: str) -> dict[str, Any]:
    """Return an earlier call as templates take it: its arguments are an object, not text.

    Raises:
        ApiError: they are no JSON object.
    """
    try:
        parsed = msgspec.json.decode(arguments, type=dict[str, Any]) if arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise field_error(
            where,
            f"expected the arguments of the call of {name!r:.80} as a JSON object in text, found "
            f"{arguments!r:.80}",
        ) from error
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def plain_tools(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Return tools as templates take them."""
    plain = []
    for function in functions:
        described: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            described["description"] = function.description
        described["parameters"] = function.parameters or {"type": "object", "properties": {}}
        plain.append({"type": "function", "function": described})
    return plain
