"""A stream of an engine whose pieces something else sees too: the log of requests, or a span."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from prejit.runtime.generation.generate import Piece


@final
class WatchedStream:
    """A stream that passes each piece to a function before its reader gets it."""

    def __init__(self, stream: Any, watch: Callable[[Piece], None]) -> None:
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
