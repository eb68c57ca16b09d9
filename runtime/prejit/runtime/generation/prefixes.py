"""Prompts that were computed before, for later prompts that begin with the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from prejit.runtime.device.transfer import DeviceArray, aligned_zeros, dtype_of, to_numpy
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.checks.program_interfaces import sized
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import KVCache, cache_bytes
from prejit.runtime.generation.options import Namespace
from prejit.runtime.generation.rows import CachedText
from prejit.runtime.generation.shared_prefix import Prefix

_FEWEST_TOKENS = 16
"""Prompts with fewer tokens than this are computed again: copying them would not save much."""
_MOST_PREFIXES = 256
"""How many prefixes are kept. A prompt is compared with each of them, which takes about 4 microseconds."""


class _Kept(NamedTuple):
    """A prefix, its tokens as an array, int32, and whose it is."""

    prefix: Prefix | CompactPrefix
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    namespace: Namespace


@final
class PrefixCache:
    """The prefixes of earlier prompts, within a number of bytes. For one thread.

    A prompt finds the prefixes of its namespace only. The memory is one for all.

    If they take more, the prefix that was used the longest time ago goes first. On a CPU a prefix takes the
    memory of its own tokens, elsewhere that of a whole cache with one row.

    Attributes:
        most_bytes: how much they may take.
        size_bytes: how much the prefixes took when they were last trimmed.
    """

    def __init__(self, decoder: DecoderPrograms, most_bytes: int) -> None:
        """Keep nothing yet, and never more than this."""
        self._decoder = decoder
        self._is_compact = can_compact(decoder)
        self.most_bytes = most_bytes
        self._prefixes: list[_Kept] = []  # the one that was used last comes last
        self.size_bytes = 0

    def find(
        self, prompt: Sequence[int], context: int, namespace: Namespace
    ) -> Prefix | CompactPrefix | None:
        """Return the prefix that saves most of a prompt; None: none saves enough.

        Args:
            prompt: the prompt.
            context: of the cache that the prompt enters. A whole cache with a longer one cannot be copied
                there.
            namespace: whose prompt it is.
        """
        given = np.asarray(prompt, np.int32)
        saved, best = 0, None
        for kept in self._prefixes:
            if kept.namespace != namespace:
                continue
            if isinstance(kept.prefix, Prefix) and kept.prefix.context > context:
                continue
            both = min(len(given), len(kept.tokens))
            different = given[:both] != kept.tokens[:both]
            common = int(different.argmax()) if different.any() else both
            tokens = self._decoder.reusable_of(common, len(kept.tokens), len(given))
            if tokens > saved:
                saved, best = tokens, kept
        if best is None or saved < _FEWEST_TOKENS:
            return None
        self._prefixes = [kept for kept in self._prefixes if kept is not best]
        self._prefixes.append(best)
        return best.prefix

    def keep(self, prefix: Prefix, namespace: Namespace) -> None:
        """Keep a prefix, unless it is short, larger than all may be, NaN, or the beginning of a kept one."""
        if prefix.has_nan:  # a later prompt may share less of it than the token that made it NaN
            return
        if self._is_compact:
            self.keep_row(CachedText(prefix.token_ids, namespace), prefix.at(prefix.context), 0)
        elif self._saves(prefix.token_ids, namespace) and prefix.size_bytes <= self.most_bytes:
            self._add(prefix, namespace)

    def keep_aside(self, cache: KVCache, texts: Mapping[int, CachedText]) -> None:
        """Keep what a cache holds that nobody else writes to; of a whole cache, the text of its first row.

        On a CPU a text that can go back is copied out of its slot when another prompt needs it, or the slot.
        """
        if not self._is_compact:
            if 0 in texts and cache.batch == self._decoder.batches[0]:
                self.keep(Prefix(texts[0].token_ids, cache), texts[0].namespace)
        elif not self._decoder.is_rewindable:
            for row, text in texts.items():
                self.keep_row(text, cache, row)

    def keep_row(self, text: CachedText, cache: KVCache, row: int) -> None:
        """Keep a copy of a row of a cache, unless `keep` would not, or no program for the copy is ready.

        Args:
            text: what to keep of the row, from its beginning.
            cache: the cache; it does not change.
            row: its row.
        """
        token_ids, namespace = text
        decoder, smallest = self._decoder, (self._decoder.batches[0], cache.context)
        if not self._saves(token_ids, namespace):
            return
        if self._is_compact:
            if (size := cache_bytes(decoder.cache, 1, len(token_ids))) <= self.most_bytes:
                self._drop(self.most_bytes - size)  # before there is another one
                self._add(CompactPrefix(decoder, token_ids, cache, row), namespace)
            return
        is_large = cache_bytes(decoder.cache, *smallest) > self.most_bytes
        if is_large or not decoder.can_copy(cache.bucket, smallest):
            return
        name = decoder.copy_for(cache.bucket, smallest).name
        if not decoder.programs.ready(name):
            decoder.programs.prepare_later(name)
            return
        alone = KVCache(decoder, *smallest)
        alone.copy_rows(cache, {0: row})
        self._add(Prefix(token_ids, alone), namespace)

    def _add(self, prefix: Prefix | CompactPrefix, namespace: Namespace) -> None:
        tokens = prefix.token_ids
        if self._decoder.is_rewindable:
            self._prefixes = [
                one
                for one in self._prefixes
                if one.namespace != namespace or tokens[: len(one.tokens)] != one.prefix.token_ids
            ]
        self._prefixes.append(_Kept(prefix, np.asarray(tokens, np.int32), namespace))
        self.trim()

    def _saves(self, token_ids: Sequence[int], namespace: Namespace) -> bool:
        """Return whether a prefix of these tokens would save something that the kept ones do not."""
        # What an encoder-decoder holds belongs to one source.
        decoder = self._decoder
        if len(token_ids) < _FEWEST_TOKENS or decoder.source is not None:
            return False
        tokens, length = tuple(token_ids), len(token_ids)
        kept = [one.prefix.token_ids for one in self._prefixes if one.namespace == namespace]
        if not self._decoder.is_rewindable:
            return tokens not in kept
        return all(one[:length] != tokens for one in kept)

    def trim(self) -> None:
        """Drop prefixes until the rest takes no more than it may: whole caches grow when they serve."""
        self._drop(self.most_bytes)

    def _drop(self, most_bytes: int) -> None:
        # Counted here, once for each prompt: an engine reads the size with each step, and may keep thousands.
        sizes = [kept.prefix.size_bytes for kept in self._prefixes]
        self.size_bytes, dropped = sum(sizes), 0
        while self.size_bytes > most_bytes or len(sizes) - dropped > _MOST_PREFIXES:
            self.size_bytes -= sizes[dropped]
            dropped += 1
        del self._prefixes[:dropped]

    def clear(self) -> None:
        """Drop all prefixes."""
        self._prefixes = []
        self.size_bytes = 0


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
        """Copy the beginning of a row, of a cache on a CPU without a mesh."""
        self.token_ids = tuple(token_ids)
        self.size_bytes = cache_bytes(decoder.cache, 1, len(token_ids))
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


def _beginning(array: Array, values: np.ndarray[Any, Any], positions: int) -> np.ndarray[Any, Any]:
    """Return the first positions of an array of a cache; a state has none and is returned whole."""
    if "context" not in array.variables:
        return values
    axis = array.variables.index("context")
    return values[(slice(None),) * axis + (slice(positions),)]
