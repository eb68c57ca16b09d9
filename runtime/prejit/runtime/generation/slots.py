"""Slots over one cache, for one caller: requests that enter together, and the steps that give their tokens.

    insert   put requests into free slots: copy the cached parts of their prompts, compute the rest
    step     return the next token, or several, of every live slot
    evict    free a slot; a slot whose request is finished is free by itself

All rows share one cache, which grows to the next context bucket when its longest text needs it. Cache, tokens
and positions stay on the device; the host reads only the new tokens. The tokens of a request do not depend on
the other rows of its batch or on when it joined: the programs compute rows independently, and the random
numbers of a row come from its seed and its position alone. `continuous_batch.Batch` adds what many callers
need.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.insertion import Arrival, choose_slots, inserting
from prejit.runtime.generation.kv_cache import KVCache
from prejit.runtime.generation.options import Request
from prejit.runtime.generation.prefill import Chunks, Entering, Limit, no_limit, whole
from prejit.runtime.generation.rows import CachedText, Row, Token, admit
from prejit.runtime.generation.sampling_arguments import Logprob

if TYPE_CHECKING:
    from prejit.runtime.generation.cache_growth import Growth
    from prejit.runtime.generation.decode import Call, Decoding, Masks
    from prejit.runtime.generation.prefixes import PrefixCache

_LASTING_TOKENS = 32
"""A new cache uses the smallest context bucket with room for this many more tokens; growing it costs about
one decode step."""


def nothing() -> None:
    """Do nothing while the device decodes."""


class Slots:
    """Slots over one cache. Calls from several threads wait for each other.

    A free slot keeps what it has cached: a prompt that begins like the last text of a slot, as in a
    conversation that continues, computes only the rest. If a step fails or is interrupted, all slots become
    free, because the cache may be half written.
    """

    def __init__(
        self, decoder: DecoderPrograms, slots: int = 1, *, largest: tuple[int, int] | None = None
    ) -> None:
        """Make free slots. The first insertion allocates the cache.

        Args:
            decoder: the programs.
            slots: how many; rounded up to one of the bundle's batch buckets.
            largest: the batch and the context that the cache may grow to, each one of the bundle's buckets;
                None: as many slots as asked for, and the longest context.

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
        self._prefixes: PrefixCache | None = None
        self._decoding: Decoding | None = None  # the first token needs neither
        self._growth: Growth | None = None
        self._budget = 0  # how many positions of prompts the step that runs may compute
        self._lock = threading.RLock()

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self._rows)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free_slots())

    def _free_slots(self) -> list[int]:
        """Return free slots, excluding those with tokens not yet returned by `step`."""
        taken = {token.slot for token in self._pending}
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
            started = time.perf_counter()
            arrival, work = self._arrive(requests, no_limit, 1)
            with self._closed_on_error():
                members = whole(work)
                self._enter(members, time.perf_counter() - started, ())
            return arrival.slots

    def step(self, meanwhile: Callable[[], object] = nothing) -> list[Token]:
        """Return the next tokens of live slots: at least one each, in order; empty if no slot is live.

        The step after an insertion returns the tokens of that insertion and decodes nothing.

        Args:
            meanwhile: called once while the device decodes; not called by a step that decodes nothing. It
                must not use this batch.

        Raises:
            RejectError: the bundle is damaged. The last token of a request comes after all files of the
                target were verified.
            StoreError: the disk does not give the bundle's bytes.
        """
        with self._lock:
            tokens = self._take_pending() or self._decode(meanwhile)
        return self._verified(tokens)

    def _verified(self, tokens: list[Token]) -> list[Token]:
        """Return tokens, the last ones of a request after all files were verified."""
        verification = self._decoder.programs.verification
        if any(token.finish_reason is not None for token in tokens):
            verification.finish()
        verification.check()
        if tokens:
            self._decoder.programs.answer()
        return tokens

    def _take_pending(self) -> list[Token]:
        pending, self._pending = self._pending, []
        return pending

    def _decode(self, meanwhile: Callable[[], object]) -> list[Token]:
        """Return what one decode call gives; empty if no slot is live."""
        live = {slot: row for slot, row in enumerate(self._rows) if row is not None}
        if not live:
            return []
        vocab = self._decoder.decoder.vocab_size
        masks = {s: mask for s, row in live.items() if (mask := row.mask(vocab)) is not None}
        with self._closed_on_error():
            return self._step(live, masks, meanwhile)

    def evict(self, slot: int) -> None:
        """Free a slot, whatever it is doing. A free slot stays free.

        Raises:
            UsageError: there is no such slot.
        """
        with self._lock:
            slot = arguments.integer("slot", slot, 0, self.slots - 1)
            if self._rows[slot] is not None:
                self._vacate(slot)
            self._pending = [token for token in self._pending if token.slot != slot]

    def close(self) -> None:
        """Free all slots and the memory of the cache. The batch can be used again."""
        with self._lock:
            self._rows = [None] * len(self._rows)
            self._held = [CachedText() for _ in self._rows]
            self._pending = []
            self._cache = self._growth = self._decoding = None

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # includes ctrl-C; donated arrays may be gone
            self.close()
            raise

    # ------------------------------------------------------------------ insertion

    def _arrive(
        self, requests: Sequence[Request], limit: Limit, together: int
    ) -> tuple[Arrival, Generator[int, None, dict[int, Entering]]]:
        """Reserve slots for requests, and make room for them in the cache. Return also what computes them."""
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
        with self._closed_on_error():
            context = self._reserve(rows)
        slots = choose_slots(self._decoder, rows, self._free_slots(), dict(enumerate(self._held)))
        with self._closed_on_error():
            self._keep_shared(requests, slots)
        held = {slot: self._held[slot] for slot in slots}
        for slot in slots:
            self._held[slot] = CachedText()
        arrival = Arrival(rows, masks, slots, held, context, together)
        work = inserting(self._decoder, self._current, self._grow, arrival, limit, self._prefixes)
        return arrival, work

    def _keep_shared(self, requests: Sequence[Request], slots: Sequence[int]) -> None:
        """Keep what later prompts may share, before these requests overwrite the slots."""

    def _current(self) -> KVCache:
        assert self._cache is not None
        return self._cache

    def _enter(
        self, members: Mapping[int, Entering], seconds: float, evicted: Collection[int]
    ) -> None:
        """Make rows live, whose prompts are in the cache now, but for those that have left meanwhile."""
        cache = self._current()
        self._decoder.programs.prepare(self._decoder.decode_for(*cache.bucket).name)
        for slot, member in members.items():
            if slot in evicted:
                self._clear(slot)
                continue
            self._rows[slot] = row = member.row
            row.usage.prefill_seconds += seconds
            row.cached = len(row.request.prompt) - member.can_decode
            if member.token is not None:
                self._pending.append(self._take(slot, row, member.token, member.logprob))
        # The counts do not include the new rows.
        live = (row for row in self._rows if row is not None)
        self._forget(counts=any(row.request.sampling.needs_history for row in live))

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
            drafts = decoder.draft is not None and len(rows) == 1 and rows[0].request.draft
            if verify is not None and (drafts or any(row.lookup is not None for row in rows)):
                decoder.programs.prepare(verify.name)
            self._rows += [None] * (bucket[0] - len(self._rows))
            self._held += [CachedText() for _ in range(bucket[0] - len(self._held))]
            self._cache = KVCache(decoder, *bucket)
            return bucket[1]
        return decoder.context_for(need)

    def _forget(self, *, counts: bool = False) -> None:
        """Drop the device's copy of the live rows, and of their token counts if they changed too."""
        if self._decoding is not None:
            self._decoding.reset(counts=counts)

    def _growing(self) -> Growth:
        if self._growth is None:
            from prejit.runtime.generation.cache_growth import Growth

            self._growth = Growth(self._decoder)
        return self._growth

    def _grow(self, context: int) -> Chunks:
        """Let the cache grow. A piece of it counts as all the positions that a step may compute."""
        while self._current().context < context:
            growth, cache = self._growing(), self._current()
            if growth.allocate(*growth.longer(cache)):
                self._cache = growth.moved(cache, {row: row for row in range(cache.batch)})
            else:
                yield self._budget

    # ------------------------------------------------------------------ decoding

    def _step(
        self, live: Mapping[int, Row], masks: Masks, meanwhile: Callable[[], object]
    ) -> list[Token]:
        started = time.perf_counter()
        assert self._cache is not None
        longest = max(len(row.token_ids) for row in live.values())
        if longest > self._cache.context:
            whole(self._grow(self._decoder.context_for(longest)))
        ends = (None if r.left is None else len(r.token_ids) + r.left - 1 for r in live.values())
        if self._cache.context < self._longest:
            self._growing().prepare(self._cache, longest, ends, self._is_idle())
        if self._decoding is None:
            from prejit.runtime.generation.decode import Decoding  # the first token needs none

            self._decoding = Decoding(self._decoder)
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
        self._forget()
        self._rest()

    def _is_idle(self) -> bool:
        """Return whether no prompt is being computed."""
        return True

    def _rest(self) -> None:
        """Free what is allocated for the next cache if no request is left that could need it."""
        if self._growth is not None and not any(self._rows) and self._is_idle():
            self._growth.drop()

    def _clear(self, slot: int, counts: Mapping[int, int] | None = None) -> None:
        """Reset a slot to zeros. Masked attention multiplies by 0, and NaN * 0 is NaN, so NaNs would leak."""
        self._held[slot] = CachedText()
        if self._cache is not None:
            empty = KVCache(self._decoder, self._decoder.batches[0], self._cache.context)
            self._cache.copy_rows(empty, {slot: 0}, counts)
