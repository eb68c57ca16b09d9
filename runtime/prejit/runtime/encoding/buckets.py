"""Choose the buckets that encode a set of sentences at the least cost. Pure functions, no device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOAD_MICROSECONDS = 15_000
"""What a bucket costs before its first run, roughly: three programs are deserialized, and XLA builds what it
makes lazily. Measured with MiniLM's on two cores."""
WARM_MICROSECONDS = 30_000
"""Buckets whose run costs less are run once before they are wanted. A first run takes some milliseconds more
than the next; where a run takes longer than this, that is little."""
_MAX_COST = 1 << 60
"""Costs beyond it, in microseconds, are taken for it: a program table may hold any integer."""
PATIENCE_SECONDS = 0.1
"""How long the loading thread makes way for a call before it loads the next bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A shape that sentences can be computed in.

    Attributes:
        batch, length: sentences and tokens of each.
        cost: of one run, in microseconds.
    """

    batch: int
    length: int
    cost: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}"

    @property
    def programs(self) -> tuple[str, str, str]:
        """Names of embed, layer and pool."""
        name = f"encode/b{self.batch}-t{self.length}"
        return f"{name}/embed", f"{name}/layer", f"{name}/pool"


def partition(lengths: Sequence[int], buckets: Sequence[Bucket]) -> list[tuple[Bucket, int, int]]:
    """The cheapest way to put sentences into buckets.

    Args:
        lengths: in tokens, descending; none is longer than the longest bucket.
        buckets: any number of runs of each.

    Returns:
        Runs as (bucket, first sentence, the one after its last). Of all sets of runs that hold the sentences
        none costs less. That runs take neighbours in sorted order loses nothing: whatever fits into some runs
        fits when both are sorted by length; nor does filling each run, since fewer sentences never cost more.
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
    """The order in which to load buckets.

    Some serve every other at no more than twice its own cost: each is chosen for the most of those left, and
    they go first, the cheapest first. The rest follows in the same way.
    """
    sizes = [(b.batch, b.length, min(b.cost, _MAX_COST)) for b in buckets]
    batch, length, cost = np.array(sizes, np.int64).reshape(-1, 3).T
    # [n, n]: whether each bucket is served by each other. Arrays, since a bundle may have thousands.
    served_by = (
        (batch >= batch[:, None]) & (length >= length[:, None]) & (cost <= 2 * cost[:, None])
    )
    counts = served_by.sum(axis=0)  # of those left, how many each bucket serves
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
