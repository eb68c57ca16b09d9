"""The cache of a batch on the device, the copies that let it grow, and prefixes that prompts share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from prejit.runtime.device.transfer import DeviceArray, dtype_of
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import Decoder, ProgramEntry
from prejit.runtime.format.checks.program_interfaces import sized
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.programs.ready_programs import Programs

_LARGE_BYTES = 256 << 20
"""If a cache takes more than this many bytes, with the biases and histories of its rows, it is allocated only
after its decode program is loaded."""
_PIECE_BYTES = 64 << 20
"""How much of a cache is allocated between two decode steps. The first write to fresh memory makes its pages:
64 MiB take 40 ms on a CPU, about as long as a step of a model with such a cache."""


@final
class KVCache:
    """What a decoder keeps of a batch of texts: keys and values of each layer, or what a model has instead.

    Attributes:
        batch, context: B and S. `bucket` is both, one of the bundle's.
        size_bytes: how much its arrays take on the device.
        arrays: the arrays that the program table lists. Programs take them donated and return new ones.
    """

    def __init__(
        self,
        decoder: DecoderPrograms,
        batch: int,
        context: int,
        arrays: list[DeviceArray] | None = None,
    ) -> None:
        """Take the arrays of a cache; None: allocate an empty one."""
        self._decoder = decoder
        self.batch, self.context = self.bucket = batch, context
        self.size_bytes = cache_bytes(decoder.cache, batch, context)
        self.arrays: list[DeviceArray] = (
            Allocation(decoder, batch, context).arrays() if arrays is None else arrays
        )

    @property
    def programs(self) -> Programs:
        """The programs of the bundle that this cache belongs to."""
        return self._decoder.programs

    def run(
        self, program: ProgramEntry, inputs: Mapping[str, DeviceArray]
    ) -> dict[str, DeviceArray]:
        """Run prefill, decode or verify over this cache. Inputs and results are by name."""
        results, self.arrays = self._decoder.run(program, inputs, self.arrays)
        return results

    def copy_rows(
        self, source: KVCache, rows: Mapping[int, int], counts: Mapping[int, int] | None = None
    ) -> None:
        """Overwrite rows with rows of another cache whose context is at most as long.

        Args:
            source: a cache of this batch or of the bundle's smallest batch, or of any if the host copies; it
                does not change.
            rows: for each row of this cache to overwrite, the row of the source.
            counts: for each of them, how many positions matter; None: all.
        """
        decoder = self._decoder
        if decoder.copies_rows:
            from prejit.runtime.generation import host_caches

            host_caches.copy_rows(decoder.cache, source.arrays, self.arrays, rows, counts)
            return
        name = decoder.copy_for(source.bucket, self.bucket).name
        place = np.full(self.batch, -1, np.int32)
        place[list(rows)] = list(rows.values())
        placed = decoder.device.put(place)
        self.arrays = decoder.programs[name].run([*source.arrays, placed, *self.arrays])

    def grown(self, context: int) -> KVCache:
        """Return a cache with a longer context that begins with the same rows."""
        cache = self
        for longer in self._decoder.contexts:
            if cache.context < longer <= context:
                next_cache = KVCache(self._decoder, self.batch, longer)
                next_cache.copy_rows(cache, {row: row for row in range(self.batch)})
                cache = next_cache
        return cache


@final
class Allocation:
    """An empty cache that is allocated in pieces, so that no step of a batch waits for the whole of it.

    Attributes:
        bucket: its batch and context.
        size_bytes: how much it takes so far.
    """

    def __init__(self, decoder: DecoderPrograms, batch: int, context: int) -> None:
        """Allocate nothing yet."""
        self.bucket = (batch, context)
        self.size_bytes = 0
        self._decoder = decoder
        sizes = {"batch": batch, "context": context}
        self._left = deque(sized(array, sizes) for array in decoder.cache)
        self._arrays: list[DeviceArray] = []
        if sum(map(_bytes, self._left)) + beside_bytes(decoder.decoder, batch) > _LARGE_BYTES:
            # Loading compares the program with the table. The table alone could ask for any amount of memory.
            decoder.programs[decoder.decode_for(batch, context).name]
        self._sharding = decoder.cache_sharding(batch, context)

    def advance(self) -> bool:
        """Allocate the next piece, at least one array; return whether all are there."""
        enough = self.size_bytes + _PIECE_BYTES
        while self._left and self.size_bytes < enough:
            array = self._left.popleft()
            zeros = self._decoder.device.zeros(array.shape, dtype_of(array.dtype), self._sharding)
            self._arrays.append(zeros)
            self.size_bytes += _bytes(array)
        return not self._left

    def arrays(self) -> list[DeviceArray]:
        """Allocate what is left, and return all arrays. Call it once: programs take them donated."""
        while not self.advance():
            pass
        return self._arrays


def cache_bytes(cache: Sequence[Array], batch: int, context: int) -> int:
    """Return how much a cache of a bucket takes on the device."""
    sizes = {"batch": batch, "context": context}
    return sum(_bytes(sized(array, sizes)) for array in cache)


def piece_count(decoder: DecoderPrograms, batch: int, context: int) -> int:
    """Return in about how many pieces a cache is allocated; 0 if it is small."""
    return cache_bytes(decoder.cache, batch, context) // _PIECE_BYTES


def beside_bytes(decoder: Decoder, batch: int) -> int:
    """Return how much comes with a cache: bias and history, each [B, V] of 4 bytes."""
    return 2 * 4 * batch * decoder.vocab_size


def _bytes(array: Array) -> int:
    return math.prod(array.shape) * dtype_of(array.dtype).itemsize
