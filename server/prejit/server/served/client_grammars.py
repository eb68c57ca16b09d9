"""The grammars that clients send: compiled one at a time, for as long as somebody waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

from prejit.runtime.errors import UsageError
from prejit.server.grammar.grammar_sources import GrammarSource
from prejit.server.grammar.grammars import GrammarMask, Grammars
from prejit.server.served.process_upkeep import yield_cpu

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle

_NICE = 10
"""As of the process that compiles first (grammar_trial.py): other threads run while llguidance compiles."""
MAX_CHARACTERS = 256 << 10
"""The largest grammar, with its schemas. Above it no compilation ends in time."""


@dataclass(eq=False, slots=True)
class _Turn:
    """A compilation that waits or runs.

    Attributes:
        client: for whom.
        work: compiles.
        result: gets the mask.
    """

    client: str
    work: Callable[[], GrammarMask]
    result: asyncio.Future[GrammarMask]


@final
class Compiling:
    """Compiles grammars of clients for one bundle. All calls come from the event loop.

    The turn is that of the client who has had the least time since nobody waited: the flood of one delays
    the others by one grammar.
    """

    def __init__(self) -> None:
        self._grammars: Grammars | None = None
        self._pool = ThreadPoolExecutor(1, "prejit-grammar", yield_cpu, (_NICE,))
        self._waiting: list[_Turn] = []
        self._running: _Turn | None = None
        self._seconds: dict[str, float] = {}

    async def mask(
        self,
        bundle: Bundle,
        source: GrammarSource,
        stop_token_ids: Collection[int] | None,
        client: str,
    ) -> GrammarMask:
        """Return a mask for a grammar. If the caller is cancelled, nothing is compiled for it any more.

        Raises:
            UsageError: as `Grammars.mask`, or it is too large.
        """
        if len(source.text) > MAX_CHARACTERS:
            raise UsageError(
                f"{source.expected}, of at most {MAX_CHARACTERS} characters, found {len(source.text)}",
                hint="send a smaller one",
            )
        if self._grammars is None:
            self._grammars = Grammars(bundle, of_strangers=True)
        if (kept := self._grammars.kept_mask(source, stop_token_ids)) is not None:
            return kept
        work = partial(self._grammars.mask, source, stop_token_ids)
        turn = _Turn(client, work, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        self._begin_next()
        try:
            return await turn.result
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn is self._running:
                self._grammars.stop_trial()
            raise
        finally:
            # The error of a refused grammar has this frame: a cycle, which would keep the grammar and pipes.
            del turn

    def close(self) -> None:
        """End the process that compiles."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.stop_trial()

    def _begin_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        turn = min(self._waiting, key=lambda each: self._seconds.get(each.client, 0.0))
        self._waiting.remove(turn)
        self._running = turn
        work = asyncio.get_running_loop().run_in_executor(self._pool, turn.work)
        work.add_done_callback(partial(self._finish, turn, time.monotonic()))

    def _finish(self, turn: _Turn, started: float, work: asyncio.Future[GrammarMask]) -> None:
        self._running = None
        if not self._waiting:
            self._seconds.clear()
        else:
            before = self._seconds.get(turn.client, 0.0)
            self._seconds[turn.client] = before + time.monotonic() - started
        error = None if work.cancelled() else work.exception()
        if not turn.result.done():
            if error is not None:
                turn.result.set_exception(error)
            elif work.cancelled():
                turn.result.cancel()
            else:
                turn.result.set_result(work.result())
        self._begin_next()
