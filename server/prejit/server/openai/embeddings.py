"""POST /v1/embeddings: vectors of texts."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from prejit.runtime.errors import NumbersError
from prejit.server.gate.api_keys import ApiKey
from prejit.server.gate.http_errors import ApiError, json_response
from prejit.server.gate.request_clients import check_tokens, unless_gone
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.bodies import (
    ResponseFields,
    Unused,
    check_only,
    read,
    served_model,
)
from prejit.server.openai.prompts import off_loop
from prejit.server.served.served import Models, Served

MAX_INPUTS = 2048
"""OpenAI's limit."""


class EncodingRequest(Unused, frozen=True, kw_only=True):
    """The fields of all endpoints that encode texts.

    Attributes:
        model: the name of a served model; it may be missing if there is one.
        truncate_prompt_tokens: -1 cuts texts that are too long. As vLLM has it; no other value is supported.
    """

    model: str | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingRequest(EncodingRequest, frozen=True, kw_only=True):
    """The body of POST /v1/embeddings.

    Attributes:
        input: a text, token ids, or a list of either.
        encoding_format: numbers, or the bytes of little-endian float32 in base64.
        dimensions: the width of the model; no other is supported.
    """

    input: str | list[int | str | list[int]]
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
    body = await read(request, _DECODER, settings)
    served = served_model(models, body.model)
    _check_dimensions(body, served)
    inputs = _inputs(body)
    vectors, tokens = await encoded(request, settings, served, body, inputs)
    return json_response(
        EmbeddingList(
            data=[
                EmbeddingVector(index=place, embedding=_written(vector, body.encoding_format))
                for place, vector in enumerate(vectors)
            ],
            model=served.name,
            usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        )
    )


async def encoded(
    request: Request,
    settings: Settings,
    served: Served,
    body: EncodingRequest,
    inputs: list[str | list[int]],
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
    """Return the vectors of inputs, little-endian float32 [N, D], and how many tokens these have.

    Raises:
        ApiError: the model is no encoder, the request wants them shorter than the model does, or its key has
            no tokens left.
        ClientDisconnect: the client is gone.
        NumbersError: the model returned no numbers.
        UsageError, ContextError, QueueFullError, ClosedError, DeadlineError: as `Engine.encode`.
    """
    if served.bundle.config.encoder is None:
        kind = "functions" if served.bundle.config.decoder is None else "a decoder"
        raise ApiError(
            400,
            f"model: expected an encoder, found {served.name!r}, which holds {kind}",
            param="model",
        )
    check_only(body, {"truncate_prompt_tokens": -1})
    key: ApiKey = request.state.key
    check_tokens(key)
    is_cut = body.truncate_prompt_tokens is not None
    characters = sum(len(each) for each in inputs)
    # The engine tokenizes in the caller's thread.
    future = await off_loop(
        characters,
        lambda: served.engine.submit_encode(
            inputs,
            on_too_long="truncate" if is_cut else "error",
            timeout=settings.timeout_seconds,
            client=key.name,
            limits=key.limits,
        ),
    )
    found = await unless_gone(request.receive, asyncio.wrap_future(future))
    vectors = np.ascontiguousarray(found.embeddings, np.dtype("<f4"))
    if not np.isfinite(vectors).all():
        raise NumbersError("the model returned embeddings that are not numbers")
    if key.meter is not None:
        key.meter.spend(found.stats.tokens)
    return vectors, found.stats.tokens


def _check_dimensions(body: EmbeddingRequest, served: Served) -> None:
    encoder = served.bundle.config.encoder
    if encoder is not None and body.dimensions not in (None, encoder.width):
        raise ApiError(
            400,
            f"dimensions: expected {encoder.width}, the width of this model, found {body.dimensions}",
            param="dimensions",
            code="unsupported_parameter",
        )


def _inputs(body: EmbeddingRequest) -> list[str | list[int]]:
    inputs = _listed(body)
    for place, each in enumerate(inputs):
        if not each:
            raise ApiError(
                400, f"input: expected no empty text, found one at place {place}", param="input"
            )
    return inputs


def _listed(body: EmbeddingRequest) -> list[str | list[int]]:
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
    if len(body.input) > MAX_INPUTS:
        raise ApiError(
            400, f"input: expected at most {MAX_INPUTS}, found {len(body.input)}", param="input"
        )
    return [each for each in body.input if not isinstance(each, int)]


def _written(vector: np.ndarray[Any, Any], encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.tolist()  # type: ignore[no-any-return]
