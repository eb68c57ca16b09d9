"""Engines and streams that show what they give to the request that called them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, final

from prejit.server.engine.fair_queue import NO_LIMITS, Limits

if TYPE_CHECKING:
    from prejit.runtime.generation.finished_text import Result
    from prejit.runtime.generation.generate import Piece
    from prejit.server.engine.engine import Engine

Watch = Callable[[Any], object]
"""Takes what a call gives: a `Result`, an `Encoded`, what a program returned, or each `Piece` of a stream."""


class WatchedEngine(ABC):
    """An engine around another one, which has all methods that are not here."""

    def __init__(self, name: str, engine: Engine) -> None:
        """Wrap the engine of the bundle that is served under this name."""
        self._name = name
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @abstractmethod
    def _watch(self, kind: str, program: str, options: dict[str, Any]) -> Watch | None:
        """Return what takes the results of a call; None: nothing does.

        Args:
            kind: `generate`, `encode` or `call`.
            program: that `call` runs.
            options: of a generation, which may be changed.
        """

    def submit(self, prompt: Any = None, **options: Any) -> Future[Result]:
        """Submit a request, as `Engine.submit`."""
        watch = self._watch("generate", "", options)
        return _watched(self._engine.submit(prompt, **options), watch)

    def stream(self, prompt: Any = None, **options: Any) -> Any:
        """Stream, as `Engine.stream`."""
        watch = self._watch("generate", "", options)
        stream = self._engine.stream(prompt, **options)
        return stream if watch is None else WatchedStream(stream, watch)

    def submit_encode(self, sentences: Any, **options: Any) -> Future[Any]:
        """Encode, as `Engine.submit_encode`."""
        watch = self._watch("encode", "", {})
        return _watched(self._engine.submit_encode(sentences, **options), watch)

    def submit_client_call(
        self, client: str, limits: Limits, name: str, /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Run a program, as `Engine.submit_client_call`."""
        watch = self._watch("call", name, {})
        return _watched(
            self._engine.submit_client_call(client, limits, name, *args, **kwargs), watch
        )

    def generate(self, prompt: Any = None, **options: Any) -> Any:
        """Generate, as `Engine.generate`."""
        return self.submit(prompt, **options).result()

    def encode(self, sentences: Any, **options: Any) -> Any:
        """Encode, as `Engine.encode`."""
        return self.submit_encode(sentences, **options).result()

    def submit_call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a program, as `Engine.submit_call`."""
        return self.submit_client_call("", NO_LIMITS, name, *args, **kwargs)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a program, as `Engine.call`."""
        return self.submit_call(name, *args, **kwargs).result()


def _watched(future: Future[Any], watch: Watch | None) -> Future[Any]:
    def ended(done: Future[Any]) -> None:
        if watch is not None and not done.cancelled() and done.exception() is None:
            watch(done.result())

    future.add_done_callback(ended)
    return future


@final
class WatchedStream:
    """A stream that passes each piece to a function before its reader gets it."""

    def __init__(self, stream: Any, watch: Watch) -> None:
        """Wrap a `Stream`, or a stream that wraps one."""
        self._stream = stream
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return self._watched(next(self._stream))

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        return self._watched(await anext(self._stream))

    def __enter__(self) -> WatchedStream:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self._stream.__exit__(*error)

    async def __aenter__(self) -> WatchedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> Any:
        return await self._stream.__aexit__(*error)

    def _watched(self, piece: Piece) -> Piece:
        self._watch(piece)
        return piece
