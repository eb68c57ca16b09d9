"""Continuous batching over compiled programs: slots that requests join and leave at any step.

    insert   put requests into free slots: copy the cached parts of their prompts, compute the rest
    begin    put requests into free slots; the next steps compute their prompts in chunks
    step     return the next token, or several, of every live slot
    evict    free a slot; a slot whose request is finished is free by itself

All rows share one cache, which grows to the next context bucket when its longest text needs it. A large one
is allocated in pieces by the steps before that. Cache, tokens and positions stay on the device; the host
reads only the new tokens. The tokens of a request do not depend on the other rows of its batch or on when it
joined: the programs compute rows independently, and the random numbers of a row come from its seed and its
position alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.decode import Call, Decoding, Masks
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.insertion import Arrival, choose_slots, inserting
from prejit.runtime.generation.kv_cache import Allocation, KVCache, piece_count
from prejit.runtime.generation.options import Request
from prejit.runtime.generation.prefill import Chunks, Entering, Limit, no_limit, whole
from prejit.runtime.generation.rows import CachedText, Row, Token, admit
from prejit.runtime.generation.sampling import Logprob

if TYPE_CHECKING:
    from prejit.runtime.generation.prefix_cache import PrefixCache

_LASTING_TOKENS = 32
"""A new cache uses the smallest context bucket with room for this many more tokens; growing it costs about
one decode step."""
_TOKENS_PER_PIECE = 4
"""The longer cache is allocated, a piece with each step, once the longest text has room for no more than this
many tokens for each piece."""
PREFILL_TOKENS = 64
"""How many positions of prompts are computed between two decode steps, if nothing else is said."""
_LONGEST_STALL_SECONDS = 1.0
"""After so long without a decode step, no more than `prefill_tokens` positions are computed before it."""


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class _Insertion:
    """Requests whose prompts are being computed.

    Attributes:
        slots: where they go.
        work: computes the next chunk, and returns the rows at its end.
        seconds: how long it has taken so far.
        positions: of the next chunk; 0: not known before it begins.
        evicted: slots whose requests have left meanwhile; they are free when the work is done.
    """

    slots: tuple[int, ...]
    work: Generator[int, None, dict[int, Entering]]
    seconds: float
    positions: int = 0
    evicted: set[int] = field(default_factory=set)


@final
class Batch:
    """Slots over one cache. Calls from several threads wait for each other.

    A free slot keeps what it has cached: a prompt that begins like the last text of a slot, as in a
    conversation that continues, computes only the rest. If a step fails or is interrupted, all slots become
    free, because the cache may be half written.
    """

    def __init__(
        self,
        decoder: DecoderPrograms,
        slots: int = 1,
        *,
        largest: tuple[int, int] | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
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
            prefixes: earlier prompts, and where to keep new ones; None: nothing is kept.
            together: how many rows a cache may have in which prompts are computed before they are copied,
                if it is not the smallest batch.

        Raises:
            UsageError: the bundle has no batch bucket for this many.
        """
        slots = arguments.integer("slots", slots, 1)
        self._decoder = decoder
        self._rows: list[Row | None] = [None] * decoder.batch_for(slots)
        self._held = [CachedText() for _ in self._rows]  # what free slots have cached
        self._cache: KVCache | None = None
        self._pending: list[Token] = []  # first tokens, for the next step to return
        self._largest = largest or (decoder.batches[-1], decoder.contexts[-1])
        self._longest = self._largest[1]
        self._prefill_tokens = prefill_tokens
        self._prefixes = prefixes
        self._together = together
        self._insertions: deque[_Insertion] = (
            deque()
        )  # not finished; the next to compute comes first
        self._budget = prefill_tokens  # how many positions the step that runs may compute
        self._computed = (
            0  # how many were computed since the last decode step, and how long that took
        )
        self._stalled_seconds = 0.0
        self._decoding = Decoding(decoder)
        self._growing = 0  # the context whose successor is being made ready
        self._allocation: Allocation | None = None  # of the cache that the rows move to next
        self._lock = threading.RLock()

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self._rows)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free_slots())

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
            caches = (self._cache, self._allocation)
            return tokens, sum(each.size_bytes for each in caches if each is not None)

    def _free_slots(self) -> list[int]:
        """Return free slots, excluding those with tokens not yet returned by `step`."""
        taken = {token.slot for token in self._pending}
        taken.update(slot for insertion in self._insertions for slot in insertion.slots)
        return [s for s, row in enumerate(self._rows) if row is None and s not in taken]

    def insert(self, *requests: Request) -> tuple[int, ...]:
        """Put requests into free slots. Their first tokens come with the next step.

        Args:
            *requests: at most as many as there are free slots. A common beginning of requests that are
                inserted together is computed once.

        Returns:
            Their slots, in the same order.

        Raises:
            UsageError: too few slots are free, or this model or bundle cannot serve a request.
            ContextError: a prompt is longer than the longest context.
        """
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
            for rows in reversed([size for size in decoder.batches if 1 < size <= most]):
                size = decoder.prefill_for(rows, context, prompt_tokens).bucket["prompt"]
                if prompt_tokens > size or rows * size > positions:
                    continue
                is_aside = rows <= max(self._together, decoder.batches[0]) and rows < self.slots
                if rows == self.slots or (
                    is_aside and decoder.can_fill_aside(self.slots, context, size, rows)
                ):
                    return rows, size
            return 1, prompt_tokens

    def step(
        self, meanwhile: Callable[[], object] = _nothing, prefill_tokens: int | None = None
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
        tokens = self._next(meanwhile, prefill_tokens)
        verification = self._decoder.programs.verification
        if any(token.finish_reason is not None for token in tokens):
            verification.finish()
        verification.check()
        if tokens:
            self._decoder.programs.answer()
        return tokens

    def _next(self, meanwhile: Callable[[], object], prefill_tokens: int | None) -> list[Token]:
        with self._lock:
            self._budget = self._prefill_tokens if prefill_tokens is None else prefill_tokens
            if not any(self._rows):
                self._begin_turn()  # nobody waits
            if not self._pending:
                self._compute_prompts()
            if self._pending:
                pending, self._pending = self._pending, []
                return pending
            self._begin_turn()
            live = {slot: row for slot, row in enumerate(self._rows) if row is not None}
            if not live:
                return []
            vocab = self._decoder.decoder.vocab_size
            masks = {s: mask for s, row in live.items() if (mask := row.mask(vocab)) is not None}
            with self._closed_on_error():
                return self._step(live, masks, meanwhile)

    def evict(self, slot: int) -> None:
        """Free a slot, whatever it is doing. A free slot stays free.

        If requests began together, the slot is free when the prompts of the others are computed.

        Raises:
            UsageError: there is no such slot.
        """
        with self._lock:
            slot = arguments.integer("slot", slot, 0, self.slots - 1)
            if self._rows[slot] is not None:
                self._vacate(slot)
            for insertion in [one for one in self._insertions if slot in one.slots]:
                insertion.evicted.add(slot)
                if insertion.evicted.issuperset(insertion.slots):
                    self._insertions.remove(insertion)
                    self._rest()
            self._pending = [token for token in self._pending if token.slot != slot]

    def is_ready_for(self, slots: int) -> bool:
        """Return whether `resize` can move at once. If not, prepare its programs, or a piece of its cache."""
        with self._lock:
            cache, batch = self._cache, self._decoder.batch_for(slots)
            if cache is None or not any(self._rows):
                return True
            if not self._decoder.can_copy((cache.batch, cache.context), (batch, cache.context)):
                return False
            programs = self._decoder.programs
            needed = (
                self._decoder.copy_for(cache.batch, cache.context, batch, cache.context).name,
                self._decoder.decode_for(batch, cache.context).name,
            )
            missing = [name for name in needed if not programs.ready(name)]
            programs.prepare_later(*missing)
            return not missing and self._allocate(batch, cache.context)

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
            idle = [slot for slot in range(self.slots) if slot not in live]
            idle.sort(key=lambda slot: -len(self._held[slot].token_ids))
            kept = list(range(self.slots)) if batch >= self.slots else sorted((live + idle)[:batch])
            moved = {old: new for new, old in enumerate(kept)}
            with self._closed_on_error():
                if not live:
                    self.keep()
                self._cache = self._moved(batch, moved) if live else None
            held = self._held if self._cache is not None else [CachedText() for _ in self._held]
            new_rows: list[Row | None] = [None] * batch
            new_held = [CachedText() for _ in range(batch)]
            for old, new in moved.items():
                new_rows[new], new_held[new] = self._rows[old], held[old]
            self._rows, self._held = new_rows, new_held
            self._decoding.reset()
            self._decoding.reset_counts()
            return {slot: moved[slot] for slot in live}

    def _moved(self, batch: int, rows: Mapping[int, int]) -> KVCache:
        old = self._current()
        moved = self._allocated(batch, old.context)
        moved.copy_rows(old, {new: slot for slot, new in rows.items()})
        return moved

    def _allocate(self, batch: int, context: int) -> bool:
        """Allocate a piece of the cache that the rows are to move to; return whether it is complete."""
        if self._allocation is None or self._allocation.bucket != (batch, context):
            self._allocation = None  # its memory goes first
            self._allocation = Allocation(self._decoder, batch, context)
        return self._allocation.advance()

    def _allocated(self, batch: int, context: int) -> KVCache:
        """Return an empty cache. `_allocate` may have allocated a part of it before."""
        while not self._allocate(batch, context):
            pass
        assert self._allocation is not None
        made, self._allocation = self._allocation, None
        return KVCache(self._decoder, batch, context, made.arrays())

    def keep(self) -> None:
        """Keep what free slots have cached among the prefixes too, for prompts that enter other slots."""
        with self._lock:
            if self._prefixes is not None and self._cache is not None:
                for slot, held in enumerate(self._held):
                    self._prefixes.keep_row(held, self._cache, slot)

    def close(self) -> None:
        """Free all slots and the memory of the cache. The batch can be used again."""
        with self._lock:
            self._rows = [None] * len(self._rows)
            self._held = [CachedText() for _ in self._rows]
            self._pending = []
            self._insertions.clear()
            self._begin_turn()
            self._cache = self._allocation = None
            self._decoding.reset()
            self._decoding.reset_counts()

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # includes ctrl-C; donated arrays may be gone
            self.close()
            raise

    # ------------------------------------------------------------------ insertion

    def _begin(self, requests: Sequence[Request], limit: Limit, together: int) -> _Insertion:
        """Reserve slots for requests, and make room for them in the cache.

        Args:
            requests: the requests.
            limit: how much a chunk may compute.
            together: how many prompts one call may compute aside.
        """
        self._decoder.programs.ask()
        for request in requests:
            arguments.instance("request", request, Request)
        if len(requests) > self.free:
            raise UsageError(
                f"expected at most {self.free} requests, as many as slots are free; found "
                f"{len(requests)}",
                hint="evict one, or step until one is finished",
            )
        rows = [admit(request, self._decoder) for request in requests]
        masks = [row.mask(self._decoder.decoder.vocab_size) for row in rows]
        started = time.perf_counter()
        with self._closed_on_error():
            context = self._reserve(rows)
        slots = choose_slots(self._decoder, rows, self._free_slots(), dict(enumerate(self._held)))
        with self._closed_on_error():
            for request, slot in zip(requests, slots, strict=True):
                self._share(request, slot)
        held = {slot: self._held[slot] for slot in slots}
        for slot in slots:
            self._held[slot] = CachedText()
        arrival = Arrival(rows, masks, slots, held, context, together)
        work = inserting(self._decoder, self._current, self._grow, arrival, limit, self._prefixes)
        insertion = _Insertion(slots, work, time.perf_counter() - started)
        self._insertions.append(insertion)
        return insertion

    def _share(self, request: Request, slot: int) -> None:
        """Keep what the other slots have in common with a prompt, and what it overwrites in its own one."""
        if self._prefixes is None:
            return
        texts = [self._held[at] if row is None else row.held for at, row in enumerate(self._rows)]
        common = [text.reusable(self._decoder, request) for text in texts]
        nearest = max(range(self.slots), key=lambda at: (common[at], at == slot))
        if nearest != slot:
            text = CachedText(texts[nearest].token_ids[: common[nearest]], request.namespace)
            self._prefixes.keep_row(text, self._current(), nearest)
        if common[slot] < len(texts[slot].token_ids):  # a text that continues needs no copy
            self._prefixes.keep_row(texts[slot], self._current(), slot)

    def _current(self) -> KVCache:
        assert self._cache is not None
        return self._cache

    def _advance(self, insertion: _Insertion) -> bool:
        """Compute the next chunk of an insertion; return whether there are more."""
        started = time.perf_counter()
        self._computed += insertion.positions
        with self._closed_on_error():
            try:
                insertion.positions = next(insertion.work)
            except StopIteration as done:
                self._insertions.remove(insertion)
                seconds = insertion.seconds + time.perf_counter() - started
                self._enter(done.value, seconds, insertion.evicted)
                return False
            finally:
                seconds = time.perf_counter() - started
                insertion.seconds += seconds
                self._stalled_seconds += seconds
        return True

    def _enter(
        self, members: Mapping[int, Entering], seconds: float, evicted: Collection[int]
    ) -> None:
        """Make rows live, whose prompts are in the cache now, but for those that have left meanwhile."""
        cache = self._current()
        self._decoder.prepare_decode((cache.batch, cache.context))
        self._decoding.reset()
        for slot, member in members.items():
            if slot in evicted:
                self._clear(slot)
                continue
            self._rows[slot] = row = member.row
            row.usage.prefill_seconds += seconds
            row.cached = len(row.request.prompt) - member.can_decode
            if member.token is not None:
                self._pending.append(self._take(slot, row, member.token, member.logprob))
        if any(row is not None and row.request.sampling.needs_history for row in self._rows):
            self._decoding.reset_counts()  # they do not include the new rows

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
            budget = min(budget, self._prefill_tokens)
        return self._computed > 0 and self._computed + positions > budget

    def _begin_turn(self) -> None:
        """Begin to count what is computed between two decode steps."""
        self._computed, self._stalled_seconds = 0, 0.0

    def _limit(self) -> int | None:
        return self._budget if any(self._rows) else None

    def _reserve(self, rows: Sequence[Row]) -> int:
        """Return the context that these rows need. A first cache is allocated; another one can grow later."""
        decoder, limit = self._decoder, self._longest
        need = 1
        for row in rows:
            prompt, left = len(row.token_ids), row.left
            # The last token need not enter the cache, so a full context still gives one token.
            whole = limit if left is None else prompt + left - 1
            need = max(need, min(whole, prompt + _LASTING_TOKENS, limit))
            if row.request.prefix is not None:
                need = max(need, row.request.prefix.context)
        longest = max(len(row.token_ids) for row in rows)
        if self._cache is None:
            bucket = decoder.bucket_for(len(self._rows), need, self._largest)
            # XLA loads the programs in a thread while this thread allocates the first arrays.
            decoder.prepare(len(self._rows), need, longest, bucket)
            verify = decoder.verify_for(*bucket)
            if verify is not None and any(row.lookup is not None for row in rows):
                decoder.programs.prepare(verify.name)
            self._rows += [None] * (bucket[0] - len(self._rows))
            self._held += [CachedText() for _ in range(bucket[0] - len(self._held))]
            self._cache = KVCache(decoder, *bucket)
            return bucket[1]
        return decoder.context_for(need)

    def _grow(self, context: int) -> Chunks:
        """Let the cache grow. A piece of it counts as all the positions that a step may compute."""
        while self._current().context < context:
            if self._allocate(*self._longer()):
                longer = self._allocated(*self._longer())
                longer.copy_rows(self._current(), {row: row for row in range(longer.batch)})
                self._cache = longer
            else:
                yield self._budget

    def _longer(self) -> tuple[int, int]:
        """Return the bucket of the next longer cache."""
        cache = self._current()
        return cache.batch, self._decoder.context_after(cache.context)

    # ------------------------------------------------------------------ decoding

    def _step(
        self, live: Mapping[int, Row], masks: Masks, meanwhile: Callable[[], object]
    ) -> list[Token]:
        started = time.perf_counter()
        assert self._cache is not None
        longest = max(len(row.token_ids) for row in live.values())
        if longest > self._cache.context:
            whole(self._grow(self._decoder.context_for(longest)))
        self._prepare_growth(longest, live)
        call = self._decoding.run(self._cache, self._rows, masks, meanwhile)
        seconds = time.perf_counter() - started
        return [
            token
            for slot, row in live.items()
            for token in self._collect(call, slot, row, seconds, len(live))
        ]

    def _collect(self, call: Call, slot: int, row: Row, seconds: float, live: int) -> list[Token]:
        """Return the tokens of one slot from a call, and add its share of the cost to its usage."""
        count, usage = call.counts[slot], row.usage
        usage.decode_seconds += seconds
        usage.passes += call.passes
        usage.computed_tokens += call.width * self.slots / live
        usage.programs[call.program] = None
        if slot in call.drafted:
            usage.drafted_tokens += call.drafted[slot]
            usage.accepted_tokens += count - 1
        row.cached += count
        found = []
        for step in range(count):
            logprob = None
            if (alternatives := row.request.logprobs) is not None:
                logprob = call.logprob(step, slot, alternatives)
            found.append(self._take(slot, row, int(call.tokens[step, slot]), logprob))
            if found[-1].finish_reason is not None:
                if (call.tokens[step + 1 : count, slot] < 0).any():
                    self._clear(slot)  # the steps after its end computed NaN
                break
        return found

    def _prepare_growth(self, longest: int, live: Mapping[int, Row]) -> None:
        """Load the programs of the next context when half of this one is full; allocate it near the end."""
        context = self._current().context
        if context == self._longest:
            return
        ends = (
            len(row.token_ids) + row.left - 1 if row.left is not None else context + 1
            for row in live.values()
        )
        longer = self._longer()
        begun = self._allocation is not None and self._allocation.bucket == longer
        if max(ends) <= context:
            if begun and not self._insertions:
                self._allocation = None  # the request that needed it is gone
            return
        if 2 * longest > context and self._growing != context:
            self._growing = context
            self._decoder.prepare_growth(self.slots, context)
        is_near = context - longest < _TOKENS_PER_PIECE * piece_count(self._decoder, *longer)
        if is_near and (begun or self._allocation is None):  # a move to another batch comes first
            self._allocate(*longer)

    def _take(self, slot: int, row: Row, token: int, logprob: Logprob | None) -> Token:
        """Add a token to a row's text; free the slot if that finishes its request."""
        reason = None
        if token < 0:
            reason = "mask" if row.allows_none(self._decoder.decoder.vocab_size) else "nan"
        elif token in row.stop:
            reason = "stop"
        else:
            row.token_ids.append(token)
            if row.lookup is not None:
                row.lookup.extend([token])
            if row.left == 0:
                reason = "length"
            elif len(row.token_ids) > self._longest:
                reason = "context"
        if reason is not None:
            self._vacate(slot)
        if reason == "nan":
            self._clear(slot)
        if reason in ("stop", "mask", "nan"):
            return Token(slot, row.usage, None, None, reason)
        return Token(slot, row.usage, token, logprob, reason)

    def _vacate(self, slot: int) -> None:
        row = self._rows[slot]
        assert row is not None
        # A call may have gone on after the end of a text. That is in the state too, but not in the text.
        exact = self._decoder.is_rewindable or row.cached <= len(row.token_ids)
        self._held[slot] = row.held if exact else CachedText()
        self._rows[slot] = None
        self._decoding.reset()
        self._rest()

    def _rest(self) -> None:
        """Free what is allocated for the next cache if no request is left that could need it."""
        if not any(self._rows) and not self._insertions:
            self._allocation = None

    def _clear(self, slot: int) -> None:
        """Reset a slot to zeros. Masked attention multiplies by 0, and NaN * 0 is NaN, so NaNs would leak."""
        self._held[slot] = CachedText()
        if self._cache is not None:
            empty = KVCache(self._decoder, self._decoder.batches[0], self._cache.context)
            self._cache.copy_rows(empty, {slot: 0})
