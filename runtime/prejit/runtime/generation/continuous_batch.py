"""Continuous batching over compiled programs: slots that requests of many callers join and leave at any step.

    begin    put requests into free slots; the next steps compute their prompts in chunks
    resize   move to another number of slots

`slots` has what a batch does for one caller. A large cache is allocated in pieces by the steps before it is
needed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

from prejit.runtime.errors import UsageError
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.insertion import SHARED_TOKENS, Arrival
from prejit.runtime.generation.options import Request
from prejit.runtime.generation.prefill import Entering, Limit, no_limit
from prejit.runtime.generation.prefixes import PrefixCache
from prejit.runtime.generation.rows import CachedText, Row, Token
from prejit.runtime.generation.slots import Slots, nothing

_CPU_TOKENS, _CPU_LEAST_TOKENS, _ACCELERATOR_TOKENS = 64, 32, 512
"""How many positions of prompts are computed between two decode steps, if nothing else is said."""
_PREPARING_SECONDS = 0.01
"""If making room for prompts and copying what is cached of them takes longer, a decode step comes first."""
_LONGEST_STALL_SECONDS = 0.2
"""If prompts take longer between two decode steps, no more than `prefill_tokens` positions are computed."""


@dataclass(slots=True, eq=False)
class _Insertion:
    """Requests whose prompts are being computed.

    Attributes:
        arrival: the requests, and where they go.
        work: computes the next chunk, and returns the rows at its end.
        seconds: how long it has taken so far.
        positions: of the next chunk; 0: not known before it begins.
        evicted: slots whose requests have left meanwhile; they are free when the work is done.
    """

    arrival: Arrival
    work: Generator[int, None, dict[int, Entering]]
    seconds: float
    positions: int = 0
    evicted: set[int] = field(default_factory=set)

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of the requests, in their order."""
        return self.arrival.slots


