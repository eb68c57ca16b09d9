"""Sentences as token ids: checked, and shortened where they are too long."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from prejit.runtime.errors import ContextError, TruncationWarning, UsageError

if TYPE_CHECKING:
    from prejit.runtime.text.tokenizer import Tokenizer

OnTooLong = Literal["truncate", "error"]


def shortened(
    sentences: list[list[int]],
    limit: int,
    tokenizer: Callable[[], Tokenizer | None],
    on_too_long: OnTooLong,
    why: str,
) -> int:
    """Shortens in place those that are too long, so that they end as they would have: with a [SEP], say.

    Args:
        sentences: token ids.
        limit: in tokens.
        tokenizer: gives what tells how sentences end; None: with nothing of its own.
        on_too_long: `truncate`, with one warning for all, or `error`.
        why: what sets the limit, for errors and the warning.

    Returns:
        How many were too long.

    Raises:
        ContextError: one is too long, and on_too_long is `error`.
    """
    too_long = [place for place, ids in enumerate(sentences) if len(ids) > limit]
    if not too_long:
        return 0
    first = too_long[0]
    what = (
        f"{len(too_long)} of {len(sentences)} sentences are longer than {limit} tokens, {why}; the first "
        f"is number {first} with {len(sentences[first])}"
    )
    if on_too_long == "error":
        raise ContextError(f"expected sentences of at most {limit} tokens: {what}")
    end = _ending(tokenizer())
    for place in too_long:
        ids = sentences[place]
        kept = end if end and len(end) < limit and ids[-len(end) :] == end else []
        sentences[place] = [*ids[: limit - len(kept)], *kept]
    warnings.warn(f"{what}: they are cut off there", TruncationWarning, stacklevel=4)
    return len(too_long)


def _ending(tokenizer: Tokenizer | None) -> list[int]:
    """The special tokens that a tokenizer puts behind a sentence."""
    if tokenizer is None:
        return []
    whole, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    for first in range(len(whole) - len(bare) + 1):
        if bare and whole[first : first + len(bare)] == bare:
            return whole[first + len(bare) :]
    return []


def check_ids(sentences: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Checks that all tokens exist and no sentence is without one.

    Raises:
        UsageError: one is not.
    """
    for place, ids in enumerate(sentences):
        if not ids:
            raise UsageError(f"expected at least one token in sentence {place}, found none")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            found = min(ids) if min(ids) < 0 else max(ids)
            raise UsageError(
                f"expected tokens of 0 to {vocab_size - 1} in sentence {place}, found {found}"
            )
