"""The token mask of one request: which tokens continue a text of the grammar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from prejit.runtime.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    Allowed = np.ndarray[Any, np.dtype[np.bool_]]

_MASKS_SECONDS = 0.25
"""CPU time that the masks of one text may take, beside that for each token."""
_MASK_SECONDS = 1e-3
"""CPU time that a mask may take on average. Those of JSON take a tenth of it."""


class _FullError(UsageError):
    """The lexer has as many states as it may have. Texts and masks of the same grammar have added to them."""


@final
class GrammarMask:
    """A token mask that keeps a text in a grammar, for the option `token_mask`.

    A stop token is allowed where the text may end, and nowhere else, even if it has a text of its own. A text
    that must end has no other token; a request without stop tokens then ends with the reason `mask`.

    Each request needs its own mask: one that several requests share gives the right tokens, but reads each
    text from its beginning at every token. Safe to use from many threads.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        stop_token_ids: Collection[int],
        *,
        is_limited: bool = False,
        renewed: Callable[[LLMatcher], LLMatcher] | None = None,
    ) -> None:
        """Begin a text. `Grammars` makes masks.

        Args:
            matcher: at the beginning of a text. Its vocabulary has one token more, which ends a text.
            vocab_size: number of logits of the model.
            stop_token_ids: with which a text may end.
            is_limited: whether masks that take long end the request: others share the engine's thread.
            renewed: returns a matcher like the one given, whose lexer is full; masks of a grammar share one.
        """
        self._fresh = matcher
        self._is_limited = is_limited
        self._renewed = renewed
        self._seconds = 0.0
        self._matcher = matcher.deep_copy()
        self._vocab_size = vocab_size
        self._stop = [token_id for token_id in stop_token_ids if token_id < vocab_size]
        self._read: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, token_ids: Sequence[int]) -> Allowed:
        """Return which tokens may come after these, bool [V].

        Raises:
            UsageError: these tokens are no beginning of a text of the grammar, or the text became too
                ambiguous for the parser.
        """
        with self._lock:
            started, before = time.thread_time(), self._fresh
            try:
                bits = self._bits(token_ids)
            except _FullError:
                if self._fresh is before:
                    raise
                bits = self._bits(token_ids)
            if self._is_limited:
                self._spend(time.thread_time() - started, len(token_ids))
            allowed = np.unpackbits(bits, count=self._vocab_size + 1, bitorder="little").view(
                np.bool_
            )
            allowed[self._stop] = allowed[-1]  # the last one stands for the end of the text
            return allowed[:-1]

    def again(self) -> GrammarMask:
        """Return a new mask of the same grammar, for another request."""
        return GrammarMask(
            self._fresh,
            self._vocab_size,
            self._stop,
            is_limited=self._is_limited,
            renewed=self._renewed,
        )

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens are a whole text of the grammar; a stop token may be the last."""
        whole = token_ids[:-1] if token_ids and token_ids[-1] in self._stop else token_ids
        with self._lock:
            try:
                self._follow(whole)
            except UsageError:
                return False
            return self._matcher.is_accepting()

    def _spend(self, seconds: float, count: int) -> None:
        """Count the CPU time of a mask."""
        self._seconds += seconds
        if self._seconds > _MASKS_SECONDS + count * _MASK_SECONDS:
            raise UsageError(
                f"grammar: expected masks that take at most {_MASK_SECONDS * 1e3:g} ms a token, found "
                f"{self._seconds:.2f} seconds for {count} tokens",
                hint="send a simpler grammar: one with less repetition and fewer alternatives",
            )

    def _bits(self, token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        self._follow(token_ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return bits

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Let the matcher read the tokens that it has not read, and forget those that are others now."""
        read = self._read
        if list(token_ids[: len(read)]) != read:
            self._begin_again()
        for token_id in token_ids[len(read) :]:
            if not self._matcher.consume_token(token_id):
                self._check()
            read.append(token_id)

    def _check(self) -> None:
        """Raise the matcher's error, if it has one. A matcher never leaves its error, so take another."""
        if not self._matcher.is_error():
            return
        error, count = self._matcher.get_error().partition("\n")[0], len(self._read)
        is_full = "too many states" in error
        if is_full and self._renewed is not None:
            self._fresh = self._renewed(self._fresh)
        self._begin_again()
        if "too many" in error or "max is" in error:
            raise (_FullError if is_full else UsageError)(
                f"grammar: expected a smaller one, found after {count} tokens: {error}",
                hint="allow fewer alternatives, and texts that are shorter or of any length",
            )
        raise UsageError(
            f"grammar: expected one that allows more after {count} tokens, found: {error}",
            hint="a schema that refers only to itself has no end; a mask is for one request, from its first "
            "token on",
        )

    def _begin_again(self) -> None:
        self._matcher = self._fresh.deep_copy()
        self._read.clear()
