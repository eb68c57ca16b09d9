"""The KV cache of a batch of rows on the device, and the copies that let it grow and share."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from prejit.runtime.device.dtypes import dtype_of
from prejit.runtime.device.executable import DeviceArray

if TYPE_CHECKING:
    from prejit.runtime.generation.decoder_programs import DecoderPrograms
    from prejit.runtime.programs.programs import Programs

_LARGE_BYTES = 256 << 20
"""A cache beyond this waits until its decode program is loaded, which is wanted soon after it."""


@final
class KVCache:
    """Keys and values of a batch of rows: 2 L arrays [B, K, S, H].

    Attributes:
        batch, context: B and S, one of the bundle's buckets.
        arrays: keys and values of each layer in turn. A program that takes them donated gives new ones.
    """

    def __init__(self, decoder: DecoderPrograms, batch: int, context: int) -> None:
        """Makes an empty cache."""
        self._decoder = decoder
        self.batch = batch
        self.context = context
        shape = decoder.decoder
        size = (batch, shape.num_kv_heads, context, shape.head_size)
        item_bytes = dtype_of(shape.cache_dtype).itemsize
        if 2 * shape.num_layers * math.prod(size) * item_bytes > _LARGE_BYTES:
            # So the program says how large a cache is, and not the table alone, which anybody can write.
            decoder.programs[decoder.decode_for(batch, context).name]
        sharding = decoder.cache_sharding(batch, context)
        self.arrays: list[DeviceArray] = [
            decoder.device.zeros(size, dtype_of(shape.cache_dtype), sharding)
            for _ in range(2 * shape.num_layers)
        ]

    @property
    def programs(self) -> Programs:
        """Of the bundle that it belongs to."""
        return self._decoder.programs

    def copy_rows(self, source: KVCache, rows: Mapping[int, int]) -> None:
        """Overwrites rows with those of another cache, whose context is at most as long.

        Args:
            source: of the bundle's smallest batch or of this batch; it stays as it is.
            rows: by the row here, the row there.
        """
        decoder = self._decoder
        wanted = np.full(self.batch, -1, np.int32)
        wanted[list(rows)] = list(rows.values())
        place = decoder.device.put(wanted)
        name = decoder.copy_for(source.batch, source.context, self.batch, self.context).name
        copy = decoder.programs[name].run
        for layer, array in enumerate(source.arrays):
            self.arrays[layer] = copy([array, self.arrays[layer], place])[0]

    def grown(self, context: int) -> KVCache:
        """A cache with a longer context, and the same rows at the beginning of it."""
        cache = self
        for longer in self._decoder.contexts:
            if cache.context < longer <= context:
                next_cache = KVCache(self._decoder, self.batch, longer)
                next_cache.copy_rows(cache, {row: row for row in range(self.batch)})
                cache = next_cache
        return cache


@final
class Prefix:
    """Tokens that many prompts begin with, computed once. Safe for many threads.

    Attributes:
        token_ids: the tokens.
    """

    def __init__(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Keeps a cache of one row that nobody else writes to. Use `Bundle.prefix`."""
        self.token_ids = tuple(token_ids)
        self._programs = cache.programs
        self._caches = {cache.context: cache}
        self._lock = threading.Lock()

    def is_of(self, programs: Programs) -> bool:
        """Whether a bundle's programs can read it: those that wrote it."""
        return self._programs is programs

    @property
    def context(self) -> int:
        """Positions of the shortest cache that holds it."""
        return min(self._caches)

    def at(self, context: int) -> KVCache:
        """Its cache with this context, at least `self.context`; its rows are of the smallest batch."""
        with self._lock:
            if context not in self._caches:
                shorter = max(known for known in self._caches if known < context)
                self._caches[context] = self._caches[shorter].grown(context)
            return self._caches[context]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
