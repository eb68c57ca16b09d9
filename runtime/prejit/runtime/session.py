"""A conversation that keeps its KV cache between calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack, final

from prejit.runtime.errors import UsageError
from prejit.runtime.generation.generate import Generation, Piece, Result, run
from prejit.runtime.generation.request import Wanted
from prejit.runtime.options import Options, Prompt

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle


@final
class Session:
    """Generations one after another that share a KV cache. From `Bundle.session`.

    Each prompt is the whole text. What of its beginning is still in the cache is not computed again, so
    that a conversation that goes on costs its new tokens alone; the result is that of `Bundle.generate`.

    A session does one generation at a time: until a stream of it is finished or closed, all others raise
    UsageError. Threads that share a bundle have a session each.
    """

    def __init__(self, bundle: Bundle) -> None:
        """Makes an empty cache when it is first needed."""
        self._bundle = bundle
        self._batch = bundle.batch(1)
        self._turn = threading.Lock()
        self._busy = False

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """As `Bundle.generate`."""
        generation = self._bundle._generation(prompt, self._bundle._resolve(options))
        for _ in self._run(generation):
            pass
        return generation.result()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Piece]:
        """As `Bundle.stream`."""
        return self._stream(prompt, self._bundle._resolve(options))

    def _stream(self, prompt: Prompt, wanted: Wanted) -> Iterator[Piece]:
        yield from self._run(self._bundle._generation(prompt, wanted))

    def _run(self, generation: Generation) -> Iterator[Piece]:
        mine = False
        try:
            with self._turn:
                if self._busy:
                    raise UsageError(
                        "expected a session that does nothing, found one that is generating",
                        hint="finish or close its stream, or make a session for each thread",
                    )
                self._busy = mine = True
            for _, piece in run(self._bundle.decoder, [generation], self._batch):
                yield piece
        finally:
            if mine:
                self._busy = False

    def close(self) -> None:
        """Frees the memory of the cache; what is generating fails. The session can be used again."""
        self._batch.close()
