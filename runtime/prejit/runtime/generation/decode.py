"""Decode: one call of a decode or verify program over all slots, and how many steps such a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from prejit.runtime.device.transfer import DeviceArray, aligned_zeros, to_numpy
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import KVCache
from prejit.runtime.generation.options import Sampling
from prejit.runtime.generation.rows import Row
from prejit.runtime.generation.sampling_arguments import (
    Logprob,
    history_row,
    masked_bias,
    place_sampling,
    read_logprob,
)

if TYPE_CHECKING:
    from prejit.runtime.generation.draft_model import DraftModel
    from prejit.runtime.generation.drafting import DraftPace

CALL_SECONDS = 0.01
"""Target duration of one decode call in seconds. Small models run several steps per call to hide dispatch."""

Masks = Mapping[int, np.ndarray[Any, Any]]
"""Token masks by slot, bool [V]."""


def steps_per_call(step_seconds: float, most: int) -> int:
    """Return how many steps a decode call takes: as many as fit into CALL_SECONDS, from 1 to `most`."""
    return max(1, min(most, int(CALL_SECONDS / max(step_seconds, 1e-6))))


class Call(NamedTuple):
    """The outcome of one decode or verify call.

    Attributes:
        program: name of the program.
        width: positions computed in each row.
        passes: runs over the weights.
        tokens: int32 [width, B]; negative where the logits were not numbers or all tokens were forbidden.
        counts: the number of new tokens of each live slot.
        drafted: the number of drafted tokens of each slot with a draft.
        results: the arrays that the program returned.
    """

    program: str
    width: int
    passes: int
    tokens: np.ndarray[Any, Any]
    counts: Mapping[int, int]
    drafted: Mapping[int, int]
    results: Mapping[str, DeviceArray]

    def logprob(self, step: int, slot: int, count: int) -> Logprob:
        """Return the log-probabilities of one token, with this many alternatives."""
        token = int(self.tokens[step, slot])
        return read_logprob(self.results, "logprobs", (step, slot), token, count)


@final
class Decoding:
    """Decode and verify calls of one batch.

    What the programs need besides the cache (sampling arguments, token counts for penalties, last tokens and
    positions) stays on the device from call to call, until `reset`.

    Attributes:
        model: the draft model; None: no request has had a use for one.
    """

    def __init__(self, decoder: DecoderPrograms) -> None:
        """Start with nothing on the device."""
        self._decoder = decoder
        self._step_seconds = CALL_SECONDS
        self._sampling: dict[str, DeviceArray] | None = None
        self._place: dict[str, DeviceArray] | None = None
        self._history: DeviceArray = None
        self._steps_of: dict[int, DeviceArray] = {}
        self.model: DraftModel | None = None

    def reset(self, *, counts: bool) -> None:
        """Drop what depends on which rows are live. Call it when a row comes or goes.

        With `counts`, drop the token counts too: the next call makes them from the rows' texts.
        """
        self._sampling = self._place = None
        if counts:
            self._history = None

    def run(
        self,
        cache: KVCache,
        rows: Sequence[Row | None],
        masks: Masks,
        meanwhile: Callable[[], object],
    ) -> Call:
        """Compute the next tokens of all live rows. The cache has room for at least one token of each.

        Slots without a row are free. `meanwhile` is called once while the device computes.
        """
        live = {slot: row for slot, row in enumerate(rows) if row is not None}
        decode = self._decoder.decode_for(*cache.bucket).name
        guesses = self._has_draft_model(live)
        looks_up = any(row.lookup is not None for row in live.values())
        pace = self._pace("model" if guesses else "lookup") if guesses or looks_up else None
        drafts: dict[int, list[int]] = {}
        started = time.perf_counter()
        # All processes of a cluster must draft alike, and they measure different times.
        if pace is not None and (self._decoder.device.in_cluster or pace.allows(decode)):
            found = {slot: self._draft(row, cache.context) for slot, row in live.items()}
            drafts = {slot: draft for slot, draft in found.items() if draft}
        inputs = self._arguments(rows, masks)
        if drafts:
            call = self._verify(cache, live, drafts, inputs, meanwhile)
        else:
            call = self._decode(cache, live, inputs, meanwhile)
        seconds = time.perf_counter() - started
        has_read = guesses and self.model is not None and self.model.take_read()
        if not drafts:
            self._step_seconds = seconds / call.width
        if pace is not None and (drafts or has_read):
            tokens = sum(call.counts.values()) / len(live)
            pace.verified(decode, call.program, tokens, seconds, once=has_read)
        elif pace is not None:
            pace.decoded(decode, call.width, seconds)
        return call

    def _decode(
        self,
        cache: KVCache,
        live: Mapping[int, Row],
        inputs: dict[str, DeviceArray],
        meanwhile: Callable[[], object],
    ) -> Call:
        program = self._decoder.decode_for(*cache.bucket)
        steps = self._steps(program, cache, live)
        put = self._decoder.device.put
        if self._place is None:
            token, position, alive = (np.zeros(cache.batch, np.int32) for _ in range(3))
            for slot, row in live.items():
                token[slot], position[slot] = row.token_ids[-1], len(row.token_ids) - 1
                alive[slot] = 1
            self._place = {"token": put(token), "position": put(position), "live": put(alive)}
        if (placed := self._steps_of.get(steps)) is None:
            placed = self._steps_of[steps] = put(np.array(steps, np.int32))
        inputs |= {**self._place, "steps": placed}
        results = cache.run(program, inputs)
        meanwhile()
        self._history = results["history"]
        self._place |= {name: results[name] for name in ("token", "position")}
        tokens = to_numpy(results["tokens"]).reshape(-1, cache.batch)
        return Call(program.name, steps, steps, tokens, dict.fromkeys(live, steps), {}, results)

    def _steps(self, program: ProgramEntry, cache: KVCache, live: Mapping[int, Row]) -> int:
        """Return how many steps the next decode call takes."""
        if any(row.is_masked for row in live.values()):
            return 1  # a token mask is called before every token
        if self._decoder.device.in_cluster:
            return 1  # all processes must take the same number, and they measure different times
        room = cache.context - max(len(row.token_ids) for row in live.values()) + 1
        left = max(room if row.left is None else row.left for row in live.values())
        most = min(room, left, self._decoder.max_steps(program))
        return steps_per_call(self._step_seconds, most)

    def _verify(
        self,
        cache: KVCache,
        live: Mapping[int, Row],
        drafts: Mapping[int, list[int]],
        inputs: dict[str, DeviceArray],
        meanwhile: Callable[[], object],
    ) -> Call:
        program = self._decoder.verify_for(*cache.bucket)
        assert program is not None
        put = self._decoder.device.put
        width = program.bucket["draft"] + 1
        tokens = np.zeros((cache.batch, width), np.int32)
        start, length = np.zeros(cache.batch, np.int32), np.zeros(cache.batch, np.int32)
        for slot, row in live.items():
            given = [row.token_ids[-1], *drafts.get(slot, ())]
            tokens[slot, : len(given)] = given
            start[slot], length[slot] = len(row.token_ids) - 1, len(given)
        inputs |= {"tokens": put(tokens), "start": put(start), "length": put(length)}
        results = cache.run(program, inputs)
        meanwhile()
        self._history, self._place = results["history"], None
        accepted = to_numpy(results["accepted"])
        return Call(
            program.name,
            width,
            1,
            to_numpy(results["tokens"]).reshape(-1, cache.batch),
            {slot: int(accepted[slot]) for slot in live},
            {slot: len(draft) for slot, draft in drafts.items()},
            results,
        )

    def _draft(self, row: Row, context: int) -> list[int]:
        """Return the tokens that may follow a row's text, as many as there is room for."""
        room = context - len(row.token_ids)
        left = room if row.left is None else row.left - 1
        count = min(room, left, self._decoder.draft_tokens)
        if count < 1 or row.is_masked:
            return []
        if row.lookup is not None:
            return row.lookup.draft(count)
        return [] if self.model is None else self.model.draft(row, count, context)

    def _has_draft_model(self, live: Mapping[int, Row]) -> bool:
        """Return whether the draft model guesses for the only live row."""
        if (draft := self._decoder.draft) is None or len(live) > 1:
            return False
        [row] = live.values()
        if not row.request.draft or row.lookup is not None or row.is_masked:
            return False
        if self.model is None:
            from prejit.runtime.generation.draft_model import DraftModel  # few bundles have one

            self.model = DraftModel(draft, token_counts)
        return True

    def _pace(self, source: str) -> DraftPace:
        from prejit.runtime.generation.drafting import DraftPace  # most requests have no drafts

        pace: DraftPace = self._decoder.paces.setdefault(source, DraftPace())
        return pace

    def _arguments(self, rows: Sequence[Row | None], masks: Masks) -> dict[str, DeviceArray]:
        """Return the sampling arguments and the token counts of all rows, on the device."""
        decoder, vocab = self._decoder, self._decoder.decoder.vocab_size
        if self._sampling is None:
            logprobs = [int(row is not None and row.request.logprobs is not None) for row in rows]
            beside = decoder.beside([None if row is None else row.request for row in rows])
            self._sampling = place_sampling(decoder, _sampling_of(rows), logprobs) | beside
        given = dict(self._sampling)
        if masks and (bias := masked_bias(_sampling_of(rows), masks, vocab)) is not None:
            given["bias"] = decoder.device.put(bias)
        if self._history is None:
            counts = aligned_zeros((len(rows), vocab), np.dtype(np.int32))
            for slot, row in enumerate(rows):
                if row is not None and row.request.sampling.needs_history:
                    counts[slot] = token_counts(row, vocab)
            self._history = decoder.device.put(counts)
        given["history"] = self._history
        return given


def token_counts(row: Row, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the token counts of a row for its penalties, int32 [V], without the last token of its text."""
    prompt = row.request.prompt
    found = history_row(prompt, row.token_ids[len(prompt) : -1], vocab_size)
    if not row.generated:  # decode is about to count the prompt's last token
        found[row.token_ids[-1]] -= 2
    return found


def _sampling_of(rows: Sequence[Row | None]) -> list[Sampling]:
    return [Sampling() if row is None else row.request.sampling for row in rows]
