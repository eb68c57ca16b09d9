"""Prefill: put prompts into a KV cache, whole or in chunks, in place or through a smaller cache."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

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
from prejit.runtime.records import dataclass

if TYPE_CHECKING:
    from prejit.runtime.generation.prefixes import CompactPrefix
    from prejit.runtime.generation.shared_prefix import Prefix


@dataclass(slots=True)
class Entering:
    """A row on its way into a cache.

    Attributes:
        row: the row.
        start: how many tokens of its prompt are cached already.
        mask: the token mask for its first new token.
        prefix: the prefix that holds the cached part; None: the slot itself holds it.
        token, logprob: the first new token, once it is known.
    """

    row: Row
    start: int
    mask: np.ndarray[Any, Any] | None = None
    prefix: Prefix | CompactPrefix | None = None
    token: int | None = None
    logprob: Logprob | None = None

    @property
    def can_decode(self) -> bool:
        """True if only the prompt's last token is missing: a decode step then gives the first new one."""
        return self.start == len(self.row.request.prompt) - 1

    def read(self, results: Mapping[str, DeviceArray], place: int) -> None:
        """Set the first new token from the results of a prefill."""
        self.token = int(to_numpy(results["token"])[place])
        if (count := self.row.request.logprobs) is not None:
            self.logprob = read_logprob(results, "logprob", place, self.token, count)


Made = TypeVar("Made")

Chunks = Generator[int, None, None]
"""Prompts that are computed in chunks: each item is the number of positions of the chunk that comes next."""

Limit = Callable[[], int | None]
"""Returns how many positions the next chunk may compute, if a program is that small; None: any number."""

Grow = Callable[[int], Chunks]
"""Makes the cache of a batch at least so long, in pieces between which it may decode."""


def no_limit() -> None:
    """Return None: a chunk may compute any number of positions."""
    return


def filling(
    decoder: DecoderPrograms,
    cache: Callable[[], KVCache],
    members: Mapping[int, Entering],
    limit: Limit = no_limit,
) -> Chunks:
    """Compute the missing parts of prompts in a cache, in chunks. Other rows of the cache do not change.

    Args:
        decoder: the programs.
        cache: returns the cache to fill. It may grow between two chunks.
        members: the entering rows by row of the cache; their first tokens are set.
        limit: how much a chunk may compute.
    """
    if not members:
        return
    batch = cache().batch
    lengths, done = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    for place, member in members.items():
        lengths[place], done[place] = len(member.row.request.prompt), member.start
    fixed = sampling_inputs(decoder, batch, members)
    while (left := lengths - done).any():
        yield batch * _next_program(decoder, cache(), left, limit).bucket["prompt"]
        # Chosen again: the cache may have grown, and others may have begun to decode.
        program = _next_program(decoder, cache(), left, limit)
        size = program.bucket["prompt"]
        count = np.minimum(left, size).astype(np.int32)
        tokens = np.zeros((batch, size), np.int32)
        for place, member in members.items():
            begin = done[place]
            tokens[place, : count[place]] = member.row.request.prompt[begin : begin + count[place]]
        inputs = {"tokens": tokens, "start": done.copy(), "length": count}
        placed = {name: decoder.device.put(value) for name, value in inputs.items()}
        results = cache().run(program, {**placed, **fixed})
        working = int(np.count_nonzero(count))  # NumPy 2.4 returns its own integer
        for place, member in members.items():
            if not count[place]:
                continue
            member.row.usage.computed_tokens += batch * size / working
            member.row.usage.programs[program.name] = None
            if left[place] == count[place]:
                member.read(results, place)
        done += count


def _next_program(
    decoder: DecoderPrograms,
    cache: KVCache,
    left: np.ndarray[Any, np.dtype[np.int32]],
    limit: Limit,
) -> ProgramEntry:
    """Return the program that computes the next chunk, given how many positions of each row are left."""
    wanted, most = int(left.max()), limit()
    if most is not None:
        wanted = min(wanted, max(1, most // cache.batch))
    return decoder.chunk_for(cache.batch, cache.context, wanted)


def whole(work: Generator[int, None, Made]) -> Made:
    """Do all chunks of a work at once, and return what it makes."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            made: Made = done.value
            return made


def sampling_inputs(
    decoder: DecoderPrograms, batch: int, members: Mapping[int, Entering]
) -> dict[str, DeviceArray]:
    """Return the sampling arguments and the token counts of a prefill."""
    vocab = decoder.decoder.vocab_size
    sampling, logprobs = [Sampling()] * batch, [0] * batch
    for place, member in members.items():
        sampling[place] = member.row.request.sampling
        logprobs[place] = int(member.row.request.logprobs is not None)
    masks = {place: m.mask for place, m in members.items() if m.mask is not None}
    fixed = place_sampling(decoder, sampling, logprobs, masked_bias(sampling, masks, vocab))
    history = decoder.zeros(batch, np.int32)
    if any(one.needs_history for one in sampling):
        counts = aligned_zeros((batch, vocab), np.dtype(np.int32))
        for place, member in members.items():
            counts[place] = history_row(member.row.request.prompt, (), vocab)
        history = decoder.device.put(counts)
    requests = [members[p].row.request if p in members else None for p in range(batch)]
    return {**fixed, "history": history, **decoder.beside(requests)}
