"""Run probes in rounds, so that a drift of the machine falls on all rows alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prejit.compiler.bench.bench_comparison import MIN_QUARTILE_SAMPLES, Ratio

Say = Callable[[str], None]
"""A function that shows one line of progress."""

SEED = 20_260_101
"""The seed of prompts and of the order of measurements: two runs do the same work."""
_ROUNDS = 20
"""The time is divided into this many rounds; quick probes get more."""
_MIN_TURNS = 3
"""Every probe runs this often, up to twice the given time, because a spread needs it; once in any case."""
_MAX_REPEATS = 50


@dataclass(frozen=True, slots=True)
class Head:
    """The name of a row, and what one of its samples is; the attributes are those of BenchRow."""

    group: str
    name: str
    work: str
    unit: str = "s"
    items: float | None = None
    item: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Something to measure repeatedly.

    Attributes:
        heads: the rows that it gives samples of.
        run: runs it once and returns the samples of each row, in the order of `heads`.
        weight: its relative share of the time.
    """

    heads: tuple[Head, ...]
    run: Callable[[], Sequence[Sequence[float]]]
    weight: float = 1


Rounds = dict[Head, list[list[float]]]
"""The samples of each row, round by round. A round may have none."""


def ratio_in_turns(after: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> Ratio:
    """Return the ratio of two sides that alternated: the median of the ratios of each round.

    Args:
        after: the samples of each round. Rounds in which a side has no samples do not count.
        before: the same for the other side.
    """
    pairs = [(new, old) for new, old in zip(after, before, strict=True) if new and old]
    ratios = [float(np.median(new) / np.median(old)) for new, old in pairs]
    outer = 0.25 if len(ratios) >= MIN_QUARTILE_SAMPLES else 0.0
    return Ratio(
        least=min(min(new) for new, _ in pairs) / min(min(old) for _, old in pairs),
        middle=float(np.median(ratios)),
        low=float(np.quantile(ratios, outer)),
        high=float(np.quantile(ratios, 1 - outer)),
    )


# ---------------------------------------------------------------------- rounds


@dataclass(slots=True)
class _Turns:
    """The probes of one row, one for each side, and the time that they may use.

    Attributes:
        probes: each with the number of its side.
        credit: seconds that they may still use.
        spent: seconds that they have used.
        calls: how often they have run.
        rounds: the number of rounds in which they ran.
    """

    probes: list[tuple[int, Probe]]
    credit: float = 0.0
    spent: float = 0.0
    calls: int = 0
    rounds: int = 0

    def repeats(self, share: float, least_rounds: int) -> int:
        """Return how often to run in the next round, given another share of the time in seconds."""
        self.credit += share
        affordable = int(self.credit * self.calls / self.spent) if self.calls else 1
        return min(_MAX_REPEATS, max(affordable, self.rounds < least_rounds))

    def take(self, repeats: int, found: Sequence[Rounds], share: float) -> None:
        """Run the probes and add their samples to the last round of each side."""
        started = time.perf_counter()
        self.rounds += 1
        probes = self.probes if self.rounds % 2 else self.probes[::-1]
        for _ in range(repeats):
            for side, probe in probes:
                for head, samples in zip(probe.heads, probe.run(), strict=True):
                    found[side][head][-1].extend(samples)
        took = time.perf_counter() - started
        self.spent += took
        self.calls += repeats
        # A probe that does not use up its share cannot save the rest for later.
        self.credit = min(self.credit - took, share)


def run_in_rounds(sides: Sequence[Sequence[Probe]], seconds: float, say: Say) -> list[Rounds]:
    """Run the probes of all sides in alternation for `seconds`. Return the samples of each side."""
    things: dict[str, _Turns] = {}
    for side, probes in enumerate(sides):
        for probe in probes:
            things.setdefault(probe.heads[0].name, _Turns([])).probes.append((side, probe))
    for number, (name, thing) in enumerate(things.items(), 1):
        say(f"first calls: {number} of {len(things)}: {name}")
        for _, probe in thing.probes:
            probe.run()  # the first call loads programs, so it is not measured
    found: list[Rounds] = [{h: [] for p in probes for h in p.heads} for probes in sides]
    turns = list(things.values())
    share = seconds / _ROUNDS / sum(thing.probes[0][1].weight for thing in turns)
    order = seeded_random(SEED)
    started = time.perf_counter()

    def passed() -> float:
        return time.perf_counter() - started

    def least_rounds() -> int:
        return _MIN_TURNS if passed() < 2 * seconds else 1

    while passed() < seconds or any(thing.rounds < least_rounds() for thing in turns):
        for rounds in found:
            for row in rounds.values():
                row.append([])
        order.shuffle(turns)
        for thing in turns:
            say(f"measuring: {passed():.0f} of {seconds:.0f} s, {len(turns)} things in turns")
            own = share * thing.probes[0][1].weight
            if (repeats := thing.repeats(own, least_rounds())) > 0:
                thing.take(repeats, found, own)
    return found


# ---------------------------------------------------------------------- requests


def seeded_random(seed: int) -> random.Random:
    """Return a generator that gives the same numbers in every run."""
    return random.Random(seed)  # noqa: S311 (for equal work in every run, not for secrets)
