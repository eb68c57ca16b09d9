"""A row of a cache on a CPU, kept in the memory of its own positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from prejit.runtime.device.transfer import DeviceArray, aligned_zeros, dtype_of, to_numpy
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.checks.program_signatures import sized
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import KVCache


@final
class CompactPrefix:
    """A text that later prompts may begin with: what a cache holds of its positions, and no others.

    A cache has room for a whole context, and a prompt fills a part of it. Places behind the text count for
    nothing (docs/bundle-format.md), so they need not be kept. Only a CPU can cut and fill arrays without a
    program for each length.

    Attributes:
        token_ids: the tokens of the text.
        size_bytes: how much it takes.
    """

    def __init__(
        self, decoder: DecoderPrograms, token_ids: Sequence[int], cache: KVCache, row: int
    ) -> None:
        """Copy the text of a row.

        Args:
            decoder: the programs, for a CPU without a mesh.
            token_ids: the tokens of the row to keep, from its beginning.
            cache: the cache; it does not change.
            row: its row.
        """
        self.token_ids = tuple(token_ids)
        self.size_bytes = compact_bytes(decoder, len(token_ids))
        self._decoder = decoder
        # One piece of memory: hundreds of small ones would stay in the heap when they are freed.
        self._memory = np.empty(self.size_bytes, np.uint8)
        for (array, kept), source in zip(self._arrays(), cache.arrays, strict=True):
            kept[...] = _beginning(array, to_numpy(source)[row : row + 1], len(token_ids))

    def at(self, context: int) -> KVCache:
        """Return a cache of the bundle's smallest batch whose first row begins with the text.

        Args:
            context: of the cache. A text that is longer is cut.
        """
        decoder, batch = self._decoder, self._decoder.batches[0]
        arrays: list[DeviceArray] = []
        for array, kept in self._arrays():
            whole = sized(array, {"batch": batch, "context": context})
            values = aligned_zeros(whole.shape, dtype_of(whole.dtype))
            text = _beginning(array, kept, context)
            _beginning(array, values[:1], len(self.token_ids))[...] = text
            arrays.append(decoder.device.put(values))
        return KVCache(decoder, batch, context, arrays)

    def _arrays(self) -> Iterator[tuple[Array, np.ndarray[Any, Any]]]:
        """Yield each array of the cache, and what is kept of it."""
        start = 0
        for array in self._decoder.cache:
            kept = sized(array, {"batch": 1, "context": len(self.token_ids)})
            dtype = dtype_of(kept.dtype)
            end = start + math.prod(kept.shape) * dtype.itemsize
            yield array, self._memory[start:end].view(dtype).reshape(kept.shape)
            start = end


def can_compact(decoder: DecoderPrograms) -> bool:
    """Return whether the caches of a decoder are on one CPU device, where the host reads and makes them."""
    return decoder.device.platform == "cpu" and decoder.device.mesh is None


def compact_bytes(decoder: DecoderPrograms, tokens: int) -> int:
    """Return how much a text takes."""
    sizes = {"batch": 1, "context": tokens}
    return sum(
        math.prod(sized(array, sizes).shape) * dtype_of(array.dtype).itemsize
        for array in decoder.cache
    )


def _beginning(array: Array, values: np.ndarray[Any, Any], positions: int) -> np.ndarray[Any, Any]:
    """Return the first positions of an array of a cache; a state has none and is returned whole."""
    if "context" not in array.variables:
        return values
    axis = array.variables.index("context")
    return values[(slice(None),) * axis + (slice(positions),)]
