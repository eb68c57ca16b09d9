"""The insertion of requests into slots: which slot, what is cached already, and the prompts that are left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prejit.runtime.generation.decoder_programs import DecoderPrograms, common_length
from prejit.runtime.generation.kv_cache import KVCache
from prejit.runtime.generation.prefill import Entering, Grow, Limit, filling
from prejit.runtime.generation.rows import CachedText, Row

if TYPE_CHECKING:
    from prejit.runtime.generation.prefixes import CompactPrefix, PrefixCache
    from prejit.runtime.generation.shared_prefix import Prefix

SHARED_TOKENS = 16
"""Requests that come together share the computation of a common beginning of at least this many tokens."""

Held = Mapping[int, CachedText]
"""The text that each free slot has cached, by slot."""


class Arrival(NamedTuple):
    """Requests that enter slots together.

    Attributes:
        rows: one for each request.
        masks: the token masks for their first new tokens; None: all may come.
        slots: where they go, in the same order.
        held: what these slots have cached.
        context: the shortest cache that they fit into, one of the buckets.
        together: how many prompts one call may compute in a smaller batch.
    """

    rows: Sequence[Row]
    masks: Sequence[np.ndarray[Any, Any] | None]
    slots: tuple[int, ...]
    held: Held
    context: int
    together: int


def choose_slots(
    decoder: DecoderPrograms, rows: Sequence[Row], free: Collection[int], held: Held
) -> tuple[int, ...]:
    """Return a free slot for each row: the one with most of its prompt cached, or else the emptiest."""
    left, chosen = list(free), []
    for row in rows:
        best = max(
            left,
            key=lambda s: (held[s].reusable(decoder, row.request), -len(held[s].token_ids), -s),
        )
        left.remove(best)
        chosen.append(best)
    return tuple(chosen)


def inserting(
    decoder: DecoderPrograms,
    cache: Callable[[], KVCache],
    grow: Grow,
    arrival: Arrival,
    limit: Limit,
    prefixes: PrefixCache | None,
) -> Generator[int, None, dict[int, Entering]]:
    """Put prompts into the rows of a cache: copy the cached parts, compute the rest in chunks.

    The cache grows when a prompt is about to enter it: until then, its other rows decode in the shorter one.

    Args:
        decoder: the programs.
        cache: returns the cache. It may grow between two chunks.
        grow: lets it grow.
        arrival: the requests.
        limit: how much a chunk may compute.
        prefixes: earlier prompts, and where to keep these ones; None: nothing is kept.

    Returns:
        The rows by slot, with their first tokens; a row that `can_decode` gets it from a decode step.
    """
    batch, context = cache().batch, max(cache().context, arrival.context)
    shared = yield from _shared_prefix(decoder, batch, context, arrival, limit)
    if shared is not None and prefixes is not None:
        prefixes.keep(shared, arrival.rows[0].request.namespace)
    entering = _entering(decoder, arrival, shared, prefixes, context)
    members = dict(zip(arrival.slots, entering, strict=True))
    waiting = {slot: member for slot, member in members.items() if not member.can_decode}
    # Texts about a source begin in the cache that its encoder makes.
    reads = decoder.source is not None
    rows = None if reads else _aside_batch(decoder, batch, context, waiting, arrival.together)
    aside = members if reads else {}
    for slot, member in waiting.items():
        if (images := member.row.request.images) is not None and images.is_missing(member):
            aside = {**aside, slot: member}
    if rows is not None and decoder.copies_rows:  # so what a slot holds can begin a row there, too
        aside = waiting
    elif rows is not None:
        for member in waiting.values():
            prompt = len(member.row.request.prompt)
            left = prompt - member.start
            # In place, what is missing is computed for every row: that may be more than the whole prompt.
            if member.prefix is None and left < prompt < batch * left:
                _begin_aside(decoder, member, prefixes, context)
        # A row that begins with what its slot holds is computed in place.
        aside |= {slot: m for slot, m in waiting.items() if m.prefix is not None or not m.start}
    if len(aside) < len(members):
        yield from grow(context)
    copied: dict[Prefix | CompactPrefix, dict[int, int]] = {}
    for slot, member in members.items():
        if member.prefix is not None and slot not in aside:
            copied.setdefault(member.prefix, {})[slot] = 0
    for prefix, to in copied.items():
        cache().copy_rows(prefix.at(cache().context), to, {s: members[s].start for s in to})
    in_place = {slot: member for slot, member in waiting.items() if slot not in aside}
    yield from filling(decoder, cache, in_place, limit)
    if aside:
        from prejit.runtime.generation.filling_aside import filling_aside

        yield from filling_aside(decoder, cache, aside, context, grow, limit, prefixes, rows)
    if prefixes is not None:
        prefixes.trim()
    return members


def _entering(
    decoder: DecoderPrograms,
    arrival: Arrival,
    shared: Prefix | None,
    prefixes: PrefixCache | None,
    context: int,
) -> Iterator[Entering]:
    """Yield each row with the part of its prompt that its slot or a prefix of this context has cached."""
    rows = arrival.rows
    for row, mask, slot in zip(rows, arrival.masks, arrival.slots, strict=True):
        prompt = row.request.prompt
        start = arrival.held[slot].reusable(decoder, row.request)
        earlier = None
        if prefixes is not None and shared is None:
            earlier = prefixes.find(prompt, context, row.request.namespace)
        start, prefix = _longest(decoder, prompt, start, row.request.prefix, shared, earlier)
        if prefix is None or prefix is not shared or row is not rows[0]:
            row.usage.reused_tokens = start  # the shared prefix is charged to the first row
        yield Entering(row, start, mask, prefix)


def _longest(
    decoder: DecoderPrograms,
    prompt: Sequence[int],
    start: int,
    *prefixes: Prefix | CompactPrefix | None,
) -> tuple[int, Prefix | CompactPrefix | None]:
    """Return how much of a prompt is cached, and the prefix that holds more than `start` tokens of it."""
    found = None
    for known in prefixes:
        if known is not None:
            length = decoder.reusable(known.token_ids, prompt)
            if length > start:
                start, found = length, known
    return start, found


def _shared_prefix(
    decoder: DecoderPrograms, batch: int, context: int, arrival: Arrival, limit: Limit
) -> Generator[int, None, Prefix | None]:
    """Compute the common beginning of all prompts, or return None if that would not save much."""
    rows = arrival.rows
    first = rows[0].request
    if (
        len(rows) == 1
        or any(row.request.namespace != first.namespace for row in rows)
        or (decoder.source or first.images) is not None
        or not decoder.can_fill_aside(batch, context, len(first.prompt))
    ):
        return None
    prompts = [row.request.prompt for row in rows]
    common = min(
        *(common_length(first.prompt, prompt) for prompt in prompts),
        *(len(prompt) - 1 for prompt in prompts),
    )
    for row, slot in zip(rows, arrival.slots, strict=True):
        known = () if row.request.prefix is None else row.request.prefix.token_ids
        cached = max(
            decoder.reusable(known, row.request.prompt),
            arrival.held[slot].reusable(decoder, row.request),
        )
        if common - cached < SHARED_TOKENS:
            return None
    from prejit.runtime.generation.filling_aside import computing_prefix

    tokens = list(first.prompt[:common])
    usage = rows[0].usage
    given = first.prefix, limit, first.adapter
    return (yield from computing_prefix(decoder, tokens, context, usage, *given))


def _aside_batch(
    decoder: DecoderPrograms,
    batch: int,
    context: int,
    waiting: Mapping[int, Entering],
    together: int,
) -> int | None:
    """Return the batch in which prompts are computed before they are copied; None: they are not.

    A prefill in place computes every row of the batch, idle ones included. It is the better way for half
    of the rows or more that no smaller batch takes together: one by one, they read the weights each time.
    """
    longest = max((len(member.row.request.prompt) for member in waiting.values()), default=0)
    smallest = decoder.batches[0]
    most = max(min(len(waiting), together), smallest)
    for rows in reversed([size for size in decoder.batches if 1 < size <= most]):
        computed = -(-len(waiting) // rows) * rows
        if computed < batch and decoder.can_fill_aside(batch, context, longest, rows):
            return rows
    if smallest == batch or 2 * len(waiting) >= batch:
        return None
    return smallest if decoder.can_fill_aside(batch, context, longest) else None


def _begin_aside(
    decoder: DecoderPrograms, member: Entering, prefixes: PrefixCache | None, context: int
) -> None:
    """Let a row begin with an earlier prompt, or with nothing, rather than with what its slot holds."""
    request, earlier = member.row.request, None
    if prefixes is not None:
        earlier = prefixes.find(request.prompt, context, request.namespace)
    member.start, member.prefix = _longest(decoder, request.prompt, 0, request.prefix, earlier)
    member.row.usage.reused_tokens = member.start
