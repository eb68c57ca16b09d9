"""Engines and streams that show what they give to the request that called them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, final

if TYPE_CHECKING:
    from prejit.runtime.generation.finished_text import Result
    from prejit.runtime.generation.generate import Piece
    from prejit.server.engine.engine import Engine
    from prejit.server.engine.fair_queue import Limits

Watch = Callable[[Any], object]
"""Takes what a call gives: a `Result`, an `Encoded`, what a program returned, or each `Piece` of a stream."""


class EngineCall(NamedTuple):
    """A call of an engine that begins.

    Attributes:
        model: the name that the bundle is served under.
        kind: `generate`, `encode` or `call`.
        program: that `call` runs; empty otherwise.
        options: of a generation, which may be changed.
    """

    model: str
    kind: str
    program: str
    options: dict[str, Any]


Watcher = Callable[[EngineCall], Watch | None]
"""Returns what takes the results of a call; None: nothing does."""


@final
class WatchedEngine:
    """An engine around another one, with the methods that handlers use; the other one has all others."""

    def __init__(self, name: str, engine: Engine, *watchers: Watcher) -> None:
        """Wrap the engine of the bundle that is served under this name. The watchers see calls in order."""
        self._name = name
        self._engine = engine
        self._watchers = watchers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _watches(self, kind: str, program: str, options: dict[str, Any]) -> list[Watch]:
        call = EngineCall(self._name, kind, program, options)
        return [watch for each in self._watchers if (watch := each(call)) is not None]

    def submit(self, prompt: Any = None, **options: Any) -> Future[Result]:
        """Submit a request, as `Engine.submit`."""
        watches = self._watches("generate", "", options)
        return _watched(self._engine.submit(prompt, **options), watches)

    def stream(self, prompt: Any = None, **options: Any) -> Any:
        """Stream, as `Engine.stream`."""
        watches = self._watches("generate", "", options)
        stream = self._engine.stream(prompt, **options)
        return stream if not watches else WatchedStream(stream, watches)

    def submit_encode(self, sentences: Any, **options: Any) -> Future[Any]:
        """Encode, as `Engine.submit_encode`."""
        watches = self._watches("encode", "", {})
        return _watched(self._engine.submit_encode(sentences, **options), watches)

    def submit_client_call(
        self, client: str, limits: Limits, name: str, /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Run a program, as `Engine.submit_client_call`."""
        watches = self._watches("call", name, {})
        return _watched(
            self._engine.submit_client_call(client, limits, name, *args, **kwargs), watches
        )


def _watched(future: Future[Any], watches: Sequence[Watch]) -> Future[Any]:
    def ended(done: Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None:
            for watch in watches:
                watch(done.result())

    future.add_done_callback(ended)
    return future


@final
class WatchedStream:
    """A stream that passes each piece to functions before its reader gets it."""

    def __init__(self, stream: Any, watches: Sequence[Watch]) -> None:
        self._stream = stream
        self._watches = watches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        piece: Piece = await anext(self._stream)
        for watch in self._watches:
            watch(piece)
        return piece
