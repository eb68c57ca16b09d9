"""Compare a packed model with its float32 form: both read the same tokens, on the CPU of the build host.

The packed model has the weights of the bundle itself. The float32 weights of the whole model are in memory
meanwhile, 4 bytes a parameter.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.models.parameters import Parametrized
from prejit.runtime.encoding.sentences import shorten
from prejit.runtime.errors import (
    BuildError,
    CheckpointError,
    ManifestError,
    RejectError,
    StoreError,
    TruncationWarning,
    UsageError,
)
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.schema import Accuracy
from prejit.runtime.programs.weights import open_weights
from prejit.runtime.text.tokenizer import Tokenizer

Arrays = np.ndarray[Any, Any]

SAMPLED = "sampled"
RANDOM = "random"
MAX_TEXT_TOKENS = 2048
"""Largest number of tokens of an evaluation text; the last ones count."""
_WINDOW = 512
"""Largest number of tokens that the models read at once."""
_ROWS, _STEPS = 8, 64
"""Texts, and tokens of each, that the float32 model writes where the manifest names no text."""
_SENTENCES, _SENTENCE_TOKENS = 64, 128
"""Largest number of sentences, and of tokens of each, that an encoder reads."""
_MAX_LOGITS = 1 << 26
"""Largest number of logits of a window: 256 MB. Large vocabularies get shorter windows."""
_MAX_LOSS = 60.0
"""Largest loss in nats: JSON still holds the integer of a perplexity of e**60."""


@dataclass(frozen=True)
class ComparedModel:
    """A decoder or encoder that can be run.

    Attributes:
        model: the model.
        weights: the parameters by name.
        cache_dtype: the dtype of a decoder's cache.
    """

    model: Parametrized
    weights: Mapping[str, Arrays]
    cache_dtype: str = "float32"


def read_text(file: Path, tokenizer_file: Path) -> tuple[Arrays, Arrays]:
    """Return the tokens at the end of a text, int32 [MAX_TEXT_TOKENS or fewer], and those that begin it.

    Args:
        file: the text of the manifest's `evaluation`, UTF-8.
        tokenizer_file: the model's tokenizer.json.

    Returns:
        The tokens, and those that the tokenizer puts before a text: a BOS for models that were trained with
        one, else none; int32.

    Raises:
        StoreError, ManifestError, CheckpointError: a file cannot be read, or the text is too short.
    """
    text, tokenizer = _read(file, tokenizer_file)
    ids = _encoded(tokenizer, text, tokenizer_file, add_special_tokens=False)
    if len(ids) < 2:
        raise ManifestError(
            f"{file}: expected a text of 2 tokens or more, found {len(ids)}",
            hint="a few pages of what the model is used for are enough",
        )
    bare, whole = (tokenizer.encode("a", add_special_tokens=each) for each in (False, True))
    places = range(len(whole) - len(bare) + 1)
    begun = next((at for at in places if whole[at : at + len(bare)] == bare), 0)
    return np.array(ids[-MAX_TEXT_TOKENS:], np.int32), np.array(whole[:begun], np.int32)


def read_sentences(file: Path, tokenizer_file: Path, max_tokens: int) -> tuple[Arrays, Arrays]:
    """Return the last lines of a text that are not empty, as an encoder takes them.

    Args:
        file: the text of the manifest's `evaluation`, UTF-8.
        tokenizer_file: the model's tokenizer.json.
        max_tokens: tokens after which a line is cut off.

    Returns:
        Tokens int32 [64 or fewer, T] and the length of each row, int32.

    Raises:
        StoreError, ManifestError, CheckpointError: a file cannot be read, or has no line.
    """
    text, tokenizer = _read(file, tokenizer_file)
    lines = [line for line in text.splitlines() if line.strip()][-_SENTENCES:]
    if not lines:
        raise ManifestError(
            f"{file}: expected a line of text, found none",
            hint="a few sentences of what the model is used for are enough",
        )
    encoded = [_encoded(tokenizer, line, tokenizer_file) for line in lines]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        shorten(encoded, min(max_tokens, _SENTENCE_TOKENS), lambda: tokenizer, "truncate", "")
    length = np.array([len(ids) for ids in encoded], np.int32)
    tokens = np.zeros((len(encoded), max(1, int(length.max()))), np.int32)
    for row, ids in zip(tokens, encoded, strict=True):
        row[: len(ids)] = ids
    return tokens, length


def random_sentences(vocab_size: int, max_tokens: int) -> tuple[Arrays, Arrays]:
    """Return random tokens, the same each time, in the form of `read_sentences`."""
    random = np.random.default_rng(0)
    count = min(max_tokens, _SENTENCE_TOKENS)
    tokens = random.integers(0, vocab_size, (_SENTENCES, count), np.int32)
    return tokens, random.integers(1, count + 1, _SENTENCES, np.int32)


def _read(file: Path, tokenizer_file: Path) -> tuple[str, Tokenizer]:
    """Return a text and the model's tokenizer, as a bundle loads it."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{file}: cannot read the evaluation text: {error}") from error
    if not tokenizer_file.is_file():
        raise CheckpointError(
            f"{tokenizer_file}: expected a file, which model.evaluation needs; found none",
            hint="leave out model.evaluation: prejit then measures without a text",
        )
    try:
        return text, Tokenizer(tokenizer_file.read_bytes(), str(tokenizer_file))
    except (OSError, RejectError) as error:
        raise CheckpointError(f"{error}") from error


