"""Compare a packed model with its float32 form: both read the same tokens, on the CPU of the build host.

The packed model has the weights of the bundle itself. Neither model is in memory as a whole: a function of
its weights is traced once, and its jaxpr is evaluated operation by operation. So memory holds what lies
between two layers, and one weight; of a float32 matrix that is multiplied with, or of a table, a block of
rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from prejit.compiler.models import narrow_matrices
from prejit.compiler.models.int4_rounding import Rows
from prejit.compiler.models.narrow_matrices import INLINED, bind, called
from prejit.compiler.models.parameters import Parametrized
from prejit.compiler.models.quantizing import blocks
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
from prejit.runtime.format.bundle_schema import Accuracy
from prejit.runtime.programs.mapped_weights import open_weights
from prejit.runtime.text.tokenizer import Tokenizer

Arrays = np.ndarray[Any, Any]
_Result = TypeVar("_Result")

RANDOM = "random"
MAX_TEXT_TOKENS = 2048
"""Largest number of tokens that a decoder reads; the last ones of a text count."""
_WINDOW = 512
"""Largest number of tokens that the models read as one text."""
_RANDOM_TOKENS = 64
"""Tokens of a random text, and the smallest number of tokens that a decoder reads."""
_MAX_PRODUCTS = 1 << 37
"""Largest number of parameters times tokens: a few seconds on two cores. Large models read fewer tokens."""
_MAX_LOGITS = 1 << 25
"""Largest number of logits of a model: 128 MB. With a large vocabulary, fewer tokens are read."""
_MIN_ROWS = 64
"""Smallest number of tokens that a decoder gets in one call, padding included."""
_LOSS_ROWS = 16
"""Tokens whose probabilities are computed at once, in float64."""
_SENTENCES, _SENTENCE_TOKENS = 64, 128
"""Largest number of sentences, and of tokens of each, that an encoder reads."""
_MIN_SENTENCES = 8
"""Smallest number of sentences that a large encoder reads, if there are as many."""
_IMAGES = 4
"""Number of pictures that an encoder of images reads."""
_MAX_LOSS = 60.0
"""Largest loss in nats: JSON still holds the integer of a perplexity of e**60."""


@dataclass(frozen=True)
class ComparedModel:
    """A decoder or encoder that can be run. Its weights are read when they are used."""

    model: Parametrized
    weights: Mapping[str, Rows]
    cache_dtype: str = "float32"


def read_text(file: Path, tokenizer_file: Path) -> tuple[Arrays, Arrays]:
    """Return the tokens at the end of a text, int32 [MAX_TEXT_TOKENS or fewer], and those that begin it.

    The latter are what the tokenizer puts before a text: a BOS for models that were trained with one, else
    none.

    Raises:
        StoreError, ManifestError, CheckpointError: a file cannot be read, or the text is too short.
    """
    ids, begin = encode_text(file, tokenizer_file)
    if len(ids) < 2:
        raise ManifestError(
            f"{file}: expected a text of 2 tokens or more, found {len(ids)}",
            hint="a few pages of what the model is used for are enough",
        )
    return ids[-MAX_TEXT_TOKENS:], begin


def encode_text(file: Path, tokenizer_file: Path) -> tuple[Arrays, Arrays]:
    """Return all tokens of a text, and those that begin it, both int32. Errors are those of `read_text`."""
    text, tokenizer = _read(file, tokenizer_file)
    ids = _encoded(tokenizer, text, tokenizer_file, add_special_tokens=False)
    begin, _ = tokenizer.around()
    return np.array(ids, np.int32), np.array(begin, np.int32)


def read_sentences(
    file: Path, tokenizer_file: Path, max_tokens: int, *, deciding: bool = False
) -> tuple[Arrays, Arrays]:
    """Return the last lines of a text that are not empty, cut off after `max_tokens` as an encoder does.

    `deciding` asks for those before them, if there are some: what decides should not measure too.

    Returns:
        Tokens int32 [64 or fewer, T] and the length of each row, int32.

    Raises:
        StoreError, ManifestError, CheckpointError: a file cannot be read, or has no line.
    """
    text, tokenizer = _read(file, tokenizer_file)
    lines = [line for line in text.splitlines() if line.strip()]
    lines = (deciding and lines[:-_SENTENCES][-_SENTENCES:]) or lines[-_SENTENCES:]
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
    """Return the tensors of a weights layer by name; views of the file."""
    return {**open_weights(Layer.in_file(weights)).values}


def of_decoder(
    dtype: str,
    exact: ComparedModel,
    stored: ComparedModel,
    sizes: tuple[int, int],
    text: tuple[str, Arrays, Arrays] | None,
    bos: int,
) -> Accuracy:
    """Compare a stored decoder with its float32 form.

    On a text, each token counts that follows. Without one, every token of the vocabulary counts after each
    random token, by the probability that the float32 decoder gives it.

    Args:
        dtype: dtype of the stored weights.
        exact: the decoder in float32.
        stored: the decoder as it is packed.
        sizes: the number of tokens that it knows, and its longest text.
        text: name of the text, its tokens and those that begin any text, int32; None: random tokens. The
            models read it in windows, and each window begins as a text does.
        bos: the token that begins random ones.

    Raises:
        BuildError: logits are infinite or NaN.
    """
    vocab_size, longest = sizes
    most = min(MAX_TEXT_TOKENS, _affordable(exact), _MAX_LOGITS // vocab_size)
    budget = max(_RANDOM_TOKENS, most)
    if text is None:
        width = min(_RANDOM_TOKENS, longest)
        random = np.random.default_rng(0)
        tokens = random.integers(0, vocab_size, (max(1, budget // width), width), np.int32)
        tokens[:, 0] = bos
        windows, unread = list(tokens), 0
    else:
        ids, begin = text[1][-budget:], text[2][: min(_WINDOW, longest) - 1]
        step = min(_WINDOW, longest) - begin.size
        windows = [np.concatenate((begin, ids[at : at + step])) for at in range(0, ids.size, step)]
        windows = [each for each in windows if each.size > 1]
        unread = max(0, begin.size - 1)  # no model predicts what begins every text
    want, found = _both(partial(_logits, windows=windows), exact, stored)
    count, agreeing = 0, 0
    losses, difference = np.zeros(2), 0.0
    for window, *each in zip(windows, want, found, strict=True):
        scored = slice(0, None) if text is None else slice(unread, window.size - 1)
        following = None if text is None else window[unread + 1 :]
        exact_logits, stored_logits = (logits[scored] for logits in each)
        losses += _losses(exact_logits, stored_logits, following)
        difference = max(difference, float(np.abs(exact_logits - stored_logits).max()))
        agreeing += int((exact_logits.argmax(-1) == stored_logits.argmax(-1)).sum())
        count += len(exact_logits)
    if not np.isfinite([*losses, difference]).all():
        raise BuildError(
            "the model's logits are infinite or NaN",
            hint="take a checkpoint from before training failed, or another dtype",
        )
    return Accuracy(
        weights=dtype,
        text=RANDOM if text is None else text[0],
        tokens=count,
        float32_perplexity_millionths=_perplexity(losses[0] / count),
        perplexity_millionths=_perplexity(losses[1] / count),
        logit_difference_millionths=_millionths(difference),
        top1_agreement_millionths=_millionths(agreeing / count),
    )


def of_encoder(
    dtype: str,
    exact: ComparedModel,
    stored: ComparedModel,
    text: str,
    tokens: Arrays,
    length: Arrays,
    *,
    scores: bool = False,
) -> Accuracy:
    """Compare the embeddings, or the scores, of a stored encoder with those of its float32 form.

    Tokens are int32 [B, T], of which a large encoder reads the last rows only; `length` int32 [B] is the
    number of valid tokens of each row.
    """
    rows = max(_MIN_SENTENCES, _affordable(exact) // tokens.shape[1])
    tokens, length = tokens[-rows:], length[-rows:]
    embeddings = partial(vectors, tokens=tokens, length=length)
    count = int(length.sum())
    return _of_vectors(dtype, text, count, _both(embeddings, exact, stored), scores=scores)


def vectors(model: ComparedModel, tokens: Arrays, length: Arrays) -> Callable[[], Arrays]:
    """Return what computes the embeddings, or the scores, of an encoder: float32 [B, D']."""
    return _evaluated(model, call=lambda bound: bound, arguments=(tokens, length))


def of_images(
    dtype: str, exact: ComparedModel, stored: ComparedModel, size: tuple[int, int], *, scores: bool
) -> Accuracy:
    """Compare what a stored encoder and its float32 form find in random pictures of one color and noise."""
    random = np.random.default_rng(0)
    colors = random.integers(0, 192, (_IMAGES, 1, 1, 3))
    pixels = (colors + random.integers(0, 64, (_IMAGES, *size, 3))).astype(np.uint8)
    embeddings = partial(_evaluated, call=lambda model: model.image, arguments=(pixels,))
    return _of_vectors(
        dtype, "random pictures", _IMAGES, _both(embeddings, exact, stored), scores=scores
    )


def _of_vectors(
    dtype: str, text: str, count: int, vectors: Sequence[Arrays], *, scores: bool
) -> Accuracy:
    want, found = (each.astype(np.float64) for each in vectors)
    if not np.isfinite(want - found).all():
        raise BuildError(
            f"the model's {'scores' if scores else 'embeddings'} are infinite or NaN",
            hint="take a checkpoint from before training failed, or another dtype",
        )
    if scores:
        difference = _millionths(float(np.abs(want - found).max()))
        return Accuracy(dtype, text, count, logit_difference_millionths=difference)
    cosine = float(np.clip(cosines(want, found).min(), -1, 1))
    return Accuracy(dtype, text, count, cosine_millionths=_millionths(cosine))


def cosines(want: Arrays, found: Arrays) -> Arrays:
    """Return the cosine of each row of float64 [B, D] and its other form: [B]. Zeros are as zeros are."""
    lengths = np.linalg.norm(want, axis=-1) * np.linalg.norm(found, axis=-1)
    are_zeros = ~(want.any(-1) | found.any(-1))
    return ((want * found).sum(-1) + are_zeros) / np.maximum(lengths + are_zeros, 1e-30)


def _affordable(model: ComparedModel) -> int:
    """Return the number of tokens that a model reads in a few seconds."""
    parameters = sum(math.prod(each.shape) for each in model.model.weights.values())
    return _MAX_PRODUCTS // max(1, parameters)


def _both(
    begin: Callable[[ComparedModel], Callable[[], _Result]], *models: ComparedModel
) -> list[_Result]:
    """Return the results of models, which are traced one after the other and evaluated together.

    Reading and widening a weight takes one core.
    """
    evaluations = [begin(each) for each in models]
    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(lambda evaluated: evaluated(), evaluations))


