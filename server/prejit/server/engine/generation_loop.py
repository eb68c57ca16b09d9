"""The thread of an engine: it admits requests to slots, steps the batch, and hands out what comes."""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from prejit.runtime.errors import ClosedError, DeadlineError, QueueFullError
from prejit.runtime.generation.continuous_batch import Batch
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.generate import Piece
from prejit.runtime.generation.prefixes import PrefixCache
from prejit.runtime.generation.rows import Token
from prejit.server.engine.fair_queue import (
    LONGER_QUEUE,
    FairQueue,
    positions_between,
    positions_of_call,
)
from prejit.server.engine.memory import CachePlan, batches_between
from prejit.server.engine.request_recorder import Recorder
from prejit.server.engine.sleeper import POLL_SECONDS, Sleeper
from prejit.server.engine.stream import Ticket, Waker, wake

_ENTERING = 2
"""While so many prompts are computed in turns, each in a cache of its own, the others wait in the queue."""
_SHRINK_SECONDS = 1.0
"""How long fewer requests must run before they move to a smaller batch. Moving costs about one step."""
_PAUSE_SECONDS = 0.05
"""After so long without a request, what the slots hold is copied to the prefixes, as nobody waits then."""
_NEW_TOKEN_COST = 2.0
"""For fair shares, one new token counts as this many tokens of a prompt (Sheng et al., OSDI 2024)."""


class CacheState(NamedTuple):
    """The caches of an engine after its last step.

    Attributes:
        tokens: tokens of live requests.
        cache_bytes, prefix_bytes: what the cache of the slots and the kept prefixes take.
    """

    tokens: int = 0
    cache_bytes: int = 0
    prefix_bytes: int = 0


