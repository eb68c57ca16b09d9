"""Checks of what an encoder-decoder makes of its sources: padding, rows, and the size of the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.checking.check_finding import Finding, difference
from prejit.compiler.checking.rules import Compared, compare
from prejit.compiler.checking.subject import ROWS, Array, Subject
from prejit.compiler.models.protocol import Cache


def encode(subject: Subject) -> Finding | None:
    """Texts depend on the valid places of their own source alone. None: the model takes no sources."""
    if not subject.encodes:
        return None
    sources = subject.sources()
    whole = np.full(ROWS, subject.source_size, np.int32)
    right = _logits(subject, subject.encode(sources, whole))
    blind = difference(_logits(subject, subject.encode(subject.sources(1), whole)), right)
    if blind <= subject.tolerance:
        return Finding(
            "encode",
            False,
            blind,
            f"expected other logits for other sources, found a difference of {blind:.1e} of their spread",
            "read the source's arrays of the cache in every call, and give the model random weights",
        )
    compared: list[Compared] = []
    for row in range(ROWS):
        cache = subject.encode(sources[row : row + 1], whole[:1])
        alone = _logits(subject, cache, slice(row, row + 1))
        compared.append((f"between a source alone and in row {row}", alone, right[row : row + 1]))
    if len(subject.source_sizes) > 1:
        compared += _padded(subject, sources)
    return compare(
        subject,
        "encode",
        "texts that depend on the valid places of their own source alone",
        "keep `length` in the cache and mask places at or after it, in the encoder and in every attention "
        "to the source; compute nothing over axis 0",
        compared,
    )


def _padded(subject: Subject, sources: Array) -> list[Compared]:
    """Return the logits for sources with padding of zeros, of anything, in larger arrays and caches."""
    size, larger = subject.source_sizes
    axis = subject.source_axis
    lengths = np.array([size, size // 2, 1], np.int32)
    shape = [1] * sources.ndim
    shape[axis] = size
    valid = np.arange(size).reshape(shape) < lengths.reshape(-1, *[1] * (sources.ndim - 1))
    zeros = np.where(valid, sources, 0).astype(sources.dtype)
    others = np.where(valid, sources, subject.sources(1)).astype(sources.dtype)
    pads = [(0, larger - size if at == axis else 0) for at in range(sources.ndim)]
    cache = subject.encode(zeros, lengths)
    right = _logits(subject, cache)
    in_larger = subject.encode(np.pad(zeros, pads), lengths)
    return [
        (
            "with other padding of the source",
            _logits(subject, subject.encode(others, lengths)),
            right,
        ),
        ("with more padding of the source", _logits(subject, in_larger), right),
        ("after the cache was padded", _logits(subject, _padded_cache(cache, in_larger)), right),
    ]


def _padded_cache(cache: Cache, larger: Cache) -> Cache:
    """Return a cache with zeros behind its places, so that it has the shapes of a larger one."""
    return jax.tree.map(
        lambda one, two: jnp.pad(
            one, [(0, b - a) for a, b in zip(one.shape, two.shape, strict=True)]
        ),
        cache,
        larger,
    )


def _logits(subject: Subject, cache: Cache, rows: slice = slice(None)) -> Array:
    """Return the logits of a text's first piece and of the next token, [B, 2, V]."""
    piece, texts = subject.piece, subject.texts[rows]
    first, cache = subject.call(texts[:, :piece], 0, piece, cache)
    second, _ = subject.call(texts[:, piece : piece + 1], piece, 1, cache)
    return np.stack([first, second], 1)
