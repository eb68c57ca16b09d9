"""Drafts of the next tokens by a smaller model of the same bundle: speculative decoding.

The draft model chooses tokens as the decoder would: with the options, the seed and the positions of the
request, so that sampling draws the same random numbers. The decoder verifies them in one pass
(Leviathan et al. 2023, arXiv 2211.17192), and what it gives never depends on the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, final

import numpy as np

from prejit.runtime.device.transfer import DeviceArray, to_numpy
from prejit.runtime.generation.decoder_programs import DecoderPrograms, common_length
from prejit.runtime.generation.kv_cache import KVCache
from prejit.runtime.generation.options import Namespace, Sampling
from prejit.runtime.generation.rows import Row
from prejit.runtime.generation.sampling_arguments import place_sampling

_MOST_POSITIONS = 256
"""About how many positions of a text it reads before the next decode step, which others may wait for."""
_MOST_STEPS = 2
"""It reads so many tokens one by one, and more in chunks, which have room for many."""


@final
class DraftModel:
    """The draft model of a bundle over one text at a time. Its cache grows as the decoder's."""

    def __init__(
        self, decoder: DecoderPrograms, counts: Callable[[Row, int], np.ndarray[Any, Any]]
    ) -> None:
        """Take its programs, and what counts the tokens of a row. The first draft allocates the cache."""
        self._decoder = decoder
        self._counts = counts
        self._batch = decoder.batches[0]
        self._cache: KVCache | None = None
        self._held: list[int] = []  # the text whose positions the cache has
        self._sure = 0  # how much of it is no guess
        self._sampling: tuple[Sampling, dict[str, DeviceArray]] | None = None
        self._namespace: Namespace = ()
        self._history: DeviceArray = None
        self._asked: set[str] = set()
        self._read = False

    @property
    def size_bytes(self) -> int:
        """How much its cache takes."""
        return 0 if self._cache is None else self._cache.size_bytes

    def take_read(self) -> bool:
        """Return whether it has read more of a text than it guessed, since this was called last."""
        found, self._read = self._read, False
        return found

    def draft(self, row: Row, count: int, context: int) -> list[int]:
        """Return this many tokens that may follow a row's text; none while it still reads that.

        `context` is that of the decoder's cache, which has room for the text and the draft.
        """
        text, last = row.token_ids, len(row.token_ids) - 1
        if row.request.namespace != self._namespace:
            self._held, self._namespace = [], row.request.namespace
        # The text before the last draft needs no loop in Python, as nobody has changed it.
        sure = self._sure if text[: self._sure] == self._held[: self._sure] else 0
        done = min(sure + common_length(self._held[sure:], text[sure:]), last)
        if self._cache is not None:  # longer, if the decoder's was made anew
            context = max(context, self._cache.context)
        read = self._decoder.prefill_for(self._batch, context, last - done)
        if not self._is_loaded(context, read.name if last - done > _MOST_STEPS else None):
            return []
        cache = self._cache
        if cache is None:
            cache = self._cache = KVCache(self._decoder, self._batch, context)
        elif cache.context < context:
            cache = self._cache = cache.grown(context)
        inputs, size = self._inputs(row), read.bucket["prompt"]
        most = done + max(size, _MOST_POSITIONS)
        while last - done > _MOST_STEPS and done < most:
            chunk = text[done : min(last, done + size)]
            tokens = np.zeros((self._batch, size), np.int32)
            tokens[0, : len(chunk)] = chunk
            places = {"tokens": tokens, "start": self._row(done), "length": self._row(len(chunk))}
            cache.run(read, {**inputs, **self._put(places)})
            done += len(chunk)
            self._read = True
        self._held = text[:done]
        if last - done > _MOST_STEPS:
            return []
        for at in range(done, last):
            self._decode(cache, inputs, text[at], at, 1)
        chosen = to_numpy(self._decode(cache, inputs, text[last], last, count))
        drafted: list[int] = chosen.reshape(-1, self._batch)[:count, 0].tolist()
        if min(drafted) < 0:
            self._cache, self._held = None, []  # NaNs would stay in the cache
            return []
        self._held, self._sure = [*text, *drafted[:-1]], len(text)
        return drafted

    def _decode(
        self, cache: KVCache, inputs: dict[str, DeviceArray], token: int, position: int, steps: int
    ) -> DeviceArray:
        """Return the tokens [STEPS, B] that follow one at a position, of which `steps` are computed."""
        program = self._decoder.decode_for(self._batch, cache.context)
        given = {"token": token, "position": position, "live": 1}
        places = {name: self._row(value) for name, value in given.items()}
        places["steps"] = np.array(steps, np.int32)
        results = cache.run(program, {**inputs, "history": self._history, **self._put(places)})
        self._history = results["history"]
        return results["tokens"]

    def _inputs(self, row: Row) -> dict[str, DeviceArray]:
        """Return the sampling arguments of a row; its token counts are in the history."""
        vocab, sampling = self._decoder.decoder.vocab_size, row.request.sampling
        if self._sampling is None or self._sampling[0] is not sampling:
            alone = [sampling, *[Sampling()] * (self._batch - 1)]
            self._sampling = sampling, place_sampling(self._decoder, alone, [0] * self._batch)
        if sampling.needs_history or self._history is None:
            counts = np.zeros((self._batch, vocab), np.int32)
            counts[0] = self._counts(row, vocab)
            self._history = self._decoder.device.put(counts)
        return {**self._sampling[1], "history": self._decoder.zeros(self._batch, np.int32)}

    def _is_loaded(self, context: int, *names: str | None) -> bool:
        """Return whether these programs and those that decode are ready; if not, begin to load them."""
        decoder, cache, batch = self._decoder, self._cache, self._batch
        wanted = [decoder.decode_for(batch, context).name, *filter(None, names)]
        if cache is not None:
            passed = [each for each in decoder.contexts if cache.context <= each <= context]
            for shorter, longer in pairwise(passed):
                wanted += decoder.copying((batch, shorter), (batch, longer))
        ready = decoder.programs.obtained()
        missing = {name for name in wanted if name not in ready}
        if new := missing - self._asked:
            self._asked |= new
            decoder.programs.prepare(*sorted(new))
        return not missing

    def _row(self, value: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return an argument of a batch whose other rows rest."""
        found = np.zeros(self._batch, np.int32)
        found[0] = value
        return found

    def _put(self, places: dict[str, np.ndarray[Any, Any]]) -> dict[str, DeviceArray]:
        return {name: self._decoder.device.put(value) for name, value in places.items()}
