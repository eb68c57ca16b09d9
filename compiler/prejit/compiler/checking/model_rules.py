"""Checks of a model's rules by numbers: each computes the same logits in two ways.

P is the subject's piece: prompts have 3 P tokens and caches 4 P positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.checking.subject import ROWS, Array, Finding, Subject, difference
from prejit.compiler.lowering.kv_cache_arrays import padded_cache
from prejit.compiler.models.protocol import Cache

Compared = tuple[str, Any, Any]
"""Two ways to compute the same logits: how they differ, the logits found, the logits expected."""


def compare(
    subject: Subject, name: str, expected: str, change: str, compared: Iterable[Compared]
) -> Finding:
    """Return a finding on logits that must be equal."""
    worst, where = -1.0, ""
    for text, found, right in compared:
        apart = difference(found, right)
        if apart > worst:
            worst, where = apart, text
    if worst <= subject.tolerance:
        return Finding(name, True, worst)
    size = f"a difference of {worst:.1e} of their spread" if np.isfinite(worst) else "no numbers"
    found = f"expected {expected}, found {size} {where}"
    return Finding(name, False, worst, found, change)


def finite(subject: Subject) -> Finding:
    """Logits of valid tokens are finite, and so is all of the cache, beside padding and idle rows."""
    piece = subject.piece
    logits, cache = subject.call(
        subject.texts[:, : 3 * piece], 0, [3 * piece, 1, 0], subject.cache()
    )
    wrong = [] if np.isfinite(logits[:2]).all() else ["the logits"]
    for path, array in jax.tree_util.tree_leaves_with_path(cache):
        if jnp.issubdtype(array.dtype, jnp.inexact) and not jnp.isfinite(array).all():
            wrong.append(f"cache{jax.tree_util.keystr(path)}")
    if not wrong:
        return Finding("finite", True)
    return Finding(
        "finite",
        False,
        None,
        f"expected finite numbers, found NaN or infinity in {', '.join(wrong)}",
        "mask with a large finite number or where every row keeps one place, and divide by no empty sum",
    )


def sensitive(subject: Subject) -> Finding:
    """The logits depend on the tokens, or no other check could find a mistake."""
    end = 3 * subject.piece
    texts, others = subject.texts[:, :end], subject.others[:, :end]
    cache = subject.cache()
    logits, after = subject.call(texts, 0, end, cache)
    found = {"the last token": np.concatenate([texts[:, :-1], others[:, -1:]], 1)}
    if jax.tree.leaves(after):
        found["the tokens before the last"] = np.concatenate([others[:, :-1], texts[:, -1:]], 1)
    for what, changed in found.items():
        apart = difference(subject.call(changed, 0, end, cache)[0], logits)
        if apart <= subject.tolerance:
            return Finding(
                "sensitive",
                False,
                apart,
                f"expected other logits where {what} differ, found a difference of {apart:.1e} of their "
                "spread, too small for the other checks to find a mistake",
                "give the model random weights or --params: weights of zeros hide what the model reads",
            )
    return Finding("sensitive", True)


def chunks(subject: Subject) -> Finding:
    """A prompt gives the same logits whole, in pieces, and token by token."""
    piece = subject.piece
    end = 3 * piece
    prompt = subject.texts[:, :end]
    whole, after_whole = subject.feed(prompt, subject.cache(), width=end)
    pieces, after_pieces = subject.feed(prompt, subject.cache(), width=piece)
    steps, after_steps = subject.feed(prompt, subject.cache())
    later = [_continued(subject, cache, end) for cache in (after_whole, after_pieces, after_steps)]
    return compare(
        subject,
        "chunks",
        "one prompt to give the same logits whole, in pieces and token by token",
        "take the position of token t from `start + t`, and read all that came before from the cache",
        [
            ("between pieces and single tokens", pieces, steps[:, piece - 1 :: piece]),
            ("between the whole prompt and single tokens", whole[:, 0], steps[:, -1]),
            ("after the prompt, between pieces and single tokens", later[1], later[2]),
            ("after the prompt, between the whole and single tokens", later[0], later[2]),
        ],
    )


def padding(subject: Subject) -> Finding:
    """Padding after the valid tokens changes no result."""
    piece = subject.piece
    prompt = subject.texts[:, :piece]
    zeros = np.pad(prompt, ((0, 0), (0, 2 * piece)))
    others = np.concatenate([prompt, subject.others[:, : 2 * piece]], 1)
    logits, later = [], []
    for tokens in (prompt, zeros, others):
        found, cache = subject.call(tokens, 0, piece, subject.cache())
        logits.append(found)
        later.append(_continued(subject, cache, piece))
    return compare(
        subject,
        "padding",
        "padding behind the valid tokens to change nothing",
        "let tokens at t >= length neither reach other tokens nor change an array without positions",
        [
            ("with other padding", logits[2], logits[1]),
            ("with padding", logits[1], logits[0]),
            ("after the prompt, with other padding", later[2], later[1]),
            ("after the prompt, with padding", later[1], later[0]),
        ],
    )


def end(subject: Subject) -> Finding:
    """Padding that runs past the end of the cache changes nothing: a longer cache gives the same."""
    piece, positions = subject.piece, subject.positions
    most, length = 3 * piece, piece - 1
    last = subject.texts[:, most:]
    padded = np.pad(last, ((0, 0), (0, 2 * piece)))
    logits, later = [], []
    for size in (positions, most + padded.shape[1]):
        cache = subject.cache(positions=size)
        _, cache = subject.call(subject.texts[:, :most], 0, most, cache)
        found, cache = subject.call(padded, most, length, cache)
        logits.append(found)
        later.append(subject.call(last[:, length:], most + length, 1, cache)[0])
    return compare(
        subject,
        "end",
        f"padding that runs past the last of {positions} positions to change nothing",
        "write no token at t >= length: XLA moves a dynamic_update_slice that passes the end back over "
        "earlier positions, and a scatter needs mode='drop'",
        [("in the call", logits[0], logits[1]), ("in the next call", later[0], later[1])],
    )


def batch(subject: Subject) -> Finding:
    """A row alone gives what it gives beside other rows, at any time that these enter."""
    piece = subject.piece
    widths = (3 * piece, piece, 1, 1)
    lengths = np.array([[3 * piece, 0, 1, 0], [piece, piece, 0, 1], [0, piece, 1, 1]], np.int32)
    starts = np.cumsum(lengths, 1) - lengths
    together = _scheduled(subject, range(ROWS), widths, starts, lengths)
    compared = []
    for row in range(ROWS):
        alone = _scheduled(subject, [row], widths, starts, lengths)
        for call, length in enumerate(lengths[row]):
            if length:
                text = f"in row {row} of {ROWS}, at start {starts[row, call]}"
                compared.append((text, together[call][row], alone[call][0]))
    return compare(
        subject,
        "batch",
        "a row alone to give what it gives beside others",
        "compute no mean, maximum, sum or limit over axis 0, and read `start` and `length` of each row",
        compared,
    )


def idle(subject: Subject) -> Finding:
    """A row of length 0 keeps its cache, bit by bit."""
    piece = subject.piece
    _, cache = subject.call(subject.texts[:, :piece], 0, [piece, 0, 1], subject.cache())
    before = jax.tree_util.tree_leaves_with_path(cache)
    starts = np.array([piece, 0, 1], np.int32)
    for width in (1, piece):
        for start, where in ((starts, "its own start"), (np.zeros_like(starts), "start 0")):
            for length in ([0, 1, 1], [1, 0, 0], [0, 0, 0]):
                _, after = subject.call(subject.others[:, :width], start, length, cache)
                for (path, one), other in zip(before, jax.tree.leaves(after), strict=True):
                    rows = [row for row in range(ROWS) if not length[row]]
                    old, new = (np.asarray(array)[rows] for array in (one, other))
                    if old.tobytes() != new.tobytes():
                        return Finding(
                            "idle",
                            False,
                            None,
                            "expected the cache of a row of length 0 to keep its bits, found a change in "
                            f"cache{jax.tree_util.keystr(path)} at {where}, with T = {width}",
                            "choose per row, as in jnp.where(length[:, None] > 0, new, old)",
                        )
    return Finding("idle", True)


def fresh(subject: Subject) -> Finding | None:
    """A text that starts at 0 ignores what positions hold. None: the cache has no positions."""
    return _ignores_positions(
        subject,
        "fresh",
        0,
        "a text at start 0 to ignore what another text left in the cache",
        "mask positions after each token's own, `start + t`",
    )


def rewind(subject: Subject) -> Finding | None:
    """After wrong drafts a text goes on at an earlier start. None: the cache has no positions."""
    return _ignores_positions(
        subject,
        "rewind",
        2 * subject.piece,
        "a text to go on as if rejected drafts had never been in the cache",
        "take places in the cache from `start`, never from a count of its own, and mask later positions; in "
        "an encoder-decoder, give positions to every array that changes with the text",
    )


def _ignores_positions(
    subject: Subject, name: str, start: int, expected: str, change: str
) -> Finding | None:
    """Compare a text from a start with the same text in a cache that holds wrong tokens after it."""
    piece = subject.piece
    if not any(subject.has_positions):
        return None
    cache = subject.cache()
    if start:
        _, cache = subject.call(subject.texts[:, :start], 0, start, cache)
    width = piece if start else 3 * piece
    drafts = subject.others[:, start : start + width]
    _, drafted = subject.call(drafts, start, width, cache, every=True)
    if not (start and subject.layout.is_rewindable):
        # The engine sets arrays without positions back: they hold the state after `start` tokens.
        leaves, tree = jax.tree.flatten(cache)
        drafted = tree.unflatten(
            new if positions else old
            for old, new, positions in zip(
                leaves, jax.tree.leaves(drafted), subject.has_positions, strict=True
            )
        )
    texts = subject.texts[:, start : start + piece]
    compared = []
    for what, tokens in (("token by token", 1), ("in a piece", piece)):
        right, after = subject.feed(texts, cache, start, tokens)
        found, after_drafts = subject.feed(texts, drafted, start, tokens)
        compared.append((what, found, right))
        at = start + piece
        later, right = (_continued(subject, each, at) for each in (after_drafts, after))
        compared.append((f"after it went on {what}", later, right))
    return compare(subject, name, expected, change, compared)


def context(subject: Subject) -> Finding:
    """A text goes on in a cache of more positions, into which its row was copied, in another row."""
    piece = subject.piece
    short, at = 3 * piece, 2 * piece
    _, cache = subject.call(subject.texts[:, :at], 0, at, subject.cache(positions=short))
    rows = [*range(1, ROWS), 0]
    longer = jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice(new, old[jnp.array(rows)], (0,) * old.ndim),
        cache,
        subject.cache(),
    )
    text = subject.texts[:, at:short]
    right, _ = subject.feed(text, cache, at)
    moved, _ = subject.feed(text[rows], longer, at)
    return compare(
        subject,
        "context",
        f"a text to go on the same in a cache of {4 * piece} positions that its row was copied into, from "
        f"one of {short}",
        "let positions begin at place 0 of their axis, mask the others, and keep nothing that depends on "
        "S or on the number of the row",
        [("after the copy", moved, right[rows])],
    )


def every(subject: Subject) -> Finding:
    """With `every`, the logits at each token are those that a call that ends there returns."""
    piece = subject.piece
    most = 3 * piece
    lengths = [most, piece + 1, 1]
    prompt = subject.texts[:, :most]
    steps, _ = subject.feed(prompt, subject.cache())
    last, after_last = subject.call(prompt, 0, lengths, subject.cache())
    all_tokens, after_all = subject.call(prompt, 0, lengths, subject.cache(), every=True)
    valid = np.arange(most) < np.array(lengths)[:, None]
    at_end = all_tokens[np.arange(ROWS), np.array(lengths) - 1]
    step = subject.texts[:, most : most + 1]
    return compare(
        subject,
        "every",
        "`every` to return, at each token, the logits of a call that ends there",
        "compute the same with and without `every`, and without it take the logits at `length - 1`",
        [
            ("at the last valid token", at_end, last),
            ("at the tokens before", all_tokens[valid], steps[valid]),
            (
                "in the next call",
                subject.call(step, lengths, 1, after_all)[0],
                subject.call(step, lengths, 1, after_last)[0],
            ),
        ],
    )


def _continued(subject: Subject, cache: Cache, start: int) -> Array:
    """Return the logits of the next two tokens of the texts, [B, 2, V], or of one at the end."""
    logits, _ = subject.feed(subject.texts[:, start : start + 2], cache, start)
    return logits


def _scheduled(
    subject: Subject, rows: Any, widths: Any, starts: Array, lengths: Array
) -> list[Array]:
    """Return the logits of calls in which these rows take their own number of tokens, each padded."""
    rows = list(rows)
    cache, found = subject.cache(rows), []
    for call, width in enumerate(widths):
        start, length = starts[rows, call], lengths[rows, call]
        tokens = np.zeros((len(rows), width), np.int32)
        for place, row in enumerate(rows):
            at, count = start[place], length[place]
            tokens[place, :count] = subject.texts[row, at : at + count]
        logits, cache = subject.call(tokens, start, length, cache)
        found.append(logits)
    return found


def encode(subject: Subject) -> Finding | None:
    """Texts depend on the valid places of their own source alone. None: the model takes no sources."""
    if not subject.encodes:
        return None
    sources = subject.sources()
    whole = np.full(ROWS, subject.source_size, np.int32)
    right = _encoded_logits(subject, subject.encode(sources, whole))
    blind = difference(_encoded_logits(subject, subject.encode(subject.sources(1), whole)), right)
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
        alone = _encoded_logits(subject, cache, slice(row, row + 1))
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
    right = _encoded_logits(subject, cache)
    in_larger = subject.encode(np.pad(zeros, pads), lengths)
    return [
        (
            "with other padding of the source",
            _encoded_logits(subject, subject.encode(others, lengths)),
            right,
        ),
        ("with more padding of the source", _encoded_logits(subject, in_larger), right),
        (
            "after the cache was padded",
            _encoded_logits(subject, padded_cache(cache, jax.tree.leaves(in_larger))),
            right,
        ),
    ]


def _encoded_logits(subject: Subject, cache: Cache, rows: slice = slice(None)) -> Array:
    """Return the logits of a text's first piece and of the next token, [B, 2, V]."""
    piece, texts = subject.piece, subject.texts[rows]
    first, cache = subject.call(texts[:, :piece], 0, piece, cache)
    second, _ = subject.call(texts[:, piece : piece + 1], piece, 1, cache)
    return np.stack([first, second], 1)
