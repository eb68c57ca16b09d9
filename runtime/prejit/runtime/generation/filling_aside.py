"""Prompts through a smaller cache: rows that are copied, prefixes, and what an encoder-decoder reads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.runtime.device.transfer import aligned_zeros, dtype_of
from prejit.runtime.format.checks.program_interfaces import sized
from prejit.runtime.generation import host_caches
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import Allocation, KVCache
from prejit.runtime.generation.options import Request
from prejit.runtime.generation.prefill import (
    Chunks,
    Entering,
    Grow,
    Limit,
    filling,
    no_limit,
)
from prejit.runtime.generation.rows import CachedText, Row, Usage
from prejit.runtime.generation.shared_prefix import Prefix
from prejit.runtime.generation.source_check import encode_for

if TYPE_CHECKING:
    from prejit.runtime.generation.prefixes import PrefixCache


def filling_aside(
    decoder: DecoderPrograms,
    cache: Callable[[], KVCache],
    members: Mapping[int, Entering],
    context: int,
    grow: Grow,
    limit: Limit,
    prefixes: PrefixCache | None,
    rows: int | None,
) -> Chunks:
    """Compute prompts in a cache of a smaller batch and copy the rows. Arguments as `filling`.

    This is cheaper than `filling` for a few rows of a large batch, because `filling` computes every row. An
    encoder-decoder reads the sources of the rows first, which makes that cache.

    Args:
        decoder: the programs.
        cache: as `filling`.
        members: as `filling`.
        context: of the cache in which they are computed, with room for the longest.
        grow: makes the cache of the batch at least as long, before the rows are copied.
        limit: as `filling`.
        prefixes: where to keep the prompts, for later ones that begin with them.
        rows: the smaller batch; None: the bundle's smallest, as sources need it.
    """
    seeing = {
        slot: member
        for slot, member in members.items()
        if (images := member.row.request.images) is not None and images.is_missing(member)
    }
    if seeing and len(seeing) < len(members):
        others = {slot: member for slot, member in members.items() if slot not in seeing}
        yield from filling_aside(decoder, cache, others, context, grow, limit, prefixes, rows)
        members = seeing
    fill = filling
    if seeing:
        from prejit.runtime.generation.image_prompts import filling_images  # few prompts have any

        fill, rows = filling_images, None
        for member in seeing.values():
            if member.prefix is None:  # what its slot holds is not here
                member.start = member.row.usage.reused_tokens = 0
    batch = decoder.batches[0] if rows is None else rows
    waiting = list(members)
    while waiting:
        group, waiting = waiting[:batch], waiting[batch:]
        # An empty cache for each group: a NaN that one group leaves would reach the next.
        if decoder.source is not None:
            aside = encode(decoder, context, [members[slot].row for slot in group])
        elif (wiped := decoder.spares.pop((batch, context), None)) is not None:
            aside = KVCache(decoder, batch, context, wiped)
        else:
            aside = yield from allocating(decoder, batch, context, limit)
        for place, slot in enumerate(group):
            prefix, start = members[slot].prefix, members[slot].start
            if prefix is not None:
                aside.copy_rows(prefix.at(aside.context), {place: 0}, {place: start})
            elif start:  # the slot holds it
                aside.copy_rows(cache(), {place: slot}, {place: start})
        entering = {place: members[slot] for place, slot in enumerate(group)}
        computed = {at: member for at, member in entering.items() if not member.can_decode}
        yield from fill(decoder, lambda: aside, computed, limit)  # noqa: B023 (done with this one)
        yield from grow(context)
        if aside.context < cache().context:
            aside = aside.grown(cache().context)
        counts = {slot: len(members[slot].row.request.prompt) for slot in group}
        cache().copy_rows(aside, {slot: place for place, slot in enumerate(group)}, counts)
        if prefixes is not None:
            texts = {
                place: CachedText(member.row.request.prompt, member.row.request.namespace)
                for place, member in computed.items()
                if member.token is not None and member.token >= 0  # else it may hold NaN
            }
            prefixes.keep_aside(aside, texts)
        # The next source's cache comes from its encoder.
        if decoder.copies_rows and decoder.source is None:
            host_caches.wipe(aside.arrays)
            decoder.spares[aside.bucket] = aside.arrays


def encode(decoder: DecoderPrograms, context: int, rows: Sequence[Row]) -> KVCache:
    """Read the sources of rows, and return the cache of texts about them that have no token yet."""
    assert decoder.source is not None
    sources = [row.request.source for row in rows]
    axis = decoder.source.variables.index("source") - 1  # of one source, which has no axis of rows
    sizes = [source.shape[axis] for source in sources]
    program = encode_for(decoder, context, max(sizes))
    # Loading compares the program with the table. The table alone could ask for any amount of memory.
    decoder.programs[program.name]
    batch, size = program.bucket["batch"], program.bucket["source"]
    whole = sized(decoder.source, {"batch": batch, "source": size})
    given = aligned_zeros(whole.shape, dtype_of(whole.dtype))
    length = np.ones(batch, np.int32)  # idle rows too: attention to nothing is NaN
    for place, source in enumerate(sources):
        given[place][tuple(map(slice, source.shape))] = source
        length[place] = sizes[place]
    put = decoder.device.put
    _, arrays = decoder.run(program, {"source": put(given), "length": put(length)}, ())
    for row in rows:
        row.usage.programs[program.name] = None
    return KVCache(decoder, batch, context, arrays)


def allocating(
    decoder: DecoderPrograms, batch: int, context: int, limit: Limit
) -> Generator[int, None, KVCache]:
    """Allocate an empty cache in pieces. A piece counts as all the positions that a step may compute."""
    allocation = Allocation(decoder, batch, context)
    while not allocation.advance():
        yield limit() or 0
    return KVCache(decoder, batch, context, allocation.arrays())


def computing_prefix(
    decoder: DecoderPrograms,
    token_ids: Sequence[int],
    context: int,
    usage: Usage,
    known: Prefix | None = None,
    limit: Limit = no_limit,
    adapter: Any = None,
) -> Generator[int, None, Prefix]:
    """Compute the keys and values of a text in a cache of its own, in chunks, and return them.

    Args:
        decoder: the programs.
        token_ids: the text, at most `context` tokens.
        context: the context of the cache, one of the buckets.
        usage: where to add the cost and the reused tokens.
        known: a prefix whose beginning may be the same, to reuse.
        limit: how much a chunk may compute.
        adapter: of the requests that share it; None: they have none.
    """
    cache = yield from allocating(decoder, decoder.batches[0], context, limit)
    start = 0
    if known is not None:
        cache.copy_rows(known.at(context), {0: 0})
        start = decoder.reusable(known.token_ids, token_ids)
    usage.reused_tokens = start
    row = Row(Request(token_ids, adapter=adapter), frozenset(), list(token_ids), usage, None)
    member = Entering(row, start)
    yield from filling(decoder, lambda: cache, {0: member}, limit)
    return Prefix(token_ids, cache, has_nan=member.token is not None and member.token < 0)
