"""Putting prompts into a KV cache: whole or in chunks, in place or in a smaller cache aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prejit.runtime.device.executable import DeviceArray, aligned_zeros, to_numpy
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import KVCache, Prefix, common_length
from prejit.runtime.generation.request import Logprob, Request, Row, Usage
from prejit.runtime.generation.sampling import Sampling, bias_row, history_row


@dataclass(slots=True)
class Entering:
    """A row whose prompt is being computed.

    Attributes:
        row: whose.
        start: how many tokens of the prompt are cached.
        mask: what its token mask says of the first new token.
        prefix: that holds the part that is cached; None: the slot itself does.
        token, logprob: the first new token, once it is known.
    """

    row: Row
    start: int
    mask: np.ndarray[Any, Any] | None = None
    prefix: Prefix | None = None
    token: int | None = None
    logprob: Logprob | None = None

    @property
    def can_decode(self) -> bool:
        """Whether all but the prompt's last token is cached: then decode gives the first new one."""
        return self.start == len(self.row.request.prompt) - 1

    def read(self, results: Mapping[str, DeviceArray], place: int) -> None:
        """Takes the first new token from what a prefill gave."""
        self.token = int(to_numpy(results["token"])[place])
        if (count := self.row.request.logprobs) is not None:
            self.logprob = read_logprob(results, "logprob", place, self.token, count)


def fill(decoder: DecoderPrograms, cache: KVCache, members: Mapping[int, Entering]) -> None:
    """Puts what is missing of prompts into a cache, in chunks; other rows rest.

    Args:
        decoder: the programs.
        cache: to fill.
        members: by row of the cache; they get their first tokens.
    """
    if not members:
        return
    batch = cache.batch
    lengths, done = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    for place, member in members.items():
        lengths[place], done[place] = len(member.row.request.prompt), member.start
    fixed = _first_sampling(decoder, batch, members)
    while (left := lengths - done).any():
        program = decoder.prefill_for(batch, cache.context, int(left.max()))
        size = program.bucket["prompt"]
        count = np.minimum(left, size).astype(np.int32)
        tokens = np.zeros((batch, size), np.int32)
        for place, member in members.items():
            begin = done[place]
            tokens[place, : count[place]] = member.row.request.prompt[begin : begin + count[place]]
        inputs = {"tokens": tokens, "start": done.copy(), "length": count}
        placed = {name: decoder.device.put(value) for name, value in inputs.items()}
        results = decoder.run(program, {**placed, **fixed}, cache)
        working = np.count_nonzero(count)
        for place, member in members.items():
            if not count[place]:
                continue
            member.row.usage.computed_tokens += batch * size / working
            member.row.usage.programs[program.name] = None
            if left[place] == count[place]:
                member.read(results, place)
        done += count


def fill_aside(decoder: DecoderPrograms, cache: KVCache, members: Mapping[int, Entering]) -> None:
    """As `fill`, in a cache of the smallest batch whose rows are then copied: nothing rests beside them."""
    if not members:
        return
    batch = decoder.batches[0]
    waiting = list(members)
    while waiting:
        group, waiting = waiting[:batch], waiting[batch:]
        # Anew for each group: a NaN that one left would reach the next.
        aside = KVCache(decoder, batch, cache.context)
        for place, slot in enumerate(group):
            if (prefix := members[slot].prefix) is not None:
                aside.copy_rows(prefix.at(cache.context), {place: 0})
        fill(decoder, aside, {place: members[slot] for place, slot in enumerate(group)})
        cache.copy_rows(aside, {slot: place for place, slot in enumerate(group)})


def compute_prefix(
    decoder: DecoderPrograms,
    token_ids: Sequence[int],
    context: int,
    usage: Usage,
    known: Prefix | None = None,
) -> Prefix:
    """The keys and values of a text in a cache of their own.

    Args:
        decoder: the programs.
        token_ids: the text, at most `context`.
        context: of the cache, one of the buckets.
        usage: whose cost it is, and whose tokens are reused where `known` has them.
        known: a prefix whose beginning may be the same.
    """
    cache = KVCache(decoder, decoder.batches[0], context)
    start = 0
    if known is not None:
        cache.copy_rows(known.at(context), {0: 0})
        start = min(common_length(known.token_ids, token_ids), len(token_ids) - 1)
    usage.reused_tokens = start
    row = Row(Request(token_ids), frozenset(), list(token_ids), usage, None)
    fill(decoder, cache, {0: Entering(row, start)})
    return Prefix(token_ids, cache)


def _first_sampling(
    decoder: DecoderPrograms, batch: int, members: Mapping[int, Entering]
) -> dict[str, DeviceArray]:
    """The sampling arguments and the history of a prefill."""
    sampling, logprobs = [Sampling()] * batch, [0] * batch
    for place, member in members.items():
        sampling[place] = member.row.request.sampling
        logprobs[place] = int(member.row.request.logprobs is not None)
    masks = {place: m.mask for place, m in members.items() if m.mask is not None}
    fixed = decoder.place_sampling(
        sampling, logprobs, masked_bias(sampling, masks, decoder.decoder.vocab_size)
    )
    history = decoder.zeros(batch, np.int32)
    if any(one.needs_history for one in sampling):
        vocab = decoder.decoder.vocab_size
        counts = aligned_zeros((batch, vocab), np.dtype(np.int32))
        for place, member in members.items():
            counts[place] = history_row(member.row.request.prompt, (), vocab)
        history = decoder.device.put(counts)
    return {**fixed, "history": history}


def masked_bias(
    sampling: Sequence[Sampling], masks: Mapping[int, np.ndarray[Any, Any]], vocab: int
) -> np.ndarray[Any, Any] | None:
    """The rows' logit biases with -inf where their masks forbid a token; None: no row has a mask."""
    if not masks:
        return None
    bias = aligned_zeros((len(sampling), vocab), np.dtype(np.float32))
    for place, one in enumerate(sampling):
        bias[place] = bias_row(one, vocab)
    for place, mask in masks.items():
        bias[place, ~mask] = -np.inf
    return bias


def read_logprob(
    results: Mapping[str, DeviceArray], name: str, at: int | tuple[int, int], token: int, count: int
) -> Logprob:
    """The log-probabilities of one token, out of a program's results.

    Args:
        results: by name.
        name: of the chosen tokens' log-probabilities.
        at: the row, or (step, row).
        token: that was chosen.
        count: of the most likely tokens.
    """
    tokens = to_numpy(results["top_tokens"])[at][:count].tolist()
    logprobs = to_numpy(results["top_logprobs"])[at][:count].tolist()
    top = tuple(zip(tokens, logprobs, strict=True))
    return Logprob(token, float(to_numpy(results[name])[at]), top)
