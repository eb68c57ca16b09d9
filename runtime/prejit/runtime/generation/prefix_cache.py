"""Prompts that were computed before, for later prompts that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import Prefix

_FEWEST_TOKENS = 16
"""Prompts with fewer tokens than this are computed again: copying them would not save much."""


@final
class PrefixCache:
    """The prefixes of earlier prompts, within a number of bytes. For one thread.

    If they take more, the prefix that was used the longest time ago goes first.

    Attributes:
        size_bytes: how much the prefixes took when they were last trimmed.
    """

    def __init__(self, decoder: DecoderPrograms, most_bytes: int) -> None:
        """Keep nothing yet.

        Args:
            decoder: the programs.
            most_bytes: how much all prefixes may take together.
        """
        self._decoder = decoder
        self._most_bytes = most_bytes
        self._prefixes: list[Prefix] = []  # the one that was used last comes last
        self.size_bytes = 0

    def find(self, prompt: Sequence[int], context: int) -> Prefix | None:
        """Return the prefix that saves most of a prompt; None: none saves enough.

        Args:
            prompt: the prompt.
            context: of the cache that the prompt enters. A prefix with a longer one cannot be copied there.
        """
        saved, best = 0, None
        for prefix in self._prefixes:
            if prefix.context > context:
                continue
            if (tokens := self._decoder.reusable(prefix.token_ids, prompt)) > saved:
                saved, best = tokens, prefix
        if best is None or saved < _FEWEST_TOKENS:
            return None
        self._prefixes.remove(best)
        self._prefixes.append(best)
        return best

    def keep(self, prefix: Prefix) -> None:
        """Keep a prefix, unless it is short, larger than all may be, or the beginning of a kept one."""
        tokens = prefix.token_ids
        # What an encoder-decoder holds belongs to one source.
        if len(tokens) < _FEWEST_TOKENS or self._decoder.source is not None:
            return
        if self._decoder.is_rewindable:
            if any(known.token_ids[: len(tokens)] == tokens for known in self._prefixes):
                return
            self._prefixes = [
                known
                for known in self._prefixes
                if tokens[: len(known.token_ids)] != known.token_ids
            ]
        self._prefixes.append(prefix)
        self.trim()

    def trim(self) -> None:
        """Drop prefixes until the rest takes no more than it may: prefixes grow when they serve."""
        # Counted here, once for each prompt: an engine reads the size with each step, and may keep thousands.
        sizes = [prefix.size_bytes for prefix in self._prefixes]
        self.size_bytes, dropped = sum(sizes), 0
        while self.size_bytes > self._most_bytes:
            self.size_bytes -= sizes[dropped]
            dropped += 1
        del self._prefixes[:dropped]

    def clear(self) -> None:
        """Drop all prefixes."""
        self._prefixes = []
        self.size_bytes = 0
