"""Choose the buckets that encode a set of sentences at the least cost. Pure functions, no device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MAX_COST = 1 << 60
"""Maximum cost in microseconds. Larger costs are cut to it, because a program table may hold any integer."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A shape in which sentences can be computed.

    Attributes:
        batch, length: the number of sentences and the tokens of each.
        cost: of one run, in microseconds.
    """

    batch: int
    length: int
    cost: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}"

    @property
    def programs(self) -> tuple[str, str, str]:
        """The names of its programs embed, layer and pool."""
        name = f"encode/b{self.batch}-t{self.length}"
        return f"{name}/embed", f"{name}/layer", f"{name}/pool"


def partition(lengths: Sequence[int], buckets: Sequence[Bucket]) -> list[tuple[Bucket, int, int]]:
    """Return the cheapest set of runs that holds all sentences.

    Runs take neighbours in sorted order, and each run is filled. Neither makes the result worse: what fits
    into some runs still fits when both are sorted by length, and fewer sentences never cost more.

    Args:
        lengths: in tokens, descending; none is longer than the longest bucket.
        buckets: the shapes; each may run any number of times.

    Returns:
        Runs as (bucket, first sentence, end): a run holds the sentences before `end`.
    """
    sizes = sorted({bucket.length for bucket in buckets})
    # For each length the cheapest bucket of each batch.
    fitting: list[list[Bucket]] = []
    for size in sizes:
        cheapest: dict[int, Bucket] = {}
        for bucket in buckets:
            known = cheapest.get(bucket.batch)
            if bucket.length >= size and (known is None or bucket.cost < known.cost):
                cheapest[bucket.batch] = bucket
        fitting.append(list(cheapest.values()))
    count = len(lengths)
    costs, chosen = [0] * (count + 1), list[Bucket]()
    for first in range(count - 1, -1, -1):
        options = fitting[bisect_left(sizes, lengths[first])]
        best = min(options, key=lambda b: b.cost + costs[min(first + b.batch, count)])
        costs[first] = best.cost + costs[min(first + best.batch, count)]
        chosen.append(best)
    chosen.reverse()
    runs, first = [], 0
    while first < count:
        bucket = chosen[first]
        runs.append((bucket, first, min(first + bucket.batch, count)))
        first += bucket.batch
    return runs


def loading_order(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the order in which to load buckets.

    The first ones serve every other bucket's sentences at no more than twice that bucket's cost. They are
    chosen greedily, each to serve most of those that are left, and loaded the cheapest first. The rest
    follows, also the cheapest first.
    """
    sizes = [(b.batch, b.length, min(b.cost, _MAX_COST)) for b in buckets]
    batch, length, cost = np.array(sizes, np.int64).reshape(-1, 3).T
    # [n, n]: whether the bucket of the row is served by that of the column. There may be thousands.
    served_by = (
        (batch >= batch[:, None]) & (length >= length[:, None]) & (cost <= 2 * cost[:, None])
    )
    counts = served_by.sum(axis=0)  # how many of those left each bucket serves
    unserved = np.ones(len(buckets), bool)
    chosen = []
    while unserved.any():
        most = np.flatnonzero(counts == counts.max())
        best = int(most[cost[most].argmin()])
        chosen.append(best)
        served = unserved & served_by[:, best]
        counts -= served_by[served].sum(axis=0)
        unserved &= ~served
    rest = np.setdiff1d(np.arange(len(buckets)), chosen)
    order = [*sorted(chosen, key=lambda i: cost[i]), *sorted(rest, key=lambda i: cost[i])]
    return [buckets[place] for place in order]