def _evaluated(
    model: ComparedModel,
    call: Callable[[Any], Callable[..., jax.Array]],
    arguments: Sequence[Arrays],
) -> Callable[[], Arrays]:
    """Trace a call of the bound model, and return what evaluates it, with one weight in memory at a time."""

    def function(weights: Mapping[str, jax.Array], *arguments: jax.Array) -> jax.Array:
        return call(model.model.bind(weights))(*arguments)

    def evaluated() -> Arrays:
        with jax.default_device(device):
            weights = [Weight(model.weights[name]) for name in sorted(model.model.weights)]
            [found] = evaluate(traced, [*weights, *arguments])
            return np.asarray(found)

    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        traced = jax.make_jaxpr(function)(dict(model.model.weights), *arguments)
    return evaluated


def _logits(model: ComparedModel, windows: Sequence[Arrays]) -> Callable[[], list[Arrays]]:
    """Return what computes the logits after each token of each window: float32 [T, V]."""
    longest = max(each.size for each in windows)
    # Products of few rows are loops over all weights and rows, whose products XLA would keep here. Rows of
    # length 0 are idle.
    rows = max(len(windows), math.ceil(_MIN_ROWS / longest))
    tokens = np.zeros((rows, longest), np.int32)
    length = np.zeros(rows, np.int32)
    for row, window in enumerate(windows):
        tokens[row, : window.size] = window
        length[row] = window.size

    def call(bound: Any) -> Callable[..., jax.Array]:
        def logits(tokens: jax.Array, start: jax.Array, length: jax.Array) -> jax.Array:
            cache = bound.make_cache(*tokens.shape, model.cache_dtype)
            return bound(tokens, start, length, cache, every=True)[0]

        return logits

    evaluated = _evaluated(model, call, (tokens, length * 0, length))
    return lambda: [rows[: each.size] for rows, each in zip(evaluated(), windows, strict=False)]


