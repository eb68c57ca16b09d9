"""A request on its way: its ticket in the engine, and its caller's future or stream of pieces."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Protocol, Self, final

import numpy as np

from prejit.runtime.generation.finished_text import Result
from prejit.runtime.generation.generate import Generation, Piece
from prejit.runtime.generation.options import TokenMask
from prejit.runtime.generation.rows import checked_mask
from prejit.server.engine.fair_queue import Limits


@dataclass(slots=True, eq=False)
class Ticket:
    """A request, and what the engine must know of it.

    Attributes:
        generation: its text so far.
        receiver: who gets what comes of it.
        client, priority: whose it is, and how soon it is served.
        limits: those of the client.
        deadline: when it must be finished, by time.perf_counter; None: at any time.
        submitted: when it came.
        answered: when its latest tokens came; None: it has none yet.
        guard: its token mask, if it has one.
        cancelled: whether nobody waits for it any more.
    """

    generation: Generation
    receiver: Receiver
    client: str
    priority: int
    limits: Limits
    deadline: float | None
    submitted: float
    answered: float | None = None
    guard: GuardedMask | None = None
    cancelled: bool = False


@final
class GuardedMask:
    """A token mask of a caller, whose errors end its own request and no other."""

    def __init__(self, mask: TokenMask, vocab_size: int) -> None:
        """Guard a mask."""
        self._mask = mask
        self._vocab_size = vocab_size
        self.error: Exception | None = None

    def __call__(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any] | None:
        """Return what the mask returns, bool [V]; None: all tokens are allowed, or the mask has failed."""
        if self.error is not None:
            return None
        try:
            return checked_mask(self._mask(token_ids), self._vocab_size)
        except Exception as error:  # whatever the caller's function raises
            self.error = error
            return None


Waker = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]
"""An event loop, and the future that a task of it waits for."""


class Receiver(Protocol):
    """Takes what comes of a request. The engine's thread calls it."""

    def take(self, generation: Generation, pieces: list[Piece]) -> Waker | None:
        """Take new pieces, at least one; return whom to wake."""

    def fail(self, error: BaseException) -> Waker | None:
        """End with an error; return whom to wake."""


@final
class Answer(Future[Result]):
    """The future of one result. `cancel` works until it is there."""

    def __init__(self) -> None:
        super().__init__()
        # It refers to the request, which refers to this: it is dropped at the end, so that the memory of a
        # request, such as its grammar, does not wait for the garbage collector.
        self.on_cancel: Callable[[], None] = _nothing

    def cancel(self) -> bool:
        """Cancel the request, whether it waits or runs; return False if its result is there."""
        cancelled = super().cancel()
        if cancelled:
            self.on_cancel()
            self.on_cancel = _nothing
        return cancelled

    def take(self, generation: Generation, pieces: list[Piece]) -> None:
        """Set the result with the last piece."""
        if pieces[-1].finish_reason is not None:
            self.on_cancel = _nothing
            with contextlib.suppress(InvalidStateError):  # cancelled in this moment
                self.set_result(generation.result())

    def fail(self, error: BaseException) -> None:
        """Set the error."""
        self.on_cancel = _nothing
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)


@final
class Pipe:
    """Pieces on their way from the engine's thread to a thread or a task that reads them."""

    def __init__(self) -> None:
        """Begin empty."""
        self.on_cancel: Callable[[], None] = _nothing  # as that of Answer
        self._items: deque[Piece | BaseException] = deque()
        # It may be taken twice: the garbage collector, which may run while it is held, calls `cancel`.
        # That only marks: it waits for nobody, and changes nothing that somebody goes through.
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._waker: Waker | None = None
        self._ended = False

    def take(self, generation: Generation, pieces: list[Piece]) -> Waker | None:
        """Hand over new pieces; return whom to wake."""
        del generation
        return self._put(pieces)

    def fail(self, error: BaseException) -> Waker | None:
        """Let the reader raise an error behind the pieces that it has not read."""
        return self._put([error])

    def _put(self, items: list[Piece] | list[BaseException]) -> Waker | None:
        with self._lock:
            self._items.extend(items)
            if _is_last(items[-1]):
                self.on_cancel = _nothing
            self._arrived.notify()
            waker, self._waker = self._waker, None
            return waker

    def next(self) -> Piece | None:
        """Wait for the next piece and return it; None: there are no more.

        Raises:
            PrejitError: the request failed.
        """
        with self._lock:
            while not self._items and not self._ended:
                self._arrived.wait()
            return self._pop()

    async def next_async(self) -> Piece | None:
        """Wait for the next piece as `next`, without blocking the event loop."""
        while True:
            with self._lock:
                if self._items or self._ended:
                    return self._pop()
                loop = asyncio.get_running_loop()
                woken = loop.create_future()
                self._waker = loop, woken
            try:
                await woken
            except asyncio.CancelledError:
                self.cancel()  # the task that reads is gone
                raise

    def _pop(self) -> Piece | None:
        if self._ended:
            return None
        item = self._items.popleft()
        self._ended = _is_last(item)
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        """End here. The engine frees the slot with its next step."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._arrived.notify_all()
        self.on_cancel()
        self.on_cancel = _nothing


@final
class Stream:
    """The pieces of one text as they come: an iterator, and an asynchronous iterator for tasks.

        for piece in engine.stream("def main("): ...
        async for piece in engine.stream("def main("): ...

    A stream that is closed, or that nobody refers to, frees its slot with the next step. `with` and
    `async with` close it. One reader at a time.
    """

    def __init__(self, pipe: Pipe) -> None:
        """Read from a pipe. Use `Engine.stream`."""
        self._pipe = pipe
        self._finalizer = weakref.finalize(self, pipe.cancel)
        self._finalizer.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        if (piece := self._pipe.next()) is None:
            raise StopIteration
        return piece

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        if (piece := await self._pipe.next_async()) is None:
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """Stop the request, if it is not finished."""
        self._pipe.cancel()

    async def aclose(self) -> None:
        """Stop the request, as `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _is_last(item: Piece | BaseException) -> bool:
    return isinstance(item, BaseException) or item.finish_reason is not None


def wake(wakers: list[Waker | None]) -> None:
    """Wake tasks, with one call into each event loop, and empty the list; None: nobody waits."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for loop, future in filter(None, wakers):
        loops.setdefault(loop, []).append(future)
    wakers.clear()
    for loop, futures in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(_set_all, futures)


def _set_all(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():  # the task that waited was cancelled
            future.set_result(None)


def _nothing() -> None:
    pass
