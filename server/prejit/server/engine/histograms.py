"""Histograms of an engine: their bounds, what one thread writes, and what others read.

They have all bounds of vLLM's, so that its dashboards show prejit too, and finer ones below them, because
small models give a token in a few milliseconds.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


def _bounds(numbers: str) -> tuple[float, ...]:
    return tuple(map(float, numbers.split()))


FIRST_TOKEN_BOUNDS = _bounds(
    "0.001 0.0025 0.005 0.0075 0.01 0.015 0.02 0.03 0.04 0.06 0.08 0.1 0.25 0.5 0.75 "
    "1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
"""Bounds in seconds of the time to the first token."""

TOKEN_BOUNDS = _bounds(
    "0.0005 0.001 0.002 0.003 0.004 0.005 0.0075 0.01 0.015 0.02 0.025 0.035 0.05 0.075 "
    "0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
"""Bounds in seconds of the time between tokens."""

REQUEST_BOUNDS = _bounds(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.2 0.3 0.5 0.8 1 1.5 2 2.5 5 10 "
    "15 20 30 40 50 60 120 240 480 960 1920 7680"
)
"""Bounds in seconds of a request and of its parts."""

COUNT_BOUNDS = _bounds("1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000")
"""Bounds of numbers of tokens."""


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """The state of a histogram.

    Attributes:
        bounds: upper bounds of the buckets, ascending, without infinity. A value on a bound is below it.
        counts: how many values each bucket has (not cumulative); one more than there are bounds.
        sum: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean of all values; NaN if there are none."""
        return self.sum / self.count if self.count else math.nan

    def plus(self, other: HistogramValue) -> HistogramValue:
        """Return the histogram of the values of both, which have the same bounds."""
        counts = tuple(map(operator.add, self.counts, other.counts))
        return HistogramValue(self.bounds, counts, self.sum + other.sum)

    def quantile(self, share: float) -> float:
        """Return an estimate of a quantile, 0 to 1, as Prometheus does: linear inside a bucket.

        Returns:
            NaN if there are no values. The largest bound if the quantile is above it.
        """
        rank, seen, lower = share * self.count, 0, 0.0
        if not self.count:
            return math.nan
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and seen + count >= rank:
                return lower + (bound - lower) * max(0.0, rank - seen) / count
            seen, lower = seen + count, bound
        return lower


@final
class Histogram:
    """A histogram that one thread writes and any thread may read."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Begin with no values."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value, or the same value several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> HistogramValue:
        """Return the current state."""
        return HistogramValue(self._bounds, tuple(self._counts), self._sum)
