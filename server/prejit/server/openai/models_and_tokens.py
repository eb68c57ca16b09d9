"""GET /v1/models, POST /tokenize and /detokenize, in the shapes of vLLM's server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from prejit.server.gate.http_errors import field_error, json_response
from prejit.server.gate.server_settings import Settings
from prejit.server.openai import prompts
from prejit.server.openai.bodies import RequestFields, ResponseFields, asked_model, read
from prejit.server.openai.chat_messages import (
    FunctionTools,
    Message,
    for_template,
    picture_files,
    plain_tools,
)
from prejit.server.served.served import Models, Served
from prejit.server.served.served_adapters import adapters_of


class TokenizeRequest(RequestFields, frozen=True, kw_only=True):
    """The body of POST /tokenize: a prompt or messages.

    Attributes:
        prompt: a text.
        messages: a conversation, for the chat template.
        model: the name of a served model; it may be missing if there is one.
        add_special_tokens: whether the tokenizer adds its own to a prompt. Default: true.
        return_token_strs: return the text of each token too.
        add_generation_prompt: begin the model's answer. Default: true.
        continue_final_message: leave the last message open.
        tools: functions, for templates that show them.
        chat_template_kwargs: variables of the chat template.
    """

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: FunctionTools | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeAnswer(ResponseFields, frozen=True, kw_only=True):
    """The response of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestFields, frozen=True, kw_only=True):
    """The body of POST /detokenize.

    Attributes:
        tokens: token ids.
        model: the name of a served model; it may be missing if there is one.
    """

    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(ResponseFields, frozen=True, kw_only=True):
    """The response of POST /detokenize."""

    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /tokenize."""
    body = await read(request, _TOKENIZE, settings)
    if (body.prompt is None) == (body.messages is None):
        found = "neither" if body.prompt is None else "both"
        raise field_error("prompt", f"expected it or messages, found {found}")
    served = asked_model(models, body.model)
    tokenizer = served.bundle.tokenizer
    if (prompt := body.prompt) is not None:
        special = body.add_special_tokens is not False
        token_ids = await prompts.off_loop(
            len(prompt), lambda: prompts.encoded(served, prompt, add_special_tokens=special)
        )
    else:
        token_ids = await prompts.off_loop(
            len(await request.body()), lambda: _of_messages(body, served)
        )
    texts = None
    if body.return_token_strs:
        texts = [tokenizer.token_bytes[each].decode("utf-8", "replace") for each in token_ids]
    return json_response(
        TokenizeAnswer(
            count=len(token_ids), max_model_len=longest(served), tokens=token_ids, token_strs=texts
        )
    )


def _of_messages(body: TokenizeRequest, served: Served) -> list[int]:
    tools = plain_tools([tool.function for tool in body.tools or ()])
    picture_files(body.messages or (), served)  # raises what is wrong with them
    return prompts.of_messages(
        served,
        for_template(body.messages or ()),
        tools=tools or None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
    )


async def detokenize(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /detokenize."""
    body = await read(request, _DETOKENIZE, settings)
    served = asked_model(models, body.model)
    tokenizer = served.bundle.tokenizer
    text = await prompts.off_loop(len(body.tokens), lambda: tokenizer.decode(body.tokens))
    return json_response(DetokenizeAnswer(prompt=text))


def longest(served: Served) -> int:
    """Return the longest context for which a model has memory, or its longest sentence."""
    bundle = served.bundle
    if bundle.config.decoder is not None:
        return served.engine.plan.context
    return bundle.encoder.max_tokens if bundle.config.encoder is not None else 0


class ModelCard(ResponseFields, frozen=True, kw_only=True):
    """A served model.

    Attributes:
        id: the name that requests give.
        object: the kind of this object.
        created: when the server loaded it, in seconds since 1970.
        owned_by: who serves it.
        root: the digest of its bundle.
        max_model_len: its longest context in tokens, as vLLM has it; 0: it takes no tokens.
        parent: of an adapter: the model that it changes; its root is the digest of its own files.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["prejit"] = "prejit"
    root: str
    max_model_len: int
    parent: str | msgspec.UnsetType = msgspec.UNSET


class ModelList(ResponseFields, frozen=True, kw_only=True):
    """The response of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


async def list_models(models: Models, settings: Settings, request: Request) -> Response:
    """Answer GET /v1/models."""
    each = [
        card for served in models for card in (_described(served), *_described_adapters(served))
    ]
    return json_response(ModelList(data=each))


async def get_model(models: Models, settings: Settings, request: Request) -> Response:
    """Answer GET /v1/models/{model}."""
    found = asked_model(models, request.path_params["model"])
    if not found.adapter:
        return json_response(_described(found))
    cards = {card.id.partition(":")[2]: card for card in _described_adapters(found)}
    return json_response(cards[found.adapter])


def _described(served: Served) -> ModelCard:
    return ModelCard(
        id=served.name,
        created=served.created,
        root=served.bundle.digest,
        max_model_len=longest(served),
    )


def _described_adapters(served: Served) -> list[ModelCard]:
    base = served.name.partition(":")[0]
    return [
        ModelCard(
            id=f"{base}:{name}",
            created=served.created,
            root=adapter.digest,
            max_model_len=longest(served),
            parent=base,
        )
        for name, adapter in adapters_of(served.bundle).items()
    ]
