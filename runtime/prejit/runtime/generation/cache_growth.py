"""The cache that rows move to next: of a longer context, or of another batch. It is allocated in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import Allocation, KVCache, piece_count

_TOKENS_PER_PIECE = 4
"""The longer cache is allocated, a piece with each step, once the longest text has room for no more than this
many tokens for each piece."""


@final
class Growth:
    """The next cache of a batch."""

    def __init__(self, decoder: DecoderPrograms) -> None:
        """Allocate nothing yet."""
        self._decoder = decoder
        self._prepared = 0  # the context whose successor's programs are being made ready
        self._allocation: Allocation | None = None

    @property
    def size_bytes(self) -> int:
        """How much is allocated so far."""
        return 0 if self._allocation is None else self._allocation.size_bytes

    def drop(self) -> None:
        """Free what is allocated."""
        self._allocation = None

    def allocate(self, batch: int, context: int) -> bool:
        """Allocate a piece of the next cache; return whether it is complete."""
        if self._allocation is None or self._allocation.bucket != (batch, context):
            self._allocation = None  # its memory goes first
            self._allocation = Allocation(self._decoder, batch, context)
        return self._allocation.advance()

    def moved(
        self,
        old: KVCache,
        rows: Mapping[int, int],
        bucket: tuple[int, int] | None = None,
        counts: Mapping[int, int] | None = None,
    ) -> KVCache:
        """Return a cache whose rows are rows of an old one, in a bucket or else the next longer context.

        `allocate` may have allocated a part of it before. Rows and counts are those of `KVCache.copy_rows`.
        """
        batch, context = bucket or self.longer(old)
        while not self.allocate(batch, context):
            pass
        assert self._allocation is not None
        made, self._allocation = self._allocation, None
        cache = KVCache(self._decoder, batch, context, made.arrays())
        cache.copy_rows(old, rows, counts)
        return cache

    def longer(self, cache: KVCache) -> tuple[int, int]:
        """Return the bucket of the next longer cache."""
        return cache.batch, self._decoder.context_after(cache.context)

    def prepare(
        self, cache: KVCache, longest: int, ends: Iterable[int | None], is_idle: bool
    ) -> None:
        """Load the programs of the next context when half of this one is full; allocate it near the end.

        `ends` says how long the text of each request may become; None: only the context limits it.
        """
        context, longer = cache.context, self.longer(cache)
        begun = self._allocation is not None and self._allocation.bucket == longer
        if max(context + 1 if end is None else end for end in ends) <= context:
            if begun and is_idle:
                self._allocation = None  # the request that needed it is gone
            return
        if 2 * longest > context and self._prepared != context:
            self._prepared = context
            decoder = self._decoder
            copies = decoder.copying(cache.bucket, longer)
            decoder.programs.prepare(*copies, decoder.decode_for(*longer).name)
        is_near = context - longest < _TOKENS_PER_PIECE * piece_count(self._decoder, *longer)
        if is_near and (begun or self._allocation is None):  # a move to another batch comes first
            self.allocate(*longer)
