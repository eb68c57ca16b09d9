"""A conversation that keeps its KV cache between calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Unpack, final

from prejit.runtime.base.threads_and_forks import OneProcess
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.finished_text import Result
from prejit.runtime.generation.generate import Generation, Generator, Piece, run
from prejit.runtime.generation.options import Options, Prompt, Resolved
from prejit.runtime.generation.slots import Slots


@final
class Session(OneProcess):
    """Generations one after another that share a KV cache. Made by `Bundle.session`.

    Each prompt is the whole text. The part at its beginning that is still in the cache is not computed again,
    so continuing a conversation costs only its new tokens. The result is the same as from `Bundle.generate`.

    A session does one generation at a time: until its stream is finished or closed, every other call raises
    UsageError. Threads that share a bundle use one session each.
    """

    def __init__(self, generator: Generator) -> None:
        """Make one slot. Its cache is allocated when it is first needed."""
        self._generator = generator
        self._batch = Slots(generator.decoder, 1)
        self._turn = threading.Lock()
        self._busy = False

    def generate(self, prompt: Prompt | None = None, **options: Unpack[Options]) -> Result:
        """Generate text from one prompt. Arguments and errors as `Bundle.generate`."""
        generation = self._generator.begin(prompt, self._generator.resolve(options))
        for _ in self._run(generation):
            pass
        return generation.result()

    def stream(self, prompt: Prompt | None = None, **options: Unpack[Options]) -> Iterator[Piece]:
        """Generate from one prompt and yield each token as it comes. As `Bundle.stream`."""
        return self._stream(prompt, self._generator.resolve(options))

    def _stream(self, prompt: Prompt | None, resolved: Resolved) -> Iterator[Piece]:
        yield from self._run(self._generator.begin(prompt, resolved))

    def _run(self, generation: Generation) -> Iterator[Piece]:
        mine = False
        try:
            with self._turn:
                if self._busy:
                    raise UsageError(
                        "expected a session that is idle, found one that is generating",
                        hint="finish or close its stream, or make a session for each thread",
                    )
                self._busy = mine = True
            for _, piece in run(self._generator.decoder, [generation], self._batch):
                yield piece
        finally:
            if mine:
                self._busy = False

    def close(self) -> None:
        """Free the memory of the cache. A running generation fails. The session can be used again."""
        self._batch.close()
