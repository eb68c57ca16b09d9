"""Continuous batching over compiled programs: slots that requests join and leave at any step.

    insert   puts requests into free slots: copies what is cached of their prompts, computes the rest
    step     gives every live slot its next token, or several of them
    evict    frees a slot; one that is finished is free by itself

All rows share one cache, which grows from one context bucket to the next as its longest text grows. Cache,
tokens and positions stay on the device; the host reads the new tokens. A request's tokens depend neither on
what shares its batch nor on when it joined: rows are computed apart, and a row's random numbers come from its
seed and its position alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.device.executable import DeviceArray, aligned_zeros, to_numpy
from prejit.runtime.errors import UsageError
from prejit.runtime.format.schema import Program
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import KVCache, Prefix, common_length
from prejit.runtime.generation.prefill import (
    Entering,
    compute_prefix,
    fill,
    fill_aside,
    masked_bias,
    read_logprob,
)
from prejit.runtime.generation.request import Logprob, Request, Row, Token, admit
from prejit.runtime.generation.sampling import Sampling, history_row

_CALL_SECONDS = 0.01
"""So long may one call decode before the host sees its tokens: several steps of a small model."""
_LASTING_TOKENS = 32
"""A cache starts in the smallest context that lasts for so many tokens: growing costs about one step."""
_SHARED_TOKENS = 16
"""Prompts that are inserted together and begin alike have that beginning computed once, from here on."""


@final
class Batch:
    """Slots over one cache. Calls from several threads wait for each other.

    A slot that is free keeps what it has cached: a prompt that begins like an earlier text of a slot, as a
    conversation does that goes on, computes only the rest. If a step fails or is interrupted, all slots are
    freed, as the cache may be half written.
    """

    def __init__(self, decoder: DecoderPrograms, slots: int = 1) -> None:
        """Makes free slots. The cache is made with the first insertion.

        Args:
            decoder: the programs.
            slots: how many; rounded up to one of the bundle's batch buckets.

        Raises:
            UsageError: the bundle has no batch bucket of so many.
        """
        slots = arguments.integer("slots", slots, 1)
        self._decoder = decoder
        self._rows: list[Row | None] = [None] * decoder.batch_for(slots)
        self._held: list[list[int]] = [[] for _ in self._rows]
        self._cache: KVCache | None = None
        self._pending: list[Token] = []
        self._sampling: dict[str, DeviceArray] | None = None
        self._history: DeviceArray = None
        self._place: dict[str, DeviceArray] | None = None
        self._step_seconds = _CALL_SECONDS
        self._growing = 0  # the context whose successor is being made ready
        self._lock = threading.RLock()

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self._rows)

    @property
    def free(self) -> int:
        """How many of them are free."""
        return len(self._free_slots())

    def _free_slots(self) -> list[int]:
        """Those whose last tokens were given out, too."""
        told = {token.slot for token in self._pending}
        return [slot for slot, row in enumerate(self._rows) if row is None and slot not in told]

    def insert(self, *requests: Request) -> tuple[int, ...]:
        """Puts requests into free slots. Their first tokens come with the next step.

        Args:
            *requests: at most as many as slots are free. Those that come together and begin alike have
                that beginning computed once.

        Returns:
            Their slots, in the same order.

        Raises:
            UsageError: too few slots are free, or a request is not one that this model can serve.
            ContextError: a prompt is longer than the longest context.
        """
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
            with self._dropped_on_error():
                return self._insert(rows, masks)

    def step(self) -> list[Token]:
        """Gives live slots their next tokens: at least one each, in order; nothing where none is live.

        After an insertion it gives the tokens that came of it, before it decodes more.
        """
        with self._lock:
            if self._pending:
                pending, self._pending = self._pending, []
                return pending
            live = {slot: row for slot, row in enumerate(self._rows) if row is not None}
            if not live:
                return []
            vocab = self._decoder.decoder.vocab_size
            masks = {s: mask for s, row in live.items() if (mask := row.mask(vocab)) is not None}
            with self._dropped_on_error():
                return self._step(live, masks)

    def evict(self, slot: int) -> None:
        """Frees a slot, whatever it is doing. A slot that is free stays free.

        Raises:
            UsageError: there is no such slot.
        """
        with self._lock:
            slot = arguments.integer("slot", slot, 0, self.slots - 1)
            if self._rows[slot] is not None:
                self._vacate(slot)
            self._pending = [token for token in self._pending if token.slot != slot]

    def close(self) -> None:
        """Frees all slots and the memory of the cache. The batch can be used again."""
        with self._lock:
            self._rows = [None] * len(self._rows)
            self._held = [[] for _ in self._rows]
            self._pending = []
            self._cache = self._sampling = self._place = self._history = None

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # ctrl-C among them: donated arrays may be gone
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
        aside = self._aside(waiting, cache.context)
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
        self._sampling = self._place = None
        for slot, member in members.items():
            self._rows[slot] = row = member.row
            row.usage.prefill_seconds += seconds
            if member.token is not None:
                self._pending.append(self._take(slot, row, member.token, member.logprob))
        if any(row is not None and row.request.sampling.needs_history for row in self._rows):
            self._history = None  # it counts what rows have generated, and is made anew with theirs
        return slots

    def _reserve(self, rows: Sequence[Row]) -> KVCache:
        """The cache, with room for what comes."""
        decoder, limit = self._decoder, self._decoder.contexts[-1]
        need = 1
        for row in rows:
            prompt, left = len(row.token_ids), row.left
            # The last token need not enter the cache, so a full context still gives one token.
            all_of_it = limit if left is None else prompt + left - 1
            if decoder.copies:
                lasting = min(all_of_it, prompt + _LASTING_TOKENS)
            else:  # a cache that cannot grow must do for whatever joins later
                lasting = all_of_it if self.slots == 1 else limit
            need = max(need, min(lasting, limit))
            if decoder.copies and row.request.prefix is not None:
                need = max(need, row.request.prefix.context)
        longest = max(len(row.token_ids) for row in rows)
        if self._cache is None:
            bucket = decoder.bucket_for(len(self._rows), need)
            # XLA loads them in a thread while this one makes the first arrays.
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
        """A free slot for each row: one that holds the beginning of its prompt, or else the emptiest."""
        free = self._free_slots()
        chosen = []
        for row in rows:
            prompt = row.request.prompt
            best = max(
                free, key=lambda s: (common_length(self._held[s], prompt), -len(self._held[s]), -s)
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
        """Each row with what of its prompt need not be computed: its slot has it, or a prefix."""
        shared = self._shared_prefix(rows, slots, cache.context)
        for row, mask, slot in zip(rows, masks, slots, strict=True):
            prompt = row.request.prompt
            cached, prefix = common_length(self._held[slot], prompt), None
            for known in (row.request.prefix, shared):
                if known is not None and self._decoder.copies:
                    length = common_length(known.token_ids, prompt)
                    if length > cached:
                        cached, prefix = length, known
            start = min(cached, len(prompt) - 1)  # the last token gives the logits
            if prefix is None or prefix is not shared or row is not rows[0]:
                row.usage.reused_tokens = start  # the first one's was computed now, for all of them
            yield Entering(row, start, mask, prefix)

    def _shared_prefix(
        self, rows: Sequence[Row], slots: Sequence[int], context: int
    ) -> Prefix | None:
        """The beginning that all prompts share, computed now; None where it would not save much."""
        first = rows[0].request
        if len(rows) == 1 or not self._decoder.can_fill_aside(
            len(self._rows), context, len(first.prompt)
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
                common_length(texts, row.request.prompt) for texts in (known, self._held[slot])
            )
            if common - cached < _SHARED_TOKENS:
                return None
        tokens = list(first.prompt[:common])
        return compute_prefix(self._decoder, tokens, context, rows[0].usage, first.prefix)

    def _aside(self, waiting: Mapping[int, Entering], context: int) -> dict[int, Entering]:
        """Those whose prompts are computed in a smaller cache and copied.

        A prefill in place computes every row of the batch, those that rest as well: that is worth it for
        half of them and more, or where the slot itself holds the beginning.
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

    def _step(
        self, live: Mapping[int, Row], masks: Mapping[int, np.ndarray[Any, Any]]
    ) -> list[Token]:
        started = time.perf_counter()
        decoder, cache = self._decoder, self._cache
        assert cache is not None
        longest = max(len(row.token_ids) for row in live.values())
        if longest > cache.context:
            self._grow(decoder.context_for(longest))
            cache = self._cache
            assert cache is not None
        self._prepare_growth(cache, longest, live)
        drafts = {
            slot: draft for slot, row in live.items() if (draft := self._draft(row, cache.context))
        }
        if drafts:
            program = decoder.verify_for(cache.batch, cache.context)
            assert program is not None
            results, counts = self._verify(program, cache, live, drafts, masks)
            width = program.bucket["draft"] + 1
        else:
            program = decoder.decode_for(cache.batch, cache.context)
            steps = self._steps(program, cache.context - longest + 1, live)
            results, counts = self._decode(program, cache, live, steps, masks)
            width = steps
        tokens = to_numpy(results.get("tokens", results.get("token"))).reshape(-1, cache.batch)
        seconds = time.perf_counter() - started
        out = []
        for slot, row in live.items():
            usage = row.usage
            usage.decode_seconds += seconds
            usage.passes += 1 if drafts else counts[slot]
            usage.computed_tokens += width * cache.batch / len(live)
            usage.programs[program.name] = None
            if slot in drafts:
                usage.drafted_tokens += len(drafts[slot])
                usage.accepted_tokens += counts[slot] - 1
            for at in range(counts[slot]):
                token, logprob = int(tokens[at, slot]), None
                if (wanted := row.request.logprobs) is not None:
                    logprob = read_logprob(results, "logprobs", (at, slot), token, wanted)
                out.append(self._take(slot, row, token, logprob))
                if out[-1].finish_reason is not None:
                    if (tokens[at + 1 : counts[slot], slot] < 0).any():
                        self._clear(slot)  # what it computed after its end was no number
                    break
        if not drafts:
            self._step_seconds = seconds / width
        return out

    def _prepare_growth(self, cache: KVCache, longest: int, live: Mapping[int, Row]) -> None:
        """Begins to load what the next context wants, once, where half of this one is full."""
        if 2 * longest <= cache.context or self._growing == cache.context:
            return
        ends = (
            len(row.token_ids) + row.left - 1 if row.left is not None else cache.context + 1
            for row in live.values()
        )
        if max(ends) > cache.context:
            self._growing = cache.context
            self._decoder.prepare_growth(cache.batch, cache.context)

    def _steps(self, program: Program, room: int, live: Mapping[int, Row]) -> int:
        """How many steps one call shall take."""
        if not self._decoder.takes(program, "steps"):
            return 1
        if any(row.request.token_mask is not None for row in live.values()):
            return 1  # it is asked before every token, whatever it said of the last one
        if self._decoder.device.in_cluster:
            return 1  # processes that measured different times would wait for each other for ever
        left = [room if row.left is None else row.left for row in live.values()]
        wanted = int(_CALL_SECONDS / max(self._step_seconds, 1e-6))
        return max(1, min(wanted, room, max(left), _steps_of(self._decoder, program)))

    def _decode(
        self,
        program: Program,
        cache: KVCache,
        live: Mapping[int, Row],
        steps: int,
        masks: Mapping[int, np.ndarray[Any, Any]],
    ) -> tuple[dict[str, DeviceArray], dict[int, int]]:
        put = self._decoder.device.put
        inputs = self._arguments(live, masks)
        if self._place is None:
            token, position, alive = (np.zeros(cache.batch, np.int32) for _ in range(3))
            for slot, row in live.items():
                token[slot], position[slot] = row.token_ids[-1], len(row.token_ids) - 1
                alive[slot] = 1
            self._place = {"token": put(token), "position": put(position), "live": put(alive)}
        inputs |= {**self._place, "steps": put(np.array(steps, np.int32))}
        results = self._decoder.run(program, inputs, cache)
        self._history = results.get("history", self._history)
        self._place |= {name: results[name] for name in ("token", "position")}
        return results, dict.fromkeys(live, steps)

    def _verify(
        self,
        program: Program,
        cache: KVCache,
        live: Mapping[int, Row],
        drafts: Mapping[int, list[int]],
        masks: Mapping[int, np.ndarray[Any, Any]],
    ) -> tuple[dict[str, DeviceArray], dict[int, int]]:
        put = self._decoder.device.put
        tokens = np.zeros((cache.batch, program.bucket["draft"] + 1), np.int32)
        start, length = np.zeros(cache.batch, np.int32), np.zeros(cache.batch, np.int32)
        for slot, row in live.items():
            given = [row.token_ids[-1], *drafts.get(slot, ())]
            tokens[slot, : len(given)] = given
            start[slot], length[slot] = len(row.token_ids) - 1, len(given)
        inputs = self._arguments(live, masks)
        inputs |= {"tokens": put(tokens), "start": put(start), "length": put(length)}
        results = self._decoder.run(program, inputs, cache)
        self._history, self._place = results["history"], None
        accepted = to_numpy(results["accepted"])
        return results, {slot: int(accepted[slot]) for slot in live}

    def _draft(self, row: Row, context: int) -> list[int]:
        """What may follow a row's text, as far as there is room for it."""
        if row.lookup is None or row.request.token_mask is not None:
            return []
        room = context - len(row.token_ids)
        if row.left is not None:
            room = min(room, row.left - 1)
        return row.lookup.draft(min(room, self._decoder.draft_tokens)) if room > 0 else []

    def _arguments(
        self, live: Mapping[int, Row], masks: Mapping[int, np.ndarray[Any, Any]]
    ) -> dict[str, DeviceArray]:
        """Sampling and history of all rows. They stay on the device while the same rows are live."""
        decoder, vocab = self._decoder, self._decoder.decoder.vocab_size
        if self._sampling is None:
            wanted = [
                int(row is not None and row.request.logprobs is not None) for row in self._rows
            ]
            self._sampling = decoder.place_sampling(self._row_sampling(), wanted)
        given = dict(self._sampling)
        if masks and (bias := masked_bias(self._row_sampling(), masks, vocab)) is not None:
            given["bias"] = decoder.device.put(bias)
        if self._history is None:
            counts = aligned_zeros((len(self._rows), vocab), np.dtype(np.int32))
            for slot, row in live.items():
                if row.request.sampling.needs_history:
                    before = len(row.request.prompt)
                    counts[slot] = history_row(row.request.prompt, row.token_ids[before:-1], vocab)
                    if not row.generated:  # decode is about to count the prompt's last token
                        counts[slot, row.token_ids[-1]] -= 2
            self._history = decoder.device.put(counts)
        given["history"] = self._history
        return given

    def _row_sampling(self) -> list[Sampling]:
        """Of every slot. Not made at every step: a Sampling checks what it is given."""
        return [Sampling() if row is None else row.request.sampling for row in self._rows]

    def _take(self, slot: int, row: Row, token: int, logprob: Logprob | None) -> Token:
        """Adds a token to a row's text; frees the slot where that finishes it."""
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
        self._held[slot] = row.token_ids[:-1]  # nobody has put the last one into the cache
        self._rows[slot] = None
        self._sampling = self._place = None

    def _clear(self, slot: int) -> None:
        """Makes a slot as new. Attention multiplies what it must not see by 0, which NaN survives."""
        self._held[slot] = []
        if self._cache is not None and self._decoder.copies:
            empty = KVCache(self._decoder, self._decoder.batches[0], self._cache.context)
            self._cache.copy_rows(empty, {slot: 0})


def _steps_of(decoder: DecoderPrograms, program: Program) -> int:
    """The most steps that a decode program takes in one call."""
    results = decoder.programs.results(program.name)
    return next(array.shape[0] for array in results if array.path == ("tokens",))