def _losses(exact: Arrays, stored: Arrays, following: Arrays | None) -> Arrays:
    """Return the sums over rows of the losses in nats of two decoders, from their logits [T, V].

    `following` is the token that follows each row, int32 [T]; None: any, as the float32 decoder expects.
    """
    losses = np.zeros(2)
    for at in range(0, len(exact), _LOSS_ROWS):
        part = slice(at, at + _LOSS_ROWS)
        logs = [_log_probabilities(logits[part]) for logits in (exact, stored)]
        if following is None:
            expected = np.exp(logs[0])
            losses -= [float((expected * each).sum()) for each in logs]
        else:
            rows = np.arange(len(logs[0]))
            losses -= [float(each[rows, following[part]].sum()) for each in logs]
    return losses


def _log_probabilities(logits: Arrays) -> Arrays:
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits


def _perplexity(loss: float) -> int:
    return _millionths(math.exp(min(max(loss, 0.0), _MAX_LOSS)))


def _millionths(value: float) -> int:
    return round(float(value) * 1_000_000)


@dataclass(frozen=True)
class Weight:
    """An argument of a traced function that is read when it is used; `name` is that of a parameter."""

    rows: Rows
    name: str = ""


def evaluate(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a jaxpr, whose arguments are arrays and weights."""
    return list(map(_whole, narrow_matrices.evaluate(closed, arguments, apply)))


def apply(equation: Any, given: list[Any]) -> Sequence[Any]:
    """Return the results of one operation."""
    name = equation.primitive.name
    if name == "optimization_barrier":  # nothing is compiled here that it could keep apart
        return given
    if any(isinstance(each, Weight) for each in given):
        if name in INLINED:
            return evaluate(called(equation), given)
        if name == "dot_general" and (product := _product(equation, *given)) is not None:
            return [product]
        if name == "gather" and (rows := _gathered(equation, *given)) is not None:
            return [rows]
    return bind(equation, list(map(_whole, given)))


def _product(equation: Any, x: Any, matrix: Any) -> jax.Array | None:
    """Return x [..., in] times a matrix (out, in), by blocks of its rows; None: it is another product."""
    (of_x, of_matrix), batches = equation.params["dimension_numbers"]
    kind = equation.invars[1].aval
    if isinstance(x, Weight) or kind.ndim != 2 or kind.dtype != np.float32 or any(batches):
        return None
    if (*of_x, *of_matrix) != (x.ndim - 1, 1) or x.dtype != np.float32:
        return None
    parts = [
        lax.dot_general(x, matrix.rows[part], (((x.ndim - 1,), (1,)), ((), ())))
        for part in blocks(kind.shape)
    ]
    return jnp.concatenate(parts, -1)


def _gathered(equation: Any, table: Any, index: Any) -> jax.Array | None:
    """Return whole rows of a table at an index [..., 1]; None: something else is gathered."""
    numbers, shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    if isinstance(index, Weight) or equation.params["slice_sizes"] != (1, *shape[1:]):
        return None
    if (numbers.collapsed_slice_dims, numbers.start_index_map) != ((0,), (0,)):
        return None
    if len(shape) != 2 or numbers.offset_dims != (index.ndim - 1,):
        return None
    wanted, places = np.unique(np.asarray(index)[..., 0], return_inverse=True)
    if wanted.size and not 0 <= wanted[0] <= wanted[-1] < shape[0]:
        return None
    found = [table.rows[slice(each, each + 1)] for each in wanted.tolist()]
    return jnp.asarray(np.concatenate(found)[places.reshape(index.shape[:-1])])


def _whole(value: Any) -> Any:
    if not isinstance(value, Weight):
        return value
    rows = value.rows
    return jnp.asarray(rows if isinstance(rows, np.ndarray) else rows[:])
