"""GET /v1/models: what is served."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from prejit.server.gate.server_settings import Settings
from prejit.server.openai.bodies import ResponseFields, answered
from prejit.server.openai.tokens import longest
from prejit.server.served.served import Models, Served


class ModelCard(ResponseFields, frozen=True, kw_only=True):
    """A served model.

    Attributes:
        id: the name that requests give.
        object: the kind of this object.
        created: when the server loaded it, in seconds since 1970.
        owned_by: who serves it.
        root: the digest of its bundle.
        max_model_len: its longest context in tokens, as vLLM has it; 0: it takes no tokens.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["prejit"] = "prejit"
    root: str
    max_model_len: int


class ModelList(ResponseFields, frozen=True, kw_only=True):
    """The response of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


async def list_models(models: Models, settings: Settings, request: Request) -> Response:
    """Answer GET /v1/models."""
    return answered(ModelList(data=[_described(each) for each in models]))


async def get_model(models: Models, settings: Settings, request: Request) -> Response:
    """Answer GET /v1/models/{model}."""
    return answered(_described(models.get(request.path_params["model"])))


def _described(served: Served) -> ModelCard:
    return ModelCard(
        id=served.name,
        created=served.created,
        root=served.bundle.digest,
        max_model_len=longest(served),
    )
