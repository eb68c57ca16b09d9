"""The routes of OpenAI's API, and what the OpenAPI document says of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.server.gate.server_settings import Settings
from prejit.server.openai.chat_completions import ChatCompletion, ChatRequest, chat
from prejit.server.openai.completions import Completion, CompletionRequest, complete
from prejit.server.openai.encoder_endpoints import (
    EmbeddingList,
    EmbeddingRequest,
    Reranked,
    RerankRequest,
    ScoreList,
    ScoreRequest,
    embed,
    rerank,
    score,
)
from prejit.server.openai.models_and_tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
    detokenize,
    get_model,
    list_models,
    tokenize,
)
from prejit.server.openai.openapi import Operation
from prejit.server.openai.responses import respond
from prejit.server.openai.responses_schema import ResponseObject, ResponseRequest
from prejit.server.served.served import Models

Handler = Callable[[Models, Settings, Request], Awaitable[Response]]
"""Answers a request."""

_HANDLERS: dict[Operation, Handler] = {
    Operation("get", "/v1/models", "List the models", None, ModelList): list_models,
    Operation("get", "/v1/models/{model}", "Describe a model", None, ModelCard): get_model,
    Operation(
        "post", "/v1/completions", "Continue prompts", CompletionRequest, Completion, streams=True
    ): complete,
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        ChatRequest,
        ChatCompletion,
        streams=True,
    ): chat,
    Operation(
        "post",
        "/v1/responses",
        "Answer a conversation",
        ResponseRequest,
        ResponseObject,
        streams=True,
    ): respond,
    Operation(
        "post",
        "/v1/embeddings",
        "Return vectors of texts and images",
        EmbeddingRequest,
        EmbeddingList,
    ): embed,
    **{
        Operation("post", path, "Score pairs of texts", ScoreRequest, ScoreList): score
        for path in ("/v1/score", "/score")
    },
    **{
        Operation("post", path, "Order texts by relevance", RerankRequest, Reranked): rerank
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    },
    Operation("post", "/tokenize", "Return token ids", TokenizeRequest, TokenizeAnswer): tokenize,
    Operation(
        "post", "/detokenize", "Return the text of token ids", DetokenizeRequest, DetokenizeAnswer
    ): detokenize,
}

OPERATIONS = tuple(_HANDLERS)
"""The entries of these routes in the OpenAPI document."""


def routes(models: Models, settings: Settings) -> list[Route]:
    """Return the routes."""
    return [
        Route(
            # A name of a model may have a slash.
            each.path.replace("{model}", "{model:path}"),
            partial(handler, models, settings),
            methods=[each.method.upper()],
        )
        for each, handler in _HANDLERS.items()
    ]
