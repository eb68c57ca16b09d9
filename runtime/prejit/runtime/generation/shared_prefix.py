"""Prefixes: texts that many prompts begin with, computed once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

from prejit.runtime.generation.kv_cache import KVCache
from prejit.runtime.programs.ready_programs import Programs


@final
class Prefix:
    """A text that many prompts begin with, computed once. Safe to use from many threads.

    Attributes:
        token_ids: the tokens of the text.
        has_nan: whether its cache holds NaN.
    """

    def __init__(self, token_ids: Sequence[int], cache: KVCache, *, has_nan: bool = False) -> None:
        """Keep a cache of one row that nobody else writes to. Use `Bundle.prefix`."""
        self.token_ids = tuple(token_ids)
        self.has_nan = has_nan
        self._programs = cache.programs
        self._caches = {cache.context: cache}
        self._lock = threading.Lock()

    def is_of(self, programs: Programs) -> bool:
        """Return whether these programs computed the prefix; no others can read it."""
        return self._programs is programs

    @property
    def context(self) -> int:
        """The context of the shortest cache that holds the prefix."""
        return min(self._caches)

    @property
    def size_bytes(self) -> int:
        """How much its caches take on the device."""
        with self._lock:
            return sum(cache.size_bytes for cache in self._caches.values())

    def at(self, context: int) -> KVCache:
        """Return its cache with a context of `self.context` or more, in the bundle's smallest batch."""
        with self._lock:
            if context not in self._caches:
                shorter = max(known for known in self._caches if known < context)
                self._caches[context] = self._caches[shorter].grown(context)
            return self._caches[context]
