"""Run probes in rounds, so that a drift of the machine falls on all rows alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prejit.runtime.bench.report import MIN_QUARTILE_SAMPLES, Ratio, quantile

Say = Callable[[str], None]
"""Takes a line of progress."""

SEED = 20_260_101
"""Of prompts and of the order in which things are measured: two runs do the same work."""
_ROUNDS = 20
"""Into which the time is divided; more where probes are quick."""
_MIN_TURNS = 3
"""Of every probe, even if that takes twice the time: a spread needs as many. One it gets at any price."""
_MAX_REPEATS = 50


@dataclass(frozen=True, slots=True)
class Head:
    """What a row is called, and what one of its samples is: see Row."""

    group: str
    name: str
    work: str
    unit: str = "s"
    items: float | None = None
    item: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Something that is done again and again, and gives samples of some rows each time.

    Attributes:
        heads: the rows.
        run: does it once; gives the samples of each row, in the order of `heads`.
        weight: of its share of the time.
    """

    heads: tuple[Head, ...]
    run: Callable[[], Sequence[Sequence[float]]]
    weight: float = 1


Rounds = dict[Head, list[list[float]]]
"""Of each row the samples of each round, which may be none."""


def ratio_in_turns(after: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> Ratio:
    """How two sides compare that took turns: by the ratio of their medians in each round.

    Args:
        after: the samples of each round; rounds in which a side has none do not count.
        before: the same of the other side.
    """
    pairs = [(new, old) for new, old in zip(after, before, strict=True) if new and old]
    ratios = sorted(quantile(sorted(new), 0.5) / quantile(sorted(old), 0.5) for new, old in pairs)
    outer = 0.25 if len(ratios) >= MIN_QUARTILE_SAMPLES else 0.0
    return Ratio(
        least=min(min(new) for new, _ in pairs) / min(min(old) for _, old in pairs),
        middle=quantile(ratios, 0.5),
        low=quantile(ratios, outer),
        high=quantile(ratios, 1 - outer),
    )


# ---------------------------------------------------------------------- rounds


@dataclass(slots=True)
class _Turns:
    """The probes of one thing, one of each side, and its account of time.

    Attributes:
        probes: with the number of their side.
        credit: seconds that it may still take.
        spent, calls: so far.
        rounds: in which it had a turn.
    """

    probes: list[tuple[int, Probe]]
    credit: float = 0.0
    spent: float = 0.0
    calls: int = 0
    rounds: int = 0

    def repeats(self, share: float, least_rounds: int) -> int:
        """How many calls its next turn has, given another share of the time."""
        self.credit += share
        affordable = int(self.credit * self.calls / self.spent) if self.calls else 1
        return min(_MAX_REPEATS, max(affordable, self.rounds < least_rounds))

    def take(self, repeats: int, found: Sequence[Rounds], share: float) -> None:
        """Adds samples to the last round of each side."""
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
        # What is too quick to use up its share saves nothing.
        self.credit = min(self.credit - took, share)


def run_in_rounds(sides: Sequence[Sequence[Probe]], seconds: float, say: Say) -> list[Rounds]:
    """Runs the probes of all sides for some seconds, in turns; gives each side's samples."""
    things: dict[str, _Turns] = {}
    for side, probes in enumerate(sides):
        for probe in probes:
            things.setdefault(probe.heads[0].name, _Turns([])).probes.append((side, probe))
    for number, (name, thing) in enumerate(things.items(), 1):
        say(f"first calls: {number} of {len(things)}: {name}")
        for _, probe in thing.probes:
            probe.run()  # loads programs, which the second call need not do
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
