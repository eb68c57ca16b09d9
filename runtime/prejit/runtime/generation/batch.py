"""Continuous batching over compiled programs: slots that requests join and leave at any step.

    insert   put requests into free slots: copy the cached parts of their prompts, compute the rest
    step     return the next token, or several, of every live slot
    evict    free a slot; a slot whose request is finished is free by itself

All rows share one cache, which grows to the next context bucket when its longest text needs it. Cache,
tokens and positions stay on the device; the host reads only the new tokens. The tokens of a request do not
depend on the other rows of its batch or on when it joined: the programs compute rows independently, and the
random numbers of a row come from its seed and its position alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.decode import Call, Decoding, Masks
from prejit.runtime.generation.decoder_programs import DecoderPrograms, common_length
from prejit.runtime.generation.kv_cache import KVCache, Prefix
from prejit.runtime.generation.options import Request
from prejit.runtime.generation.prefill import Entering, compute_prefix, fill, fill_aside
from prejit.runtime.generation.rows import Row, Token, admit
from prejit.runtime.generation.sampling import Logprob

_LASTING_TOKENS = 32
"""A new cache uses the smallest context bucket with room for this many more tokens; growing it costs about
one decode step."""
_SHARED_TOKENS = 16
"""Requests inserted together share the computation of a common beginning of at least this many tokens."""


@final
class Batch:
    """Slots over one cache. Calls from several threads wait for each other.

    A free slot keeps what it has cached: a prompt that begins like the last text of a slot, as in a
    conversation that continues, computes only the rest. If a step fails or is interrupted, all slots become
    free, because the cache may be half written.
    """

    def __init__(self, decoder: DecoderPrograms, slots: int = 1) -> None:
        """Make free slots. The first insertion allocates the cache.

        Args:
            decoder: the programs.
            slots: how many; rounded up to one of the bundle's batch buckets.

        Raises:
            UsageError: the bundle has no batch bucket for this many.
        """
        slots = arguments.integer("slots", slots, 1)
        self._decoder = decoder
        self._rows: list[Row | None] = [None] * decoder.batch_for(slots)
        self._held: list[list[int]] = [[] for _ in self._rows]  # the cached tokens of free slots
        self._cache: KVCache | None = None
        self._pending: list[Token] = []  # first tokens, for the next step to return
        self._decoding = Decoding(decoder)
        self._growing = 0  # the context whose successor is being made ready
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
        pending = {token.slot for token in self._pending}
        return [s for s, row in enumerate(self._rows) if row is None and s not in pending]

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
        self._decoder.programs.ask()
        for request in requests:
            arguments.instance("request", request, Request)
        with self._lock:
            if len(requests) > self.free:
                raise UsageError(
                    f"expected at most {self.free} requests, as many as slots are free; found "
                    f"{len(requests)}",
                    hint="evict one, or step until one is finished",
                )
            rows = [admit(request, self._decoder) for request in requests]
            masks = [row.mask(self._decoder.decoder.vocab_size) for row in rows]
            if not rows:
                return ()
            with self._closed_on_error():
                return self._insert(rows, masks)

    def step(self) -> list[Token]:
        """Return the next tokens of live slots: at least one each, in order; empty if no slot is live.

        The step after an insertion returns the tokens of that insertion and decodes nothing.

        Raises:
            RejectError: the bundle is damaged. The last token of a request comes after all files of the
                target were verified.
            StoreError: the disk does not give the bundle's bytes.
        """
        tokens = self._next()
        verification = self._decoder.programs.verification
        if any(token.finish_reason is not None for token in tokens):
            verification.finish()
        verification.check()
        if tokens:
            self._decoder.programs.answer()
        return tokens

    def _next(self) -> list[Token]:
        with self._lock:
            if self._pending:
                pending, self._pending = self._pending, []
                return pending
            live = {slot: row for slot, row in enumerate(self._rows) if row is not None}
            if not live:
                return []
            vocab = self._decoder.decoder.vocab_size
            masks = {s: mask for s, row in live.items() if (mask := row.mask(vocab)) is not None}
            with self._closed_on_error():
                return self._step(live, masks)

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
            self._held = [[] for _ in self._rows]
            self._pending = []
            self._cache = None
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

    def _insert(self, rows: list[Row], masks: list[np.ndarray[Any, Any] | None]) -> tuple[int, ...]:
        started = time.perf_counter()
        cache = self._reserve(rows)
        slots = self._choose_slots(rows)
        members = dict(zip(slots, self._entering(rows, masks, slots, cache), strict=True))
        for slot in slots:
            self._held[slot] = []
        waiting = {slot: member for slot, member in members.items() if not member.can_decode}
        # Texts about a source begin in the cache that its encoder makes.
        reads = self._decoder.source is not None
        aside = members if reads else self._aside(waiting, cache.context)
        copied: dict[Prefix, dict[int, int]] = {}
        for slot, member in members.items():
            if member.prefix is not None and slot not in aside:
                copied.setdefault(member.prefix, {})[slot] = 0
        for prefix, to in copied.items():
            cache.copy_rows(prefix.at(cache.context), to)
        in_place = {slot: member for slot, member in waiting.items() if slot not in aside}
        fill(self._decoder, cache, in_place)
        fill_aside(self._decoder, cache, aside)
        self._decoder.prepare_decode((cache.batch, cache.context))
        seconds = time.perf_counter() - started
        self._decoding.reset()
        for slot, member in members.items():
            self._rows[slot] = row = member.row
            row.usage.prefill_seconds += seconds
            row.cached = len(row.request.prompt) - member.can_decode
            if member.token is not None:
                self._pending.append(self._take(slot, row, member.token, member.logprob))
        if any(row is not None and row.request.sampling.needs_history for row in self._rows):
            self._decoding.reset_counts()  # they do not include the new rows
        return slots

    def _reserve(self, rows: Sequence[Row]) -> KVCache:
        """Return the cache, allocated or grown so that these rows fit."""
        decoder, limit = self._decoder, self._decoder.contexts[-1]
        need = 1
        for row in rows:
            prompt, left = len(row.token_ids), row.left
            # The last token need not enter the cache, so a full context still gives one token.
            whole = limit if left is None else prompt + left - 1
            if decoder.copies:
                lasting = min(whole, prompt + _LASTING_TOKENS)
            else:  # this cache cannot grow, so it must also have room for rows that join later
                lasting = whole if self.slots == 1 else limit
            need = max(need, min(lasting, limit))
            if decoder.copies and row.request.prefix is not None:
                need = max(need, row.request.prefix.context)
        longest = max(len(row.token_ids) for row in rows)
        if self._cache is None:
            bucket = decoder.bucket_for(len(self._rows), need)
            # XLA loads the programs in a thread while this thread allocates the first arrays.
            decoder.prepare(len(self._rows), need, longest, bucket)
            verify = decoder.verify_for(*bucket)
            if verify is not None and any(row.lookup is not None for row in rows):
                decoder.programs.prepare(verify.name)
            self._rows += [None] * (bucket[0] - len(self._rows))
            self._held += [[] for _ in range(bucket[0] - len(self._held))]
            self._cache = KVCache(decoder, *bucket)
        elif self._cache.context < need:
            self._grow(decoder.context_for(need))
        assert self._cache is not None
        return self._cache

    def _grow(self, context: int) -> None:
        assert self._cache is not None
        if self._decoder.copies:
            self._cache = self._cache.grown(context)
        elif self.free == self.slots:
            self._cache = KVCache(self._decoder, self._cache.batch, context)
            self._held = [[] for _ in self._rows]
        else:
            raise UsageError(
                f"expected a bundle whose caches can grow from {self._cache.context} to {context}, "
                "found an older one",
                hint="build the bundle again with this version of prejit",
            )

    def _choose_slots(self, rows: Sequence[Row]) -> tuple[int, ...]:
        """Return a free slot for each row: the one with most of its prompt cached, or else the emptiest."""
        free = self._free_slots()
        chosen = []
        for row in rows:
            prompt = row.request.prompt
            best = max(
                free,
                key=lambda s: (
                    self._decoder.reusable(self._held[s], prompt),
                    -len(self._held[s]),
                    -s,
                ),
            )
            free.remove(best)
            chosen.append(best)
        return tuple(chosen)

    def _entering(
        self,
        rows: Sequence[Row],
        masks: Sequence[np.ndarray[Any, Any] | None],
        slots: Sequence[int],
        cache: KVCache,
    ) -> Iterator[Entering]:
        """Yield each row with the part of its prompt that its slot or a prefix has cached."""
        shared = self._shared_prefix(rows, slots, cache.context)
        for row, mask, slot in zip(rows, masks, slots, strict=True):
            prompt = row.request.prompt
            start, prefix = self._decoder.reusable(self._held[slot], prompt), None
            for known in (row.request.prefix, shared):
                if known is not None and self._decoder.copies:
                    length = self._decoder.reusable(known.token_ids, prompt)
                    if length > start:
                        start, prefix = length, known
            if prefix is None or prefix is not shared or row is not rows[0]:
                row.usage.reused_tokens = start  # the shared prefix is charged to the first row
            yield Entering(row, start, mask, prefix)

    def _shared_prefix(
        self, rows: Sequence[Row], slots: Sequence[int], context: int
    ) -> Prefix | None:
        """Compute the common beginning of all prompts, or return None if that would not save much."""
        first = rows[0].request
        if (
            len(rows) == 1
            or self._decoder.source is not None
            or not self._decoder.can_fill_aside(len(self._rows), context, len(first.prompt))
        ):
            return None
        prompts = [row.request.prompt for row in rows]
        common = min(
            *(common_length(first.prompt, prompt) for prompt in prompts),
            *(len(prompt) - 1 for prompt in prompts),
        )
        for row, slot in zip(rows, slots, strict=True):
            known = () if row.request.prefix is None else row.request.prefix.token_ids
            cached = max(
                self._decoder.reusable(texts, row.request.prompt)
                for texts in (known, self._held[slot])
            )
            if common - cached < _SHARED_TOKENS:
                return None
        tokens = list(first.prompt[:common])
        return compute_prefix(self._decoder, tokens, context, rows[0].usage, first.prefix)

    def _aside(self, waiting: Mapping[int, Entering], context: int) -> dict[int, Entering]:
        """Return the rows whose prompts are computed in a smaller cache and copied.

        A prefill in place computes every row of the batch, idle ones included. It is the better way for half
        of the rows or more, and for a row whose slot holds the beginning of its prompt.
        """
        if self._decoder.batches[0] == len(self._rows) or 2 * len(waiting) >= len(self._rows):
            return {}
        longest = max((len(member.row.request.prompt) for member in waiting.values()), default=0)
        if not self._decoder.can_fill_aside(len(self._rows), context, longest):
            return {}
        return {
            slot: member
            for slot, member in waiting.items()
            if member.prefix is not None or not member.start
        }

    # ------------------------------------------------------------------ decoding

    def _step(self, live: Mapping[int, Row], masks: Masks) -> list[Token]:
        started = time.perf_counter()
        assert self._cache is not None
        longest = max(len(row.token_ids) for row in live.values())
        if longest > self._cache.context:
            self._grow(self._decoder.context_for(longest))
        self._prepare_growth(self._cache, longest, live)
        call = self._decoding.run(self._cache, self._rows, masks)
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

    def _prepare_growth(self, cache: KVCache, longest: int, live: Mapping[int, Row]) -> None:
        """Begin to load the programs of the next context, once, when half of this one is full."""
        if 2 * longest <= cache.context or self._growing == cache.context:
            return
        ends = (
            len(row.token_ids) + row.left - 1 if row.left is not None else cache.context + 1
            for row in live.values()
        )
        if max(ends) > cache.context:
            self._growing = cache.context
            self._decoder.prepare_growth(cache.batch, cache.context)

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
            elif len(row.token_ids) > self._decoder.contexts[-1]:
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
        self._held[slot] = row.token_ids[: row.cached] if exact else []
        self._rows[slot] = None
        self._decoding.reset()

    def _clear(self, slot: int) -> None:
        """Reset a slot to zeros. Masked attention multiplies by 0, and NaN * 0 is NaN, so NaNs would leak."""
        self._held[slot] = []
        if self._cache is not None and self._decoder.copies:
            empty = KVCache(self._decoder, self._decoder.batches[0], self._cache.context)
            self._cache.copy_rows(empty, {slot: 0})
