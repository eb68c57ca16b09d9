"""Decide if one of two bundles is slower, from times that they took in turns: ratios with their intervals.

Single times on a machine with other work scatter by far more than what is looked for. So the two sides take
turns, a request at a time, and what counts is the ratio of each pair. A process has a speed of its own, by
where its memory lies, so pairs come in groups: one for each pair of processes. The interval is a bootstrap of
groups and of pairs within them (Davison and Hinkley, Bootstrap Methods and their Application, 3.8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Pair = tuple[float, float]
"""The time of the old bundle and of the new one for the same request, one right after the other."""

_RESAMPLES = 2000
_OUTSIDE = 0.005
"""The share of resamples below the interval, and above it: an interval of 99 %."""
_SEED = 20_251_125


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """The ratio of new to old times, and where it lies with a confidence of 99 %. 1.1 is a tenth slower.

    Attributes:
        middle: the estimate: the mean over groups of the median of each.
        low, high: the ends of the interval.
        pairs: the number of pairs behind it.
    """

    middle: float
    low: float
    high: float
    pairs: int

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2

    def described(self) -> str:
        """Return it as a change: `+9.8 % (+8.1 to +11.9)`."""
        middle, low, high = (
            f"{(each - 1) * 100:+.1f}" for each in (self.middle, self.low, self.high)
        )
        return f"{middle} % ({low} to {high})"


def paired_ratio(groups: Sequence[Sequence[Pair]]) -> RatioInterval | None:
    """Return the ratio of pairs in groups; None: there are no pairs.

    The same pairs give the same interval: the bootstrap has a seed.
    """
    logs = [np.log(np.array(group)) for group in groups if group]
    if not logs:
        return None
    ratios = [each[:, 1] - each[:, 0] for each in logs]
    random = np.random.default_rng(_SEED)
    medians = np.stack([_resampled_medians(each, random) for each in ratios], axis=1)
    chosen = random.integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    means = np.take_along_axis(medians, chosen, axis=1).mean(axis=1)
    middle = float(np.mean([np.median(each) for each in ratios]))
    return _interval(middle, means, sum(map(len, ratios)))


def is_slower(ratio: RatioInterval | None, noise: RatioInterval | None, limit: float) -> bool:
    """Return whether a ratio shows that the new side is slower than a limit allows.

    Its estimate must exceed the limit, and its whole interval must lie above what two processes of the same
    bundle show (`noise`). So a machine with other work makes the answer no, and not yes.

    Args:
        ratio: of new to old times; None: nothing was measured.
        noise: of the old bundle beside itself; None: it was not measured. Without it no difference means
            anything, and the answer is no.
        limit: 0.05 for 5 %.
    """
    if ratio is None or noise is None:
        return False
    floor = max(1.0, noise.middle, 1 / noise.middle)
    return ratio.middle > 1 + limit and ratio.low > floor


def is_settled(ratio: RatioInterval | None, limit: float) -> bool:
    """Return whether more pairs would hardly change the answer.

    The interval lies below the limit, or it is narrow beside it.
    """
    if ratio is None:
        return False
    return ratio.high <= 1 + limit or ratio.half_width < max(limit, 0.01) / 2


def _resampled_medians(
    values: np.ndarray[Any, Any], random: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Return the medians of resamples, float64 [resamples].

    The median of a resample is an order statistic whose place has a beta distribution (Maritz and Jarrett, "A
    Note on Estimating the Variance of the Sample Median", 1978). So no resample is made.
    """
    middle = (len(values) + 1) / 2
    medians: np.ndarray[Any, Any] = np.quantile(values, random.beta(middle, middle, _RESAMPLES))
    return medians


def _interval(middle: float, found: np.ndarray[Any, Any], pairs: int) -> RatioInterval:
    low, high = np.quantile(found, (_OUTSIDE, 1 - _OUTSIDE))
    least, most = min(float(low), middle), max(float(high), middle)
    return RatioInterval(math.exp(middle), math.exp(least), math.exp(most), pairs)
