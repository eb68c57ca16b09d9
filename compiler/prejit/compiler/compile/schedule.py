"""The decisions of a scheduler of compile jobs: which job starts next, again, or a second time.

A `Schedule` has no clock, no threads and no cluster: the caller reports what happened, with the time, and
asks what to do. So tests need no cluster and wait for nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from typing import final

WINDOW = 2.0
"""Attempts that are handed to a cluster at the same time, for each core it has. Those that find no core wait
there, where an autoscaler sees them."""
MIN_WINDOW = 4
"""Cores that are asked for even of a cluster that has none yet."""
STRAGGLER_FACTOR = 3.0
"""A job runs a second time elsewhere when it has taken this many times its estimate."""
STRAGGLER_SECONDS = 5.0
"""No job runs a second time before it has taken this long."""
MAX_WORKER_LOSSES = 2
"""A job that ends so many workers is given up: it is the likely cause."""
MAX_NODE_LOSSES = 5
"""A job whose nodes go so often is given up. The loss of a node is seldom the fault of a job."""
_CALIBRATION_JOBS = 3
"""Finished jobs after which estimates are corrected by what jobs really took."""


@dataclass(frozen=True, slots=True)
class Need:
    """The time, memory and cores that a job is expected to take."""

    seconds: float
    bytes: int = 0
    cores: int = 1


class Loss(Enum):
    """The reason why an attempt ended without a result or an error of the job."""

    WORKER = "the worker died"
    MEMORY = "memory ran out"
    NODE = "the node died"


@dataclass(frozen=True, slots=True)
class Start:
    """Start an attempt at a job.

    Attributes:
        attempt: number of the attempt.
        job: the job.
        need: what to reserve for it.
        second: whether another attempt at the job runs, and takes too long.
    """

    attempt: int
    job: str
    need: Need
    second: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """End an attempt: nobody needs its result."""

    attempt: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A job cannot be compiled."""

    job: str
    reason: str
    losses: tuple[Loss, ...]


Decision = Start | Cancel | GiveUp


@dataclass
class _Job:
    need: Need
    attempts: set[int] = field(default_factory=set)
    losses: list[tuple[Loss, str]] = field(default_factory=list)


@dataclass
class _Attempt:
    job: str
    cores: int
    began: float | None = None
    node: str = ""


@final
class Schedule:
    """Jobs that wait and run, and what to do next. One thread uses it."""

    def __init__(self, *, slots: int, window: float = WINDOW) -> None:
        """Begin without jobs.

        Args:
            slots: number of cores that run attempts.
            window: attempts that are started for each core; 1: none waits elsewhere.
        """
        self._slots = slots
        self._window = window
        self._jobs: dict[str, _Job] = {}
        self._attempts: dict[int, _Attempt] = {}
        self._waiting: list[tuple[float, int, str]] = []  # a heap, the longest job first
        self._order = count()
        self._numbers = count()
        self._decided: list[Decision] = []
        self._expected = self._taken = 0.0  # seconds of the jobs that have finished
        self._finished = 0

    @property
    def unfinished(self) -> int:
        """Number of jobs without an end."""
        return len(self._jobs)

    def resize(self, slots: int) -> None:
        """Note that the cluster now has so many cores."""
        self._slots = slots

    def add(self, job: str, need: Need) -> None:
        """Add a job. Its name must be new."""
        self._jobs[job] = _Job(need)
        self._push(job)

    def drop(self, job: str) -> None:
        """Forget a job: it needs no result any more. Its attempts are cancelled."""
        if (found := self._jobs.pop(job, None)) is not None:
            for attempt in sorted(found.attempts):
                del self._attempts[attempt]
                self._decided.append(Cancel(attempt))

    def began(self, attempt: int, now: float, node: str = "") -> None:
        """Note that an attempt began to compile."""
        if (found := self._attempts.get(attempt)) is not None and found.began is None:
            found.began, found.node = now, node

    def finished(self, attempt: int, now: float) -> bool:
        """Note the end of a job; return whether this attempt is the first that ends it."""
        found = self._attempts.get(attempt)
        if found is None:
            return False
        if found.began is not None:
            self._finished += 1
            self._expected += self._jobs[found.job].need.seconds
            self._taken += now - found.began
        self._end(attempt)
        self.drop(found.job)
        return True

    def lost(self, attempt: int, loss: Loss) -> None:
        """Note that an attempt ended without an answer: its job starts again, or is given up."""
        found = self._attempts.get(attempt)
        if found is None:
            return
        self._end(attempt)
        job = self._jobs[found.job]
        job.losses.append((loss, found.node))
        if loss is Loss.MEMORY:
            job.need = replace(job.need, bytes=2 * job.need.bytes)
        nodes = sum(kind is Loss.NODE for kind, _ in job.losses)
        if nodes >= MAX_NODE_LOSSES or len(job.losses) - nodes >= MAX_WORKER_LOSSES:
            name = found.job
            self.drop(name)
            losses = ", ".join(f"{kind.value} on {where or '?'}" for kind, where in job.losses)
            reason = f"{len(job.losses)} attempts ended without an answer: {losses}"
            self._decided.append(GiveUp(name, reason, tuple(kind for kind, _ in job.losses)))
        elif not job.attempts:
            self._push(found.job)

    def decide(self, now: float) -> list[Decision]:
        """Return what to do now, in order. Each decision is returned once, and counts as carried out."""
        decided, self._decided = self._decided, []
        used = sum(each.cores for each in self._attempts.values())
        room = max(self._slots * self._window, MIN_WINDOW if self._window > 1 else 0)
        while self._waiting:
            name = self._waiting[0][2]
            job = self._jobs.get(name)
            if job is None or job.attempts:  # it was dropped
                heapq.heappop(self._waiting)
                continue
            if (used and used + job.need.cores > room) or not room:
                break
            heapq.heappop(self._waiting)
            decided.append(self._start(name, job))
            used += job.need.cores
        if not self._waiting:
            decided += self._second_attempts(now, self._slots - used)
        return decided

    def _second_attempts(self, now: float, idle: int) -> list[Decision]:
        """Start again what takes too long, those first that are the furthest behind, while cores are idle."""
        if idle <= 0:
            return []
        behind: list[tuple[float, str]] = []
        for attempt in self._attempts.values():
            job = self._jobs[attempt.job]
            if attempt.began is None or len(job.attempts) > 1:
                continue
            ran, limit = now - attempt.began, STRAGGLER_FACTOR * self._scale() * job.need.seconds
            if ran > max(limit, STRAGGLER_SECONDS):
                behind.append((ran / max(limit, STRAGGLER_SECONDS), attempt.job))
        found: list[Decision] = []
        for _, name in sorted(behind, reverse=True):
            job = self._jobs[name]
            if job.need.cores <= idle:
                idle -= job.need.cores
                found.append(self._start(name, job))
        return found

    def _start(self, name: str, job: _Job) -> Start:
        number, second = next(self._numbers), bool(job.attempts)
        job.attempts.add(number)
        self._attempts[number] = _Attempt(name, job.need.cores)
        return Start(number, name, job.need, second)

    def _end(self, attempt: int) -> None:
        self._jobs[self._attempts.pop(attempt).job].attempts.discard(attempt)

    def _push(self, name: str) -> None:
        heapq.heappush(self._waiting, (-self._jobs[name].need.seconds, next(self._order), name))

    def _scale(self) -> float:
        """Return by what factor jobs take longer here than estimated."""
        if self._finished < _CALIBRATION_JOBS or not self._expected:
            return 1.0
        return self._taken / self._expected