@final
class Loop:
    """One thread that drives one batch for all callers. It begins with the first request."""

    def __init__(
        self,
        decoder: DecoderPrograms,
        plan: CachePlan,
        queue_size: int,
        prefill_tokens: int | None,
        recorder: Recorder,
        sleeper: Sleeper,
    ) -> None:
        """Start nothing yet."""
        self._decoder = decoder
        self._sleeper = sleeper
        self._plan = plan
        self._queue_size = queue_size
        self._recorder = recorder
        self._prefixes = PrefixCache(decoder, plan.prefix_bytes)
        self._sizes = batches_between(decoder, plan)
        self._batch = Batch(
            decoder,
            self._sizes[0],
            largest=(plan.batch, plan.context),
            prefill_tokens=prefill_tokens,
            prefixes=self._prefixes,
            together=plan.together,
        )
        self._changed = threading.Condition()
        self._queue: FairQueue[Ticket] = FairQueue()
        self._cancelled: deque[Ticket] = deque()  # some of them may still be in the queue
        self._running: dict[int, Ticket] = {}
        self._thread: threading.Thread | None = None
        self._refuses = ""  # why no request is taken any more
        self._stops = False
        # Of the last step: tickets with tokens that are handed out while the next step runs.
        self._held: list[tuple[Ticket, list[Token], float]] = []
        self._wakers: list[Waker | None] = []  # kept for `_fail` where handing out stops half-way
        self._smaller_since: float | None = None
        self._has_rested = True  # whether the request that comes next comes after a pause
        self._request_seconds = 0.1  # how long a request has a slot, on average of the last ones
        self._must_wait: Callable[[], bool] = lambda: False
        self.state = CacheState()

    # ------------------------------------------------------------------ from any thread

    def begin_after(self, earlier: Loop, seconds: float) -> None:
        """Begin nothing while requests wait in another loop, for so long at most."""
        until, queue = time.monotonic() + seconds, earlier._queue
        self._must_wait = lambda: bool(queue) and time.monotonic() < until

    def submit(self, ticket: Ticket) -> None:
        """Put a request into the queue.

        If the queue is full, the newest request of the client with the most ends in its place.

        Raises:
            QueueFullError: too many requests wait, and no client has more of them than this one; or too many
                of this client.
            ClosedError: no more requests are taken.
        """
        dropped = None
        with self._changed:
            if self._refuses:
                self._recorder.generations.refused()
                raise ClosedError(self._refuses, hint="send it to another server, or later")
            self._remove_cancelled()
            most = ticket.limits.waiting
            if most is not None and self._queue.count(ticket.client) >= most:
                self._recorder.generations.refused()
                raise self._full(f"{most} requests of this client")
            if len(self._queue) >= self._queue_size:
                if (dropped := self._queue.drop(ticket.client)) is None:
                    self._recorder.generations.refused()
                    raise self._full(f"{self._queue_size} requests", LONGER_QUEUE)
                self._recorder.generations.abandoned("refused")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="prejit engine", daemon=True)
                thread.start()  # if the system has no more threads, the next request tries again
                self._thread = thread
                atexit.register(self.close)  # an end of the process inside XLA aborts it
            self._queue.put(ticket, ticket.client, ticket.priority, ticket.limits.running)
            self._recorder.generations.submitted()
            self._changed.notify_all()
        if dropped is not None:
            wake([dropped.receiver.fail(self._full(f"{self._queue_size} requests", LONGER_QUEUE))])

    def _full(self, found: str, *more: str) -> QueueFullError:
        seconds = self._request_seconds / self._plan.batch
        return QueueFullError(
            f"expected fewer than {found} that wait, found that many",
            retry_after=seconds,
            hint="; ".join((f"try again after {seconds:.2g} seconds", *more)),
        )

    def cancel(self, ticket: Ticket) -> None:
        """End a request that nobody waits for any more.

        It takes no lock and leaves the queue as it is, because finalizers call it: they run in any thread, at
        any line, also while that thread goes through the queue.
        """
        ticket.cancelled = True
        self._cancelled.append(ticket)

    def _remove_cancelled(self) -> None:
        """Remove cancelled requests from the queue. The caller holds the lock."""
        while self._cancelled:
            if self._queue.remove(self._cancelled.popleft()):
                self._recorder.generations.abandoned("cancelled")

    def drain(self, seconds: float | None) -> bool:
        """Take no more requests, and wait until none is left; return whether that is so."""
        with self._changed:
            self._refuses = self._refuses or "this engine is draining"
            self._changed.wait_for(lambda: not self._refuses or self._is_idle(), seconds)
            return self._is_idle()

    def undrain(self) -> None:
        """Take requests again, unless the loop is closed."""
        with self._changed:
            if not self._stops:
                self._refuses = ""
                self._changed.notify_all()  # who waits in `drain` goes on

    def close(self) -> None:
        """End all requests with ClosedError, free the caches, and wait for the thread."""
        with self._changed:
            self._refuses = "this engine is closed"
            self._stops = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            atexit.unregister(self.close)

    def free(self) -> None:
        """Free the caches and the prefixes, of a loop that the sleeper keeps from running."""
        self._batch.close()
        self._prefixes.clear()
        self.state = CacheState()

    def drop(self) -> None:
        """Refer to the bundle no more, after `close`: what it has dropped keeps the client of XLA."""
        for name in ("_batch", "_prefixes", "_decoder"):
            vars(self).pop(name, None)

    def _is_idle(self) -> bool:
        return not self._queue and not self._queue.running  # entering ones included

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        rests = True  # nobody has come since a pause, in which the prefixes got what the slots hold
        has_begun = False  # whether the sleeper knows that this runs
        while True:
            with self._changed:
                if self._is_idle():
                    self._changed.notify_all()  # drain waits for it
                pause = None if rests else _PAUSE_SECONDS
                self._changed.wait_for(lambda: self._stops or not self._is_idle(), pause)
                if self._stops:
                    break
                rests = self._is_idle()
            if not has_begun and not self._must_wait():
                has_begun = self._sleeper.try_begin(wakes=not rests)
            if not has_begun:
                self._wait_to_begin()
                continue
            try:
                if rests:
                    self._batch.keep()
                    self._has_rested = True
                    self._observe()
                else:
                    self._round()
            except Exception as error:  # a damaged bundle, no memory: all that run are lost
                self._batch.close()
                for slot in list(self._running):
                    self._fail(slot, error)
            self._sleeper.has_run()
            if not self._running:
                self._sleeper.end()
                has_begun = False
        self.free()
        if has_begun:
            self._sleeper.end()
        closed = ClosedError("this engine was closed before the request was finished")
        for slot in list(self._running):
            self._fail(slot, closed)
        with self._changed:
            self._remove_cancelled()
            left = list(self._queue)
            for ticket in left:
                self._queue.remove(ticket)
            self._changed.notify_all()  # drain waits for it
        for ticket in left:
            self._abandon(ticket, closed, "error")

    def _wait_to_begin(self) -> None:
        """Let requests wait for a moment, until other engines leave enough memory or the first turn."""
        self._end_late()
        with self._changed:
            if self._is_idle():
                self._sleeper.give_up()
            else:
                self._changed.wait_for(lambda: self._stops, POLL_SECONDS)

    def _round(self) -> None:
        self._end_late()
        self._admit()
        if self._batch.entering:
            self._hand_out()  # computing prompts may take long
        started = time.perf_counter()
        tokens = self._batch.step(self._hand_out, self._prefill_budget())
        now = time.perf_counter()
        self._hand_out()  # a step that decodes nothing has not done so
        decoded = len({token.slot for token in tokens if token.usage.passes})
        self._recorder.step(decoded, self._batch.slots if decoded else 0, now - started)
        self._deliver(tokens, now)
        self._observe()

    def _observe(self) -> None:
        self.state = CacheState(*self._batch.occupied(), self._prefixes.size_bytes)

    def _end_late(self) -> None:
        """End requests that were cancelled or are past their deadline."""
        now = time.perf_counter()
        with self._changed:
            self._remove_cancelled()
            late = [t for t in self._queue if t.deadline is not None and t.deadline < now]
            for ticket in late:
                self._queue.remove(ticket)
        for ticket in late:
            waited = now - ticket.submitted
            error = DeadlineError(f"this request waited {waited:.3g} seconds and got no slot")
            self._abandon(ticket, error, "deadline")
        for slot, ticket in list(self._running.items()):
            if ticket.cancelled:
                self._batch.evict(slot)
                self._fail(slot, None, "cancelled")
            elif ticket.deadline is not None and ticket.deadline < now:
                self._hand_out()
                tokens = ticket.generation.new_tokens
                waited = now - ticket.submitted
                self._batch.evict(slot)
                error = DeadlineError(
                    f"after {waited:.3g} seconds this request had {tokens} tokens"
                )
                self._fail(slot, error, "deadline")

    def _admit(self) -> None:
        """Give free slots to the requests that are next, unless another engine waits for the memory."""
        if self._sleeper.yields:
            return
        with self._changed:
            waiting = sum(self._queue.can_run.values())
        if not waiting:
            self._resize(len(self._running))
            return
        self._resize(min(len(self._running) + waiting, self._plan.batch))
        while self._batch.free and self._batch.entering < _ENTERING:
            if not (tickets := self._take()):
                return
            now = time.perf_counter()
            for ticket in tickets:
                self._recorder.generations.admitted(now - ticket.submitted)
            try:  # whatever fails: they are in neither the queue nor the slots
                self._hand_out()  # making room in the cache may take long
                for ticket in tickets:
                    ticket.generation.enter()
                    _spend(ticket, len(ticket.generation.request.prompt))
                slots = self._batch.begin(*(ticket.generation.request for ticket in tickets))
            except Exception as error:
                for ticket in tickets:
                    self._recorder.finished("error", now - ticket.submitted)
                    self._forget(ticket)
                    wake([ticket.receiver.fail(error)])
                raise
            self._running.update(zip(slots, tickets, strict=True))

    def _take(self) -> list[Ticket]:
        """Take the next request, unless it awaits another's prompt, and those that fit into the same call."""
        taken: list[Ticket] = []
        rows, longest = 1, 0
        with self._changed:
            while len(taken) < rows and (found := self._queue.next()) is not None:
                request = found[1].generation.request
                if self._batch.awaits(request) or (taken and len(request.prompt) > longest):
                    break
                if not taken:
                    most = positions_of_call(self._batch.prefill_tokens, self._prefill_budget())
                    waiting = sum(self._queue.can_run.values())
                    rows, longest = self._batch.call_for(len(request.prompt), waiting, most)
                client, ticket = self._queue.take()
                self._queue.charge(client, len(request.prompt))
                taken.append(ticket)
        return taken

    def _prefill_budget(self) -> int:
        """Return how many positions of prompts to compute before the next decode step."""
        with self._changed:
            can_run = self._queue.can_run
        if not can_run and not self._batch.entering:
            return self._batch.prefill_tokens  # there is no prompt to compute
        free, tickets = self._batch.free, self._running.values()
        waiting = Counter({client: min(count, free) for client, count in can_run.items()})
        waiting.update(ticket.client for ticket in tickets if not ticket.answered)
        # A text with its first token alone waits for the rest of its own client's burst.
        running = Counter(
            ticket.client
            for ticket in tickets
            if ticket.answered and (ticket.generation.new_tokens > 1 or not waiting[ticket.client])
        )
        return positions_between(self._batch.prefill_tokens, waiting, running)

    def _resize(self, wanted: int) -> None:
        """Move to the smallest batch for this many requests, at once if it is larger, else after a while."""
        if not wanted:
            return  # nobody is there: keep what the slots have cached
        batch = next(size for size in self._sizes if size >= wanted)
        now = time.perf_counter()
        # Without a pause, those whose requests ended just now send their next ones.
        has_rested, self._has_rested = self._has_rested, False
        if batch >= self._batch.slots or has_rested:
            self._smaller_since = None
        elif self._smaller_since is None:
            self._smaller_since = now
        if batch == self._batch.slots or self._batch.entering:
            return
        if self._smaller_since is not None and now - self._smaller_since < _SHRINK_SECONDS:
            return
        if self._running:
            batch = self._next_on_the_way(batch)
        if batch != self._batch.slots and self._batch.is_ready_for(batch):
            self._hand_out()
            moved = self._batch.resize(batch)
            self._running = {moved[slot]: ticket for slot, ticket in self._running.items()}

    def _next_on_the_way(self, batch: int) -> int:
        """Return the batch nearest to another one that the cache can be copied to, or that of now."""
        context, now = self._decoder.contexts[0], self._batch.slots
        for size in sorted(self._sizes, key=lambda size: abs(size - batch)):
            between = min(now, batch) <= size <= max(now, batch)
            if between and self._decoder.can_copy((now, context), (size, context)):
                return size
        return now

    def _deliver(self, tokens: Sequence[Token], now: float) -> None:
        """Hand the tokens of a step to those who wait for them, at once or while the next step runs.

        The device waits for the host between two steps. So tokens that change nothing in the batch wait until
        the next step is on its way; first tokens, last ones, and those that may end a text do not.
        """
        by_slot: dict[int, list[Token]] = {}
        for token in tokens:
            by_slot.setdefault(token.slot, []).append(token)
        for slot, found in by_slot.items():
            ticket = self._running[slot]
            if ticket.guard is not None and (error := ticket.guard.error) is not None:
                self._batch.evict(slot)
                ticket.guard.error = None  # its traceback refers to the guard
                self._fail(slot, error)
                continue
            ends = found[-1].finish_reason is not None
            if ticket.answered and not ends and not ticket.generation.has_stops:
                self._held.append((ticket, found, now))
                continue
            pieces = self._pieces(slot, ticket, found)
            if not ticket.answered:
                prompt = len(ticket.generation.request.prompt)
                self._recorder.read_prompt(prompt, found[0].usage.reused_tokens)
            self._count(ticket, pieces, now)
            if (last := pieces[-1]).finish_reason is not None:
                seconds = now - ticket.submitted
                self._recorder.finished(last.finish_reason, seconds, last.stats)
                self._end(slot)
            self._wakers.append(ticket.receiver.take(ticket.generation, pieces))
        wake(self._wakers)

    def _hand_out(self) -> None:
        """Hand out the tokens of the last step that `_deliver` has held back."""
        held, self._held = self._held, []
        for ticket, tokens, now in held:
            pieces = [ticket.generation.take(token) for token in tokens]
            self._count(ticket, pieces, now)
            self._wakers.append(ticket.receiver.take(ticket.generation, pieces))
        wake(self._wakers)

    def _pieces(self, slot: int, ticket: Ticket, tokens: Sequence[Token]) -> list[Piece]:
        pieces = []
        for token in tokens:
            piece = ticket.generation.take(token)
            pieces.append(piece)
            if piece.finish_reason is not None:
                if token.finish_reason is None:  # a stop string: the slot does not know of it
                    self._decoder.programs.verification.finish()
                    self._batch.evict(slot)
                break
        return pieces

    def _count(self, ticket: Ticket, pieces: Sequence[Piece], now: float) -> None:
        """Count new tokens."""
        new = sum(piece.token_id is not None for piece in pieces)
        if not new:
            return
        if not ticket.answered:
            self._recorder.first_token(now - ticket.submitted)
        further = new if ticket.answered else new - 1
        if further:
            self._recorder.tokens(further, now - (ticket.answered or now))
        ticket.answered = now
        _spend(ticket, new)
        with self._changed:
            self._queue.charge(ticket.client, _NEW_TOKEN_COST * new)

    def _fail(self, slot: int, error: Exception | None, reason: str = "error") -> None:
        """End a request without a result; None: nobody waits for its error."""
        self._hand_out()
        ticket = self._running[slot]
        self._recorder.finished(reason, time.perf_counter() - ticket.submitted)
        self._end(slot)
        if error is not None:
            wake([ticket.receiver.fail(error)])

    def _abandon(self, ticket: Ticket, error: Exception, reason: str) -> None:
        self._recorder.generations.abandoned(reason)
        wake([ticket.receiver.fail(error)])

    def _end(self, slot: int) -> None:
        """Forget a request that has no slot any more."""
        ticket = self._running.pop(slot)
        seconds = time.perf_counter() - ticket.submitted
        self._request_seconds += (seconds - self._request_seconds) / 8
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        with self._changed:
            self._queue.end(ticket.client)


def _spend(ticket: Ticket, tokens: int) -> None:
    if ticket.limits.on_tokens is not None:
        ticket.limits.on_tokens(tokens)
