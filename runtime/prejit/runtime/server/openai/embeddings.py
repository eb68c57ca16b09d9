"""POST /v1/embeddings: vectors of texts."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from prejit.runtime.errors import NumbersError
from prejit.runtime.server.allowed import check_tokens
from prejit.runtime.server.disconnect import unless_gone
from prejit.runtime.server.errors import ApiError
from prejit.runtime.server.keys import ApiKey
from prejit.runtime.server.openai.bodies import (
    RequestFields,
    ResponseFields,
    answered,
    read,
    served_model,
)
from prejit.runtime.server.openai.prompts import INLINE_CHARACTERS
from prejit.runtime.server.served import Models, Served
from prejit.runtime.server.settings import Settings

_MAX_INPUTS = 2048
"""OpenAI's limit."""


class EmbeddingRequest(RequestFields, frozen=True, kw_only=True):
    """The body of POST /v1/embeddings.

    Attributes:
        input: a text, token ids, or a list of either.
        model: the name of a served model; it may be missing if there is one.
        encoding_format: numbers, or the bytes of little-endian float32 in base64.
        dimensions: the width of the model; no other is supported.
    """

    input: str | list[int | str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class EmbeddingVector(ResponseFields, frozen=True, kw_only=True):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseFields, frozen=True, kw_only=True):
    """How many tokens the inputs had."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ResponseFields, frozen=True, kw_only=True):
    """The response of POST /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage


_DECODER = msgspec.json.Decoder(EmbeddingRequest)


async def embed(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /v1/embeddings."""
    body = await read(request, _DECODER)
    served = served_model(models, body.model)
    _check_dimensions(body, served)
    inputs = _inputs(body)
    key: ApiKey = request.state.key
    check_tokens(key)
    submit = partial(
        served.engine.submit_encode,
        inputs,
        on_too_long="error",
        timeout=settings.timeout_seconds,
    )
    characters = sum(len(each) for each in inputs)
    # The engine tokenizes in the caller's thread.
    future = await run_in_threadpool(submit) if characters > INLINE_CHARACTERS else submit()
    encoded = await unless_gone(request.receive, asyncio.wrap_future(future))
    vectors = np.ascontiguousarray(encoded.embeddings, np.dtype("<f4"))
    if not np.isfinite(vectors).all():
        raise NumbersError("the model returned embeddings that are not numbers")
    tokens = encoded.stats.tokens
    if key.meter is not None:
        key.meter.spend(tokens)
    return answered(
        EmbeddingList(
            data=[
                EmbeddingVector(index=place, embedding=_written(vector, body.encoding_format))
                for place, vector in enumerate(vectors)
            ],
            model=served.name,
            usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        )
    )


def _check_dimensions(body: EmbeddingRequest, served: Served) -> None:
    encoder = served.bundle.encoder.encoder
    if body.dimensions is not None and body.dimensions != encoder.width:
        raise ApiError(
            400,
            f"dimensions: expected {encoder.width}, the width of this model, found {body.dimensions}",
            param="dimensions",
            code="unsupported_parameter",
        )


def _inputs(body: EmbeddingRequest) -> list[str | list[int]]:
    if isinstance(body.input, str):
        return [body.input]
    ids = [each for each in body.input if isinstance(each, int)]
    if not body.input or (ids and len(ids) < len(body.input)):
        found = "an empty list" if not body.input else "token ids beside inputs"
        raise ApiError(
            400,
            f"input: expected a text, token ids, or a list of either, found {found}",
            param="input",
        )
    if ids:
        return [ids]
    if len(body.input) > _MAX_INPUTS:
        raise ApiError(
            400, f"input: expected at most {_MAX_INPUTS}, found {len(body.input)}", param="input"
        )
    return [each for each in body.input if not isinstance(each, int)]


def _written(vector: np.ndarray[Any, Any], encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.tolist()  # type: ignore[no-any-return]
