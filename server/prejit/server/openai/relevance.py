"""POST /v1/score and /v1/rerank: how relevant texts are, as vLLM, Cohere, Jina and TEI have them.

A model that scores pairs of texts gives its scores, an embedder the cosine of its vectors.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from prejit.server.gate.http_errors import field_error, json_response
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.bodies import RequestFields, ResponseFields, read, served_model
from prejit.server.openai.embeddings import MAX_INPUTS, EmbeddingUsage, EncodingRequest, encoded
from prejit.server.served.served import Models, Served

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
"""One text or several."""


class RelevanceRequest(EncodingRequest, frozen=True, kw_only=True):
    """The fields of both endpoints.

    Attributes:
        instruction: what makes a text relevant, for a model that takes an instruction.
    """

    instruction: str | None = None


class ScoreRequest(RelevanceRequest, frozen=True, kw_only=True):
    """The body of POST /v1/score.

    Attributes:
        text_1: one text, or as many as `text_2` has.
        text_2: the texts to compare with it.
    """

    text_1: Texts
    text_2: Texts


class Score(ResponseFields, frozen=True, kw_only=True):
    """The score of a pair of texts."""

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


class RerankRequest(RelevanceRequest, frozen=True, kw_only=True):
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
    """A document and how relevant it is."""

    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class Reranked(ResponseFields, frozen=True, kw_only=True):
    """The response of POST /v1/rerank, the most relevant document first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


_SCORE = msgspec.json.Decoder(ScoreRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)


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
    scores, usage = await _scores(request, settings, served, body, one, other)
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
    scores, usage = await _scores(request, settings, served, body, [body.query], texts)
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


async def _scores(
    request: Request,
    settings: Settings,
    served: Served,
    body: RelevanceRequest,
    one: list[str],
    other: list[str],
) -> tuple[list[float], EmbeddingUsage]:
    """Return the score of each pair of texts, and the usage; `one` may be a single text.

    The score is the cosine of both embeddings if the model does not score.
    """
    encoder = served.bundle.config.encoder
    if body.instruction is not None and (encoder is None or encoder.instruction is None):
        raise field_error("instruction", f"expected none: {served.name!r} has no place for one")
    if encoder is None or encoder.scores is None:
        vectors, usage = await encoded(request, settings, served, body, [*one, *other])
        long: np.ndarray[Any, np.dtype[np.float64]] = vectors.astype(np.float64)
        long /= np.maximum(np.linalg.norm(long, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return (long[: len(one)] * long[len(one) :]).sum(1).tolist(), usage
    if encoder.width > 1:
        raise field_error(
            "model",
            f"expected a model with one score, found {served.name!r}, which has {encoder.width} labels",
        )
    queries = one * len(other) if len(one) == 1 else one
    pairs = list(zip(queries, other, strict=True))
    found, usage = await encoded(
        request, settings, served, body, pairs, instruction=body.instruction
    )
    return found[:, 0].tolist(), usage