@final
class Batch(Slots):
    """Slots that requests join and leave at any step, while the others decode."""

    def __init__(
        self,
        decoder: DecoderPrograms,
        slots: int = 1,
        *,
        largest: tuple[int, int] | None = None,
        prefill_tokens: int | None = None,
        prefixes: PrefixCache | None = None,
        together: int = 1,
    ) -> None:
        """Make free slots. The first insertion allocates the cache.

        Args:
            decoder: the programs.
            slots: how many; rounded up to one of the bundle's batch buckets.
            largest: the batch and the context that the cache may grow to, each one of the bundle's buckets;
                None: as many slots as asked for, and the longest context.
            prefill_tokens: how many positions of prompts are computed between two decode steps (`begin`).
                None: 512 on an accelerator; on a CPU 64, or where 64 take more than 0.2 s, 32 or `slots`.
            prefixes: earlier prompts, and where to keep new ones; None: nothing is kept.
            together: how many rows a cache may have in which prompts are computed before they are copied,
                if it is not the smallest batch.

        Raises:
            UsageError: the bundle has no batch bucket for this many.
        """
        super().__init__(decoder, slots, largest=largest)
        on_cpu = decoder.device.platform == "cpu"
        self.prefill_tokens = prefill_tokens or (_CPU_TOKENS if on_cpu else _ACCELERATOR_TOKENS)
        is_fixed = prefill_tokens or not on_cpu
        self._least_tokens = self.prefill_tokens if is_fixed else _CPU_LEAST_TOKENS
        self._prefixes = prefixes
        self._together = together
        # Not finished; the next to compute comes first.
        self._insertions: deque[_Insertion] = deque()
        self._budget = self.prefill_tokens
        # How many were computed since the last decode step, and how long that took.
        self._computed = 0
        self._stalled_seconds = 0.0
        self._position_seconds = math.inf  # what a position of the last prompt took

    @property
    def entering(self) -> int:
        """The number of requests whose prompts are being computed."""
        return sum(len(insertion.slots) for insertion in self._insertions)

    def occupied(self) -> tuple[int, int]:
        """Return how many tokens live requests have in the cache, and how many bytes the cache takes.

        The bytes include those that are allocated for the next cache.
        """
        with self._lock:
            tokens = sum(row.cached for row in self._rows if row is not None)
            model = None if self._decoding is None else self._decoding.model
            caches = (self._cache, self._growth, model)
            return tokens, sum(each.size_bytes for each in caches if each is not None)

    def _free_slots(self) -> list[int]:
        taken = {slot for insertion in self._insertions for slot in insertion.slots}
        return [slot for slot in super()._free_slots() if slot not in taken]

    def insert(self, *requests: Request) -> tuple[int, ...]:
        """Put requests into free slots, as `Slots.insert`: their first tokens come with the next step."""
        with self._lock:
            if not requests:
                return ()
            insertion = self._begin(requests, no_limit, 1)
            while insertion in self._insertions:
                self._advance(insertion)
            return insertion.slots

    def begin(self, *requests: Request) -> tuple[int, ...]:
        """Put requests into free slots. The next steps compute their prompts in chunks, and decode beside it.

        Args:
            *requests: as for `insert`. `call_for` says how many prompts one call computes.

        Returns:
            Their slots, in the same order. First tokens come with one of the next steps, and for requests
            that begin together with the same one.

        Raises:
            UsageError, ContextError: as `insert`.
        """
        with self._lock:
            return self._begin(requests, self._limit, self._together).slots if requests else ()

    def awaits(self, request: Request) -> bool:
        """Return whether most of a prompt that is being computed is a beginning of this request's, too.

        A request that begins when that one is finished finds it kept. Until then both would compute it.
        """
        with self._lock:
            if self._prefixes is None or not self._prefixes.most_bytes:
                return False
            for row in (row for each in self._insertions for row in each.arrival.rows):
                reused, prompt = row.usage.reused_tokens, row.request.prompt
                text = CachedText(prompt, row.request.namespace)
                saved = text.reusable(self._decoder, request) - reused
                if saved >= SHARED_TOKENS and 2 * saved >= len(prompt) - reused:
                    return True
            return False

    def call_for(self, prompt_tokens: int, count: int, positions: int) -> tuple[int, int]:
        """Return how many prompts like this one should `begin` together, and the longest that fits in.

        They fill one call of a prefill program. It computes a prompt in less time than calls for each would,
        because it reads the weights once.

        Args:
            prompt_tokens: length of the prompt.
            count: how many wait.
            positions: the most that one call may compute, padding included.
        """
        with self._lock:
            context = self._decoder.context_for(prompt_tokens)
            if self._cache is not None:
                context = max(context, self._cache.context)
            decoder, most = self._decoder, min(count, self.free)
            if any(self._rows):
                positions = min(positions, self._in_time())
            smallest = decoder.batches[0]  # its rows are computed for one prompt, too
            for rows in reversed([n for n in decoder.batches if 1 < n <= max(most, smallest)]):
                size = decoder.prefill_for(rows, context, prompt_tokens).bucket["prompt"]
                if prompt_tokens > size or (rows > smallest and rows * size > positions):
                    continue
                is_aside = rows <= max(self._together, smallest) and rows < self.slots
                if rows == self.slots or (
                    is_aside and decoder.can_fill_aside(self.slots, context, size, rows)
                ):
                    return min(rows, most), size
            return 1, prompt_tokens

    def step(
        self, meanwhile: Callable[[], object] = nothing, prefill_tokens: int | None = None
    ) -> list[Token]:
        """Return the next tokens of live slots: at least one each, in order; empty if no slot is live.

        The step after an insertion returns the tokens of that insertion and decodes nothing. While prompts
        are computed in chunks (`begin`), a step computes some of them first. It returns the first tokens as
        soon as a prompt is finished, or else decodes. It returns nothing if no slot is live yet.

        Args:
            meanwhile: called once while the device decodes; not called by a step that decodes nothing. It
                must not use this batch.
            prefill_tokens: how many positions of prompts may be computed before the next decode step, this
                one included; None: those of the batch.

        Raises:
            RejectError: the bundle is damaged. The last token of a request comes after all files of the
                target were verified.
            StoreError: the disk does not give the bundle's bytes.
        """
        return self._verified(self._next(meanwhile, prefill_tokens))

    def _next(self, meanwhile: Callable[[], object], prefill_tokens: int | None) -> list[Token]:
        with self._lock:
            self._budget = self.prefill_tokens if prefill_tokens is None else prefill_tokens
            if any(self._rows):
                self._budget = min(self._budget, self._in_time())
            else:
                self._begin_turn()  # nobody waits
            if not self._pending:
                self._compute_prompts()
            if self._pending:
                return self._take_pending()
            self._begin_turn()
            return self._decode(meanwhile)

    def evict(self, slot: int) -> None:
        """Free a slot, whatever it is doing. A free slot stays free.

        If requests began together, the slot is free when the prompts of the others are computed.

        Raises:
            UsageError: there is no such slot.
        """
        with self._lock:
            super().evict(slot)
            for insertion in [one for one in self._insertions if slot in one.slots]:
                insertion.evicted.add(slot)
                if insertion.evicted.issuperset(insertion.slots):
                    self._drop(insertion)

    def _drop(self, insertion: _Insertion) -> None:
        """Forget an insertion whose requests are all gone."""
        self._insertions.remove(insertion)
        if insertion.positions:  # what it computed may be NaN
            longest = max(len(row.request.prompt) for row in insertion.arrival.rows)
            with self._closed_on_error():
                for each in insertion.slots:
                    self._clear(each, {each: longest})
        self._rest()

    def is_ready_for(self, slots: int) -> bool:
        """Return whether `resize` can move at once. If not, prepare its programs, or a piece of its cache."""
        with self._lock:
            cache, batch = self._cache, self._decoder.batch_for(slots)
            if cache is None or not any(self._rows):
                return True
            decoder, to = self._decoder, (batch, cache.context)
            if not decoder.can_copy(cache.bucket, to):
                return False
            programs = decoder.programs
            needed = (*decoder.copying(cache.bucket, to), decoder.decode_for(*to).name)
            missing = [name for name in needed if not programs.ready(name)]
            programs.prepare_later(*missing)
            return not missing and self._growing().allocate(*to)

    def resize(self, slots: int) -> dict[int, int]:
        """Move to the smallest batch bucket with this many slots.

        Args:
            slots: at least as many as are live.

        Returns:
            The new slot of each live one.

        Raises:
            UsageError: more slots are live; prompts are being computed, or tokens wait for `step`; or the
                bundle has no program that copies the cache.
        """
        with self._lock:
            live = [slot for slot, row in enumerate(self._rows) if row is not None]
            batch = self._decoder.batch_for(slots)
            if len(live) > batch or self._insertions or self._pending:
                raise UsageError(
                    f"expected to move at most {batch} slots, and no prompt on its way into a slot; found "
                    f"{len(live)} live slots",
                    hint="step until requests are finished",
                )
            if live and batch == self.slots:
                return {slot: slot for slot in live}
            if live:  # an error here costs no text
                found = self._current()
                self._decoder.copy_for(found.bucket, (batch, found.context))
            idle = [slot for slot in range(self.slots) if slot not in live]
            idle.sort(key=lambda slot: -len(self._held[slot].token_ids))
            kept = list(range(self.slots)) if batch >= self.slots else sorted((live + idle)[:batch])
            moved = {old: new for new, old in enumerate(kept)}
            with self._closed_on_error():
                self._keep([slot for slot in idle if not live or slot not in moved])
                cache, self._cache = self._cache, None
                if live:
                    assert cache is not None
                    rows = {new: slot for slot, new in moved.items()}
                    counts = {new: self._cached(slot) for new, slot in rows.items()}
                    bucket = batch, cache.context
                    self._cache = self._growing().moved(cache, rows, bucket, counts)
            held = self._held if self._cache is not None else [CachedText() for _ in self._held]
            new_rows: list[Row | None] = [None] * batch
            new_held = [CachedText() for _ in range(batch)]
            for old, new in moved.items():
                new_rows[new], new_held[new] = self._rows[old], held[old]
            self._rows, self._held = new_rows, new_held
            self._forget(counts=True)
            return {slot: moved[slot] for slot in live}

    def _cached(self, slot: int) -> int:
        """Return how many positions of a slot hold a text."""
        row = self._rows[slot]
        return len(self._held[slot].token_ids) if row is None else row.cached

    def keep(self) -> None:
        """Keep what free slots have cached among the prefixes too, for prompts that enter other slots."""
        with self._lock:
            self._keep(range(self.slots))

    def _keep(self, slots: Iterable[int]) -> None:
        if self._prefixes is not None and self._cache is not None:
            for slot in slots:
                self._prefixes.keep_row(self._held[slot], self._cache, slot)

    def close(self) -> None:
        """Free all slots and the memory of the cache. The batch can be used again."""
        with self._lock:
            super().close()
            self._insertions.clear()
            self._begin_turn()

    # ------------------------------------------------------------------ insertion

    def _begin(self, requests: Sequence[Request], limit: Limit, together: int) -> _Insertion:
        """Reserve slots for requests. Arguments as `_arrive`."""
        started = time.perf_counter()
        arrival, work = self._arrive(requests, limit, together)
        insertion = _Insertion(arrival, work, time.perf_counter() - started)
        self._stalled_seconds += insertion.seconds
        self._insertions.append(insertion)
        return insertion

    def _keep_shared(self, requests: Sequence[Request], slots: Sequence[int]) -> None:
        """Keep what other slots have in common with prompts, and what these overwrite in their own ones."""
        if self._prefixes is None:
            return
        texts = [self._held[at] if row is None else row.held for at, row in enumerate(self._rows)]
        for request, slot in zip(requests, slots, strict=True):
            common = [text.reusable(self._decoder, request) for text in texts]
            nearest = max(range(self.slots), key=lambda at: (common[at], at == slot))
            if nearest != slot:
                text = CachedText(texts[nearest].token_ids[: common[nearest]], request.namespace)
                self._prefixes.keep_row(text, self._current(), nearest)
            if common[slot] < len(texts[slot].token_ids):  # a text that continues needs no copy
                self._prefixes.keep_row(texts[slot], self._current(), slot)

    def _advance(self, insertion: _Insertion) -> bool:
        """Compute the next chunk of an insertion; return whether there are more."""
        started = time.perf_counter()
        self._computed += insertion.positions
        with self._closed_on_error():
            try:
                insertion.positions = next(insertion.work)
            except StopIteration as done:
                self._insertions.remove(insertion)
                seconds = time.perf_counter() - started
                self._enter(done.value, insertion.seconds + seconds, insertion.evicted)
                if self._computed:  # nobody waited here for the chunks before a decode step
                    self._position_seconds = (self._stalled_seconds + seconds) / self._computed
                return False
            finally:
                seconds = time.perf_counter() - started
                insertion.seconds += seconds
                self._stalled_seconds += seconds
        return True

    def _compute_prompts(self) -> None:
        """Compute chunks of prompts until one of them is finished, or a decode step is due.

        Others have their turns before a prompt that is not finished goes on.
        """
        while self._insertions and not self._pending:
            insertion = self._insertions[0]
            if self._is_decode_due(insertion.positions):
                return
            computed = insertion.positions
            goes_on = self._advance(insertion)
            if computed and goes_on and self._is_decode_due(insertion.positions):
                self._insertions.rotate(-1)

    def _is_decode_due(self, positions: int) -> bool:
        """Return whether a decode step comes before a chunk of so many positions."""
        budget = self._budget
        if self._stalled_seconds > _LONGEST_STALL_SECONDS:
            budget = min(budget, self.prefill_tokens)
        if not self._computed:
            was_long = self._stalled_seconds > _PREPARING_SECONDS
            return was_long and positions > 0 and self._limit() is not None
        return self._computed + positions > budget

    def _in_time(self) -> int:
        """Return how many positions may be computed between two steps, if as fast as the last ones.

        Not fewer than a step computes, one for each slot, if `prefill_tokens` are as many: else most slots of
        a large batch would stay free, because texts would end as fast as others enter.
        """
        found = int(_LONGEST_STALL_SECONDS / self._position_seconds)
        if found >= self.prefill_tokens:
            return found
        return max(self._least_tokens, min(self.slots, self.prefill_tokens))

    def _begin_turn(self) -> None:
        """Begin to count what is computed between two decode steps."""
        self._computed, self._stalled_seconds = 0, 0.0

    def _limit(self) -> int | None:
        return self._budget if any(self._rows) else None

    def _is_idle(self) -> bool:
        return not self._insertions
