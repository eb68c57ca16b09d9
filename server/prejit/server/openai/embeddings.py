"""POST /v1/embeddings: vectors of texts; /v1/score and /v1/rerank: how alike texts are, as vLLM has them."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from prejit.runtime.errors import NumbersError
from prejit.server.gate.api_keys import ApiKey
from prejit.server.gate.http_errors import field_error, json_response
from prejit.server.gate.request_clients import check_tokens, unless_gone
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.bodies import (
    RequestFields,
    ResponseFields,
    Unused,
    check_only,
    read,
    served_model,
)
from prejit.server.openai.prompts import Inputs, as_inputs, off_loop
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

    input: Inputs
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


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
"""One text or several."""


class ScoreRequest(EncodingRequest, frozen=True, kw_only=True):
    """The body of POST /v1/score.

    Attributes:
        text_1: one text, or as many as `text_2` has.
        text_2: the texts to compare with it.
    """

    text_1: Texts
    text_2: Texts


class Score(ResponseFields, frozen=True, kw_only=True):
    """The similarity of two texts, -1 to 1."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(ResponseFields, frozen=True, kw_only=True):
    """The response of POST /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Document(RequestFields, frozen=True, kw_only=True):
    """A document that is an object."""

    text: str


class RerankRequest(EncodingRequest, frozen=True, kw_only=True):
    """The body of POST /v1/rerank.

    Attributes:
        query: a text.
        documents: the texts to put in order.
        top_n: how many of the best come back; 0 and none: all.
        return_documents: whether their texts come back. Default: true.
        max_tokens_per_doc: not supported.
    """

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: None = None


class RankedDocument(ResponseFields, frozen=True, kw_only=True):
    """The text of a document."""

    text: str


class RerankResult(ResponseFields, frozen=True, kw_only=True):
    """A document and how relevant it is, -1 to 1."""

    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class Reranked(ResponseFields, frozen=True, kw_only=True):
    """The response of POST /v1/rerank, the most relevant document first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


_EMBED = msgspec.json.Decoder(EmbeddingRequest)
_SCORE = msgspec.json.Decoder(ScoreRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)


async def embed(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /v1/embeddings."""
    body = await read(request, _EMBED, settings)
    served = served_model(models, body.model)
    encoder = served.bundle.config.encoder
    if encoder is not None and body.dimensions not in (None, encoder.width):
        raise field_error(
            "dimensions",
            f"expected {encoder.width}, the width of this model, found {body.dimensions}",
            code="unsupported_parameter",
        )
    inputs = _inputs(body)
    vectors, usage = await _encoded(request, settings, served, body, inputs)
    return json_response(
        EmbeddingList(
            data=[
                EmbeddingVector(index=place, embedding=_written(vector, body.encoding_format))
                for place, vector in enumerate(vectors)
            ],
            model=served.name,
            usage=usage,
        )
    )


async def _encoded(
    request: Request,
    settings: Settings,
    served: Served,
    body: EncodingRequest,
    inputs: list[str | list[int]],
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], EmbeddingUsage]:
    """Return the vectors of inputs, little-endian float32 [N, D], and the usage.

    Raises:
        ApiError: the model is no encoder, the request wants them shorter than the model does, or its key has
            no tokens left.
        ClientDisconnect: the client is gone.
        NumbersError: the model returned no numbers.
        UsageError, ContextError, QueueFullError, ClosedError, DeadlineError: as `Engine.encode`.
    """
    if served.bundle.config.encoder is None:
        kind = "functions" if served.bundle.config.decoder is None else "a decoder"
        raise field_error(
            "model", f"expected an encoder, found {served.name!r}, which holds {kind}"
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
    tokens = found.stats.tokens
    if key.meter is not None:
        key.meter.spend(tokens)
    return vectors, EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)


def _inputs(body: EmbeddingRequest) -> list[str | list[int]]:
    inputs = as_inputs("input", body.input)
    if len(inputs) > MAX_INPUTS:
        raise field_error("input", f"expected at most {MAX_INPUTS}, found {len(inputs)}")
    for place, each in enumerate(inputs):
        if not each:
            raise field_error("input", f"expected no empty text, found one at place {place}")
    return inputs


def _written(vector: np.ndarray[Any, Any], encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.tolist()  # type: ignore[no-any-return]


async def score(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /v1/score."""
    body = await read(request, _SCORE, settings)
    served = served_model(models, body.model)
    one, other = (
        [texts] if isinstance(texts, str) else texts for texts in (body.text_1, body.text_2)
    )
    if len(one) not in (1, len(other)):
        raise field_error(
            "text_1", f"expected one text, or {len(other)} as text_2 has, found {len(one)}"
        )
    scores, usage = await _cosines(request, settings, served, body, one, other)
    return json_response(
        ScoreList(
            id=f"score-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=served.name,
            data=[Score(index=place, score=each) for place, each in enumerate(scores)],
            usage=usage,
        )
    )


async def rerank(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /v1/rerank."""
    body = await read(request, _RERANK, settings)
    served = served_model(models, body.model)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    scores, usage = await _cosines(request, settings, served, body, [body.query], texts)
    best = sorted(range(len(texts)), key=lambda place: -scores[place])[: body.top_n or None]
    shown = body.return_documents is not False
    return json_response(
        Reranked(
            id=f"rerank-{uuid.uuid4().hex}",
            model=served.name,
            results=[
                RerankResult(
                    index=place,
                    relevance_score=scores[place],
                    document=RankedDocument(text=texts[place]) if shown else msgspec.UNSET,
                )
                for place in best
            ],
            usage=usage,
        )
    )


async def _cosines(
    request: Request,
    settings: Settings,
    served: Served,
    body: EncodingRequest,
    one: list[str],
    other: list[str],
) -> tuple[list[float], EmbeddingUsage]:
    """Return the cosine of each pair of texts, and the usage; `one` may be a single text."""
    vectors, usage = await _encoded(request, settings, served, body, [*one, *other])
    long: np.ndarray[Any, np.dtype[np.float64]] = vectors.astype(np.float64)
    long /= np.maximum(np.linalg.norm(long, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return (long[: len(one)] * long[len(one) :]).sum(1).tolist(), usage
