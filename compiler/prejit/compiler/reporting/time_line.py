"""The time line of a build: which worker did what, and the chain of steps that bounded its length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prejit.compiler.progress import Step

BETWEEN = "other work"
"""The text of a critical path where no step ran: imports, plans, reading and checking files."""

INSTANT = 0.005
"""Steps of fewer seconds are left out, and so are gaps in a critical path: waits for nothing, for example."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A step in its lane.

    Attributes:
        lane: `worker 1` for compiling, `build` for other work; `build 2` if other work ran beside it.
        what: the step.
        start, end: seconds since the build began.
    """

    lane: str
    what: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Link:
    """A part of the critical path: a step, or the time between two.

    Attributes:
        what: the step, or BETWEEN.
        start, end: seconds since the build began.
    """

    what: str
    start: float
    end: float


def place(steps: Iterable[Step]) -> tuple[Placed, ...]:
    """Return steps in lanes, so that no two of a lane overlap. A lane of compiling is one worker's work."""
    found: list[Placed] = []
    free: dict[str, list[float]] = {"worker": [], "build": []}
    for step in sorted(steps, key=lambda step: (step.start, -step.end)):
        if step.end - step.start < INSTANT:
            continue
        kind = "worker" if step.program else "build"
        ends = free[kind]
        number = next((n for n, end in enumerate(ends) if end <= step.start), len(ends))
        ends[number : number + 1] = [step.end]
        lane = f"worker {number + 1}" if step.program else "build" + f" {number + 1}" * bool(number)
        found.append(Placed(lane, step.what, step.start, step.end))
    return tuple(found)


def critical_path(steps: Sequence[Step], seconds: float) -> tuple[Link, ...]:
    """Return the chain of steps that bounded a build, first to last, with the gaps between them.

    A build does not write down what waited for what. So this goes back from the end: before each step comes
    the one that ended last when it began, because the end of that one is what let it begin.
    """
    left = sorted((s for s in steps if s.end - s.start >= INSTANT), key=lambda step: step.end)
    found: list[Link] = []
    at = seconds
    while at > INSTANT:
        while left and left[-1].end > at:
            left.pop()
        before = left.pop() if left else None
        since = 0.0 if before is None else before.end
        if at - since >= INSTANT:
            found.append(Link(BETWEEN, since, at))
        if before is None:
            break
        found.append(Link(before.what, before.start, before.end))
        at = before.start
    return tuple(reversed(found))
