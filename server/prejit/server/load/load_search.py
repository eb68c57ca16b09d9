"""The saturation curve of a server, its knee, and the highest rate at which it keeps its limits.

Two questions have yes or no at each rate: does the server keep up, and are enough requests within the limits?
A search doubles the rate until the answer is no, then halves the ratio of the bracket. A rate is measured in
windows until the confidence interval of what decides is on one side of its bound, or there are four. The
windows of all rates have the same seeds: the requests of two rates differ in their times alone, so that noise
of the load does not change the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from prejit.server.load.load_window import LoadAnswer

GOOD_SHARE = 0.95
"""The share of requests that must be within the limits: a limit is one for the 95th percentile."""
MOST_LAG_SECONDS = 0.010
"""If the 99th percentile of the generator's own lag is longer, it is too slow for the rate."""
_MOST_GROWTH = 0.02
"""Seconds by which latency may grow in a second of load: as behind a server that is 2 % too slow."""
_MOST_FAILED = 0.01
_RESOLUTION = 1.025
"""The ratio of the two rates between which a search ends."""
_MOST_WINDOWS = 4
_BLOCKS = 10
"""Parts of a window whose means are compared: neighbours in a queue are not independent."""
_SPREAD = 16.0
"""Twice the standard deviation of the growth near saturation, relative to the spread of the blocks around the
fit: that of computed queues of four servers. A regression's own error would be far too small."""
_Z = 1.96
_WARM = 0.2
"""The part of a window that is left out where growth is measured: the queue fills to its usual length."""
_MOST_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """The limits of a request, in milliseconds; None: no limit.

    Attributes:
        first_token_ms: until its first token.
        between_tokens_ms: the mean between its tokens.
        whole_ms: until its end.
    """

    first_token_ms: float | None = None
    between_tokens_ms: float | None = None
    whole_ms: float | None = None

    @property
    def is_any(self) -> bool:
        """True if there is a limit."""
        return any(
            each is not None
            for each in (self.first_token_ms, self.between_tokens_ms, self.whole_ms)
        )

    def allow(self, answer: LoadAnswer) -> bool:
        """Return whether a request is within the limits. One that failed is not."""
        pairs = (
            (answer.first, self.first_token_ms),
            (answer.per_token, self.between_tokens_ms),
            (answer.whole, self.whole_ms),
        )
        return not answer.failed and not any(
            most is not None and value * 1e3 > most for value, most in pairs
        )

    def described(self) -> str:
        """Return the limits as text."""
        named = {"TTFT": self.first_token_ms, "TPOT": self.between_tokens_ms, "E2E": self.whole_ms}
        return ", ".join(
            f"{name} <= {most:g} ms" for name, most in named.items() if most is not None
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def is_at_most(self, bound: float) -> bool | None:
        """Return whether the value is at most a bound; None: the interval has the bound in it."""
        if self.high <= bound:
            return True
        return False if self.low > bound else None


_Estimate = Callable[[Sequence[Sequence[LoadAnswer]]], Interval]


@dataclass(frozen=True, slots=True)
class FoundRate:
    """The result of a search.

    Attributes:
        rate: the highest rate with the answer yes, requests a second; 0: there is none.
        above: the lowest one with the answer no.
        is_certain: False if one of the two was decided by its estimate, not by its interval.
    """

    rate: float
    above: float
    is_certain: bool


def growth(windows: Sequence[Sequence[LoadAnswer]]) -> Interval:
    """Return by how many seconds latency grows in a second of load.

    The latency is that of the first token, or of the whole where nothing is streamed. Near saturation it also
    grows because more requests than usual were due until then, by chance. How many is known, so the fit takes
    that away, as a control variate.
    """
    slopes, spreads = [], []
    for window in windows:
        kept = [each for each in window if not each.failed]
        if len(window) - len(kept) > _MOST_FAILED * len(window):
            return Interval(math.inf, math.inf, math.inf)
        due = np.array([each.due for each in kept])
        late = np.array([each.whole if math.isnan(each.first) else each.first for each in kept])
        blocks = np.array_split(np.flatnonzero(due >= _WARM * due[-1]), _BLOCKS)
        if not len(blocks[-1]):
            return Interval(0.0, -math.inf, math.inf)  # too few requests
        # Seconds of load that came too early.
        early = np.arange(len(due)) / len(due) * due[-1] - due
        x, y, ahead = (
            np.array([of[block].mean() for block in blocks]) for of in (due, late, early)
        )
        fitted = np.stack([x, np.ones(_BLOCKS), ahead], axis=1)
        slope, level, share = np.linalg.lstsq(fitted, y)[0]
        if share < 0:  # far from saturation
            slope, level, share = *np.polyfit(x, y, 1), 0.0
        slopes.append(slope)
        spreads.append(np.std(y - fitted @ [slope, level, share]) / (x[-1] - x[0]))
    value = float(np.mean(slopes))
    error = _SPREAD * float(np.mean(spreads)) / math.sqrt(len(windows))
    return Interval(value, value - error, value + error)


def bad_share(windows: Sequence[Sequence[LoadAnswer]], limits: LoadLimits) -> Interval:
    """Return the share of requests that are not within the limits.

    The interval is Wilson's, for as many independent requests as vary as much as the blocks do.
    """
    bad = [np.array([not limits.allow(each) for each in window], float) for window in windows]
    every = np.concatenate(bad)
    blocks = [b for window in bad for b in np.array_split(window, _BLOCKS) if len(b)]
    share, count = float(every.mean()), float(len(every))
    if 0 < share < 1 and len(blocks) > 2:
        of_means = float(np.var([b.mean() for b in blocks], ddof=1)) / len(blocks)
        count = min(count, max(1.0, share * (1 - share) / of_means)) if of_means else count
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    half *= _Z / (1 + _Z**2 / count)
    return Interval(share, middle - half, middle + half)


def generator_lag(windows: Sequence[Sequence[LoadAnswer]]) -> float:
    """Return the 99th percentile of the generator's own lag in seconds."""
    return float(np.quantile([each.lag for window in windows for each in window], 0.99))


@final
class LoadSearch:
    """Measures rates, each once or in several windows, and answers both questions.

    Attributes:
        windows: what was measured, by the rate.
    """

    def __init__(
        self, measure: Callable[[float, int], Sequence[LoadAnswer]], limits: LoadLimits
    ) -> None:
        """Measure nothing yet.

        Args:
            measure: returns the answers of the n-th window at a rate.
            limits: what requests must keep.
        """
        self._measure = measure
        self._limits = limits
        self.windows: dict[float, list[Sequence[LoadAnswer]]] = {}

    def look(self, rate: float) -> list[Sequence[LoadAnswer]]:
        """Return what was measured at a rate, at least one window."""
        return self.windows.get(rate) or self._more(rate)

    def knee(self, start: float) -> FoundRate:
        """Return the highest rate with which the server keeps up; begin the search at a rate."""
        return self._highest(growth, _MOST_GROWTH, start)

    def within_limits(self, start: float) -> FoundRate:
        """Return the highest rate at which enough requests are within the limits."""
        return self._highest(lambda found: bad_share(found, self._limits), 1 - GOOD_SHARE, start)

    def _highest(self, estimate: _Estimate, bound: float, start: float) -> FoundRate:
        certain: dict[float, bool] = {}

        def holds(rate: float) -> bool:
            found = self.look(rate)
            while (answer := estimate(found).is_at_most(bound)) is None and len(
                found
            ) < _MOST_WINDOWS:
                found = self._more(rate)
            certain[rate] = answer is not None
            return estimate(found).value <= bound if answer is None else answer

        # What another search has measured is a bracket already.
        low, high, rate = 0.0, math.inf, start
        for known in sorted(self.windows, reverse=True):
            if holds(known):
                low = known
                break
            high = known
        while math.isinf(high):
            rate = low * 2 or start
            low, high = (rate, high) if holds(rate) else (low, rate)
        halvings = 0
        while not low:
            if halvings == _MOST_HALVINGS:
                return FoundRate(0.0, high, certain[high])
            halvings += 1
            low, high = (high / 2, high) if holds(high / 2) else (low, high / 2)
        while high / low > _RESOLUTION:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if holds(middle) else (low, middle)
        return FoundRate(low, high, certain[low] and certain[high])

    def _more(self, rate: float) -> list[Sequence[LoadAnswer]]:
        found = self.windows.setdefault(rate, [])
        found.append(self._measure(rate, len(found)))
        return found
