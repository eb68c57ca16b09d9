"""POST /v1/embeddings, /v1/score and /v1/rerank: vectors of texts and images, and how relevant texts are.

The last two are as vLLM, Cohere, Jina and TEI have them. A model that scores pairs of texts gives its scores,
an embedder the cosine of its vectors.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from prejit.runtime.encoding.sentences import shortened
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
from prejit.server.openai.prompts import Inputs, as_inputs, file_of, off_loop, reading
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


class InputPart(RequestFields, frozen=True, kw_only=True):
    """An image or a text, in Jina's form.

    Attributes:
        image: a data URL in base64, or its base64 alone.
        text: a text; one of both is given.
    """

    image: str | None = None
    text: str | None = None


class EmbeddingRequest(EncodingRequest, frozen=True, kw_only=True):
    """The body of POST /v1/embeddings.

    Attributes:
        input: a text, token ids, or a list of either; or a list of images and texts.
        encoding_format: numbers, or the bytes of little-endian float32 in base64.
        dimensions: how many components to keep; a vector of length 1 gets that length again.
        prompt_name: the prompt of the model to put before texts; it may be missing: its default.
    """

    input: str | list[int | str | list[int] | InputPart]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


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


_EMBED = msgspec.json.Decoder(EmbeddingRequest)


async def embed(models: Models, settings: Settings, request: Request) -> Response:
    """Answer POST /v1/embeddings."""
    body = await read(request, _EMBED, settings)
    served = served_model(models, body.model)
    encoder = served.bundle.config.encoder
    most = 0 if encoder is None else encoder.width
    if encoder is not None and not 0 < (body.dimensions or most) <= most:
        raise field_error(
            "dimensions", f"expected 1 to {most}, the width of this model, found {body.dimensions}"
        )
    if encoder is not None and encoder.scores is not None:
        raise field_error(
            "model",
            f"expected a model that embeds, found {served.name!r}, which scores pairs of texts",
        )
    options: dict[str, Any] = {"dimensions": body.dimensions, "prompt_name": body.prompt_name}
    parts: list[InputPart] = []
    if isinstance(body.input, list) and InputPart in {*map(type, body.input)}:
        parts = [each for each in body.input if isinstance(each, InputPart)]
        if len(parts) != len(body.input):
            raise field_error(
                "input", "expected texts, or objects with `text` or `image`, found both in one list"
            )
    pictures = _pictures(body, served, parts)
    texts = [str(each.text) for each in parts if each.image is None]
    inputs: list[str | list[int]] = []
    if texts or not parts:
        inputs = _inputs(cast("Inputs", texts or body.input))
    vectors: Any = []
    usage = EmbeddingUsage(prompt_tokens=0, total_tokens=0)
    if inputs:
        vectors, usage = await encoded(request, settings, served, body, inputs, **options)
    if pictures:
        images = await _of_images(request, served, pictures)
        found, others = iter(images), iter(vectors)
        vectors = [next(others if each.image is None else found) for each in parts]
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


async def encoded(
    request: Request,
    settings: Settings,
    served: Served,
    body: EncodingRequest,
    inputs: Sequence[str | list[int] | tuple[str, str]],
    *,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    instruction: str | None = None,
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], EmbeddingUsage]:
    """Return the vectors of inputs, or the scores of pairs, little-endian float32 [N, D], and the usage.

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
    characters = sum(
        sum(map(len, each)) if isinstance(each, tuple) else len(each) for each in inputs
    )
    # The engine tokenizes in the caller's thread.
    future = await off_loop(
        characters,
        lambda: served.engine.submit_encode(
            inputs,
            on_too_long="truncate" if is_cut else "error",
            prompt_name=prompt_name,
            instruction=instruction,
            timeout=settings.timeout_seconds,
            client=key.name,
            limits=key.limits,
        ),
    )
    found = await unless_gone(request.receive, asyncio.wrap_future(future))
    found = shortened(served.bundle.encoder, found, dimensions)
    vectors = np.ascontiguousarray(found.embeddings, np.dtype("<f4"))
    if not np.isfinite(vectors).all():
        raise NumbersError("the model returned embeddings or scores that are not numbers")
    tokens = found.stats.tokens
    if key.meter is not None:
        key.meter.spend(tokens)
    return vectors, EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)


def _pictures(body: EmbeddingRequest, served: Served, parts: Sequence[InputPart]) -> list[bytes]:
    """Return the files of the images of a request, which are checked when they are read."""
    if not parts:
        return []
    if len(parts) != len(body.input) or any((p.image is None) == (p.text is None) for p in parts):
        raise field_error("input", "expected objects alone, each with an image or a text")
    if len(parts) > MAX_INPUTS:
        raise field_error("input", f"expected at most {MAX_INPUTS}, found {len(parts)}")
    images = served.bundle.config.images
    if images is None or images.labels is not None or images.tokens is not None:
        raise field_error("model", f"expected one that embeds images, found {served.name!r}")
    if body.dimensions is not None:
        raise field_error("dimensions", "expected none beside images")
    return [
        file_of(part.image, "input", f"[{place}].image")
        for place, part in enumerate(parts)
        if part.image is not None
    ]


async def _of_images(
    request: Request, served: Served, files: list[bytes]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the vectors of images, little-endian float32 [N, D]."""
    found = await reading(request, served, files, "input", served.bundle.embed_images)
    vectors = np.ascontiguousarray(found, np.dtype("<f4"))
    if not np.isfinite(vectors).all():
        raise NumbersError("the model returned embeddings that are not numbers")
    return vectors


def _inputs(given: Inputs) -> list[str | list[int]]:
    inputs = as_inputs("input", given)
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


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
"""One text or several."""


class RelevanceRequest(EncodingRequest, frozen=True, kw_only=True):
    """The fields of /v1/score and /v1/rerank.

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
