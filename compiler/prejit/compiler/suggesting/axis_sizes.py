"""Choose the sizes of one axis that pad recorded values least. Exact, by dynamic programming."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MAX_CANDIDATES = 256
"""The multiple that candidates are rounded to doubles until there are at most this many."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one axis, and what they cost.

    Attributes:
        chosen: the sizes, ascending.
        padding: sum of what is computed beyond the values, each times its weight.
    """

    chosen: tuple[int, ...]
    padding: float


def padded(value: int, sizes: Sequence[int]) -> int:
    """Return what is computed for a value: the smallest size that holds it.

    A value beyond the largest size takes that one as often as it is full, and a size for the rest.

    Args:
        value: 0 or more.
        sizes: ascending.
    """
    full, rest = divmod(value, sizes[-1]) if value > sizes[-1] else (0, value)
    return full * sizes[-1] + (sizes[bisect_left(sizes, rest)] if rest else 0)


def folded(weights: Mapping[int, float], largest: int) -> dict[int, float]:
    """Return the values with what exceeds the largest size taken off, so that each is one size or less."""
    found: Counter[int] = Counter()
    for value, weight in weights.items():
        rest = value % largest if value > largest else value
        if rest:
            found[rest] += weight  # type: ignore[assignment]
    return dict(found)


def candidates(values: Collection[int], multiple: int, kept: Collection[int] = ()) -> list[int]:
    """Return the sizes to choose from: each value rounded up, and the sizes that must be chosen.

    No other multiple can be better: a size between two of these could shrink to the lower one.
    """
    while True:
        found = {-(-value // multiple) * multiple for value in values} | {*kept}
        if kept:
            found = {size for size in found if size <= max(kept)}
        if len(found) <= MAX_CANDIDATES:
            return sorted(found)
        multiple *= 2


def best_sizes(
    weights: Mapping[int, float],
    among: Sequence[int],
    most: int,
    kept: Collection[int] = (),
) -> dict[int, Sizes]:
    """Return, for each number of sizes up to `most`, those that pad the values least.

    A value takes the smallest size that holds it. The state of the dynamic programme is (number of sizes,
    largest of them), and a step adds the next larger size: O(most x candidates^2), exact.

    Args:
        weights: the weight of each value, a positive integer.
        among: the sizes to choose from, ascending. The last one holds all values and is always chosen.
        most: the largest number of sizes.
        kept: sizes of `among` that must be chosen.

    Returns:
        The sizes by their number. Numbers that cannot hold all of `kept` are left out.
    """
    values = np.array(sorted(weights), np.int64)
    weight = np.array([weights[value] for value in values.tolist()], np.float64)
    sizes = np.array(among, np.int64)
    assert not len(values) or values[-1] <= sizes[-1]
    below = np.searchsorted(values, sizes, side="right")  # how many values each size holds
    count = np.concatenate([[0.0], np.cumsum(weight)])[below]
    total = np.concatenate([[0.0], np.cumsum(weight * values)])[below]
    # cost[i, j]: padding of the values above size i - 1 that size j holds; row 0: there is no smaller size.
    count_before, total_before = np.concatenate([[0.0], count]), np.concatenate([[0.0], total])
    cost = sizes * (count - count_before[:, None]) - (total - total_before[:, None])
    places = np.arange(len(sizes))
    cost[places[None, :] < np.arange(len(sizes) + 1)[:, None]] = np.inf
    for place in (among.index(size) for size in kept):
        cost[: place + 1, place + 1 :] = np.inf  # a step must not leave it out
    best, steps, found = cost[0], list[np.ndarray[tuple[int], np.dtype[np.int64]]](), {}
    for number in range(1, min(most, len(sizes)) + 1):
        if number > 1:
            through = best[:, None] + cost[1:]
            steps.append(through.argmin(axis=0))
            best = through.min(axis=0)
        if np.isfinite(best[-1]):
            chosen = [len(sizes) - 1]
            for step in reversed(steps):
                chosen.append(int(step[chosen[-1]]))
            found[number] = Sizes(
                tuple(int(sizes[place]) for place in reversed(chosen)), max(0.0, float(best[-1]))
            )
    return found
