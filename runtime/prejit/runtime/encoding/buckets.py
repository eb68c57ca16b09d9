"""The shapes in which sentences are computed: what they cost, and the cheapest set of them for sentences."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from prejit.runtime.format.checks.encoder_interfaces import encoder_bucket_name

_MAX_COST = 1 << 60
"""Maximum cost in microseconds. Larger costs are cut to it, because a program table may hold any integer."""
_GROUP_TOKENS = 1024
"""A CPU computes larger batches in groups of so many tokens: they save nothing, and take more memory."""
_DISTURBED = 5
"""If a sentence costs more than one part in so many more in a larger batch, that is slower indeed."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A shape in which sentences can be computed.

    Attributes:
        batch, length: the number of rows and the tokens of each. A row is a sentence.
        cost: of one run, in microseconds.
        sentences: the most sentences that are packed into the only row; 0: it is one.
    """

    batch: int
    length: int
    cost: int
    sentences: int = 0

    def __str__(self) -> str:
        return f"packed {self.length}" if self.sentences else f"{self.batch}x{self.length}"

    @property
    def most(self) -> int:
        """The most sentences of a run."""
        return self.sentences or self.batch

    @property
    def programs(self) -> tuple[str, str, str]:
        """The names of its programs embed, layer and pool."""
        name = encoder_bucket_name(self.batch, self.length, self.sentences)
        return f"{name}/embed", f"{name}/layer", f"{name}/pool"


def evened(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Return buckets whose larger batches cost no more for a sentence than smaller ones of its length.

    A machine that was busy when they were measured makes one look slower than it is. Those that cost much
    more are left, because a batch may need more than a cache holds, and those of many tokens.
    """
    found = list[Bucket]()
    for bucket in sorted(buckets, key=lambda b: (bool(b.sentences), b.length, b.batch)):
        before = found[-1] if found else bucket
        is_small = not bucket.sentences and bucket.batch * bucket.length <= _GROUP_TOKENS
        if is_small and before.length == bucket.length:
            most = before.cost * bucket.batch // before.batch
            if bucket.cost <= most + most // _DISTURBED:
                bucket = replace(bucket, cost=min(bucket.cost, most))
        found.append(bucket)
    return tuple(found)


class Fitting(NamedTuple):
    """Buckets by the sentences that they take.

    Attributes:
        sizes: lengths of buckets, ascending.
        buckets: for each the cheapest bucket of each batch that holds it, and all packed ones, the smallest
            first.
    """

    sizes: list[int]
    buckets: list[list[Bucket]]


def fitting(buckets: Sequence[Bucket]) -> Fitting:
    """Sort buckets for `partition`."""
    sizes = sorted({bucket.length for bucket in buckets})
    found: list[list[Bucket]] = []
    for size in sizes:
        cheapest: dict[tuple[int, int], Bucket] = {}
        for bucket in buckets:
            key = (bucket.batch, bucket.sentences and bucket.length)
            known = cheapest.get(key)
            if bucket.length >= size and (known is None or bucket.cost < known.cost):
                cheapest[key] = bucket
        found.append(sorted(cheapest.values(), key=lambda b: b.most))
    return Fitting(sizes, found)


def partition(lengths: Sequence[int], buckets: Fitting) -> list[tuple[Bucket, int, int]]:
    """Return the cheapest set of runs that holds all sentences; of equal ones, that whose runs hold more.

    Runs take neighbours in sorted order, and each run is filled. Without packed buckets neither makes the
    result worse: what fits into some runs still fits when both are sorted by length, and fewer sentences
    never cost more.

    Args:
        lengths: in tokens, descending; none is longer than the longest bucket.
        buckets: the shapes; each may run any number of times.

    Returns:
        Runs as (bucket, first sentence, end): a run holds the sentences before `end`.
    """
    count, tokens = len(lengths), [0, *accumulate(lengths)]

    def end(first: int, bucket: Bucket) -> int:
        most = min(first + bucket.most, count)
        room = tokens[first] + bucket.length
        return bisect_right(tokens, room, first, most + 1) - 1 if bucket.sentences else most

    costs, chosen = [0] * (count + 1), list[Bucket]()
    for first in range(count - 1, -1, -1):
        options = buckets.buckets[bisect_left(buckets.sizes, lengths[first])]
        best = min(options, key=lambda b: (b.cost + costs[e := end(first, b)], -e))
        costs[first] = best.cost + costs[end(first, best)]
        chosen.append(best)
    chosen.reverse()
    runs, first = [], 0
    while first < count:
        runs.append((chosen[first], first, first := end(first, chosen[first])))
    return runs


def loading_order(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the order in which to load buckets.

    The first ones serve every other bucket's sentences at no more than twice that bucket's cost. They are
    chosen greedily, each to serve most of those that are left, and loaded the cheapest first. The rest
    follows, also the cheapest first.
    """
    sizes = [(b.most, b.length, b.batch * b.length, min(b.cost, _MAX_COST)) for b in buckets]
    most, length, tokens, cost = np.array(sizes, np.int64).reshape(-1, 4).T
    is_packed = np.array([bool(b.sentences) for b in buckets])
    # [n, n]: whether the bucket of the row is served by that of the column. There may be thousands.
    has_room = length >= np.where(is_packed, tokens[:, None], length[:, None])
    served_by = (most >= most[:, None]) & has_room & (cost <= 2 * cost[:, None])
    counts = served_by.sum(axis=0)  # how many of those left each bucket serves
    unserved = np.ones(len(buckets), bool)
    chosen = []
    while unserved.any():
        every = np.flatnonzero(counts == counts.max())
        best = int(every[cost[every].argmin()])
        chosen.append(best)
        served = unserved & served_by[:, best]
        counts -= served_by[served].sum(axis=0)
        unserved &= ~served
    rest = np.setdiff1d(np.arange(len(buckets)), chosen)
    order = [*sorted(chosen, key=lambda i: cost[i]), *sorted(rest, key=lambda i: cost[i])]
    return [buckets[place] for place in order]