def _encoded(
    tokenizer: Tokenizer, text: str, tokenizer_file: Path, *, add_special_tokens: bool = True
) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except UsageError as error:
        raise CheckpointError(f"{tokenizer_file}: the evaluation text: {error}") from error


def mapped(weights: Path) -> dict[str, Arrays]:
    """Return the tensors of a weights layer by name; views of the file.

    Raises:
        RejectError: the file is no weights layer.
    """
    with weights.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {**open_weights(Layer(content, str(weights))).values}


def of_decoder(
    dtype: str,
    exact: ComparedModel,
    stored: ComparedModel,
    sizes: tuple[int, int],
    text: tuple[str, Arrays, Arrays] | None,
    bos: int,
) -> Accuracy:
    """Compare a stored decoder with its float32 form.

    Args:
        dtype: dtype of the stored weights.
        exact: the decoder in float32.
        stored: the decoder as it is packed.
        sizes: the number of tokens that it knows, and its longest text.
        text: name of the text, its tokens and those that begin any text, int32; None: what the float32 model
            writes. The models read it in windows, each of which begins as a text does.
        bos: the token with which the float32 model begins to write.

    Raises:
        BuildError: logits are infinite or NaN.
    """
    vocab_size, longest = sizes
    longest = min(_WINDOW, longest, max(2, _MAX_LOGITS // vocab_size))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        weights = {name: jnp.asarray(values) for name, values in exact.weights.items()}
        packed = {name: jnp.asarray(values) for name, values in stored.weights.items()}
        if text is None:
            rows, begin = _sampled(exact, weights, bos, min(longest, _STEPS)), np.zeros(0, np.int32)
        else:
            rows, begin = np.atleast_2d(text[1]), text[2][: longest - 1]
        longest = min(longest, begin.size + rows.shape[1])
        step = longest - begin.size
        windows = [
            np.concatenate((begin, row[at : at + step]))
            for row in rows
            for at in range(0, row.size, step)
        ]
        unread = max(0, begin.size - 1)  # no model predicts what begins every text
        exact_logits, stored_logits = _logits(exact), _logits(stored)
        tokens, agreeing = 0, 0
        exact_loss = loss = difference = 0.0
        for window in windows:
            if (count := len(window) - 1) < 1:
                continue
            padded = np.zeros((1, longest), np.int32)
            padded[0, : count + 1] = window
            want = np.asarray(exact_logits(weights, padded))[unread:count]
            found = np.asarray(stored_logits(packed, padded))[unread:count]
            exact_loss += _loss(want, window[1 + unread :])
            loss += _loss(found, window[1 + unread :])
            difference = max(difference, float(np.abs(want - found).max()))
            agreeing += int((want.argmax(-1) == found.argmax(-1)).sum())
            tokens += count - unread
    if not math.isfinite(exact_loss + loss + difference):
        raise BuildError(
            "the model's logits are infinite or NaN",
            hint="take a checkpoint from before training failed, or another dtype",
        )
    return Accuracy(
        weights=dtype,
        text=SAMPLED if text is None else text[0],
        tokens=tokens,
        float32_perplexity_millionths=_perplexity(exact_loss / tokens),
        perplexity_millionths=_perplexity(loss / tokens),
        logit_difference_millionths=_millionths(difference),
        top1_agreement_millionths=_millionths(agreeing / tokens),
    )


def of_encoder(
    dtype: str,
    exact: ComparedModel,
    stored: ComparedModel,
    text: str,
    tokens: Arrays,
    length: Arrays,
) -> Accuracy:
    """Compare the embeddings of a stored encoder with those of its float32 form.

    Args:
        dtype: dtype of the stored weights.
        exact: the encoder in float32.
        stored: the encoder as it is packed.
        text: name of the text.
        tokens: int32 [B, T].
        length: int32 [B]: number of valid tokens of each row.

    Raises:
        BuildError: embeddings are infinite or NaN.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want, found = (
            np.asarray(_embeddings(each)(each.weights, tokens, length), np.float64)
            for each in (exact, stored)
        )
    lengths = np.linalg.norm(want, axis=-1) * np.linalg.norm(found, axis=-1)
    cosine = float(((want * found).sum(-1) / np.maximum(lengths, 1e-30)).min())
    if not math.isfinite(cosine):
        raise BuildError(
            "the model's embeddings are infinite or NaN",
            hint="take a checkpoint from before training failed, or another dtype",
        )
    return Accuracy(
        dtype, text, int(length.sum()), cosine_millionths=_millionths(np.clip(cosine, -1, 1))
    )


def _embeddings(model: ComparedModel) -> Callable[..., jax.Array]:
    return jax.jit(lambda weights, *arguments: model.model.bind(weights)(*arguments))


def _logits(model: ComparedModel) -> Callable[[Mapping[str, Any], Arrays], jax.Array]:
    """Return a function of weights and int32 [1, T] that returns all logits, float32 [T, V]."""

    def logits(weights: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
        count = tokens.shape[1]
        length = jnp.full(1, count, jnp.int32)
        bound = model.model.bind(weights)
        cache = bound.make_cache(1, count, model.cache_dtype)
        found: jax.Array = bound(tokens, length * 0, length, cache, every=True)[0][0]
        return found

    return jax.jit(logits)


def _sampled(
    model: ComparedModel, weights: Mapping[str, jax.Array], bos: int, steps: int
) -> Arrays:
    """Return what a decoder writes at temperature 1: int32 [_ROWS, steps], the same each time."""
    one = jnp.ones(_ROWS, jnp.int32)

    def write(weights: Mapping[str, jax.Array]) -> jax.Array:
        def step(carry: tuple[jax.Array, Any], at: jax.Array) -> tuple[Any, jax.Array]:
            token, cache = carry
            logits, cache = model.model.bind(weights)(token[:, None], one * at, one, cache)
            key = jax.random.fold_in(jax.random.key(0), at)
            following = jax.random.categorical(key, logits).astype(jnp.int32)
            return (following, cache), token

        cache = model.model.bind(weights).make_cache(_ROWS, steps, model.cache_dtype)
        start = (one * bos, cache)
        return jax.lax.scan(step, start, jnp.arange(steps))[1].T

    return np.asarray(jax.jit(write)(weights))


def _loss(logits: Arrays, following: Arrays) -> float:
    """Return the sum over rows of -log p(following) in nats; logits [T, V]."""
    logits = logits - logits.max(-1, keepdims=True)
    normalizer = np.log(np.exp(logits).sum(-1, dtype=np.float64))
    return float((normalizer - logits[np.arange(len(following)), following]).sum())


def _perplexity(loss: float) -> int:
    return _millionths(math.exp(min(max(loss, 0.0), _MAX_LOSS)))


def _millionths(value: float) -> int:
    return round(float(value) * 1_000_000)
