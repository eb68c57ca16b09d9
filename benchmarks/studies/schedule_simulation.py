"""Simulate 10,000 compiles on a cluster, with the scheduler that builds use, and count requests of a store.

    python -m benchmarks.studies.schedule_simulation               3 minutes of CPU time
    python -m benchmarks.studies.schedule_simulation --programs 500

Durations are those of compile_times.json, drawn at random. Half of the jobs have a history, which is wrong by
20 % (one standard deviation); the others are estimated by the size of their StableHLO. The bound of a
makespan is max(sum / slots, longest). With failures, 0.5 % of the attempts end their worker, and each node of
at most 8 slots dies once in 10,000 s and comes back after a minute; with stragglers, 1 % of the attempts take
10 times as long. Nothing depends on the speed of this machine: the clock is simulated.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save
from benchmarks.harness.workspace import RESULTS
from prejit.compiler.cluster.exchange import bring, send
from prejit.compiler.compile.executor import find_compiled
from prejit.compiler.compile.history import size_need
from prejit.compiler.compile.jobs import Compiled
from prejit.compiler.compile.schedule import Cancel, GiveUp, Loss, Need, Schedule, Start
from prejit.compiler.sharing.layered import LayeredStore
from prejit.compiler.sharing.remote import RemoteFile
from prejit.compiler.sharing.tier import Tier
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.key import Key
from prejit.runtime.base.files import digest_of
from prejit.runtime.format.bundle_schema import Memory, Segment

DURATIONS = Path(__file__).with_name("compile_times.json")
SLOTS = (2, 16, 256)
NODE_SLOTS = 8
WORKER_LOSS, STRAGGLER, SLOWER = 0.005, 0.01, 10.0
NODE_LOSS_SECONDS, BACK_SECONDS = 10_000.0, 60.0
HISTORY, ERROR = 0.5, 0.2
FEW = ((20, 2), (20, 4), (100, 4), (100, 16))
"""Programs and workers of builds on one machine."""
_FEW_RUNS = 30
_FEW_HEAD = ("programs", "workers", "in the order of the manifest", "longest first")
_FEW_NOTE = f"Makespan in times of the bound, the mean of {_FEW_RUNS} draws, without failures."
EXECUTABLE_BYTES = 45_000
"""Mean size of a compressed executable of the same builds."""


@dataclass(frozen=True)
class Work:
    """A job: what it takes, and what the schedule expects."""

    seconds: float
    need: Need


@dataclass(frozen=True)
class Outcome:
    """What came of a simulated build.

    Attributes:
        makespan: seconds until all jobs had ended.
        attempts: how many were started.
        second: those beside a straggler.
        lost: those that ended with a worker or a node.
        given_up: jobs without a result.
    """

    makespan: float
    attempts: int
    second: int
    lost: int
    given_up: int


def draw(programs: int, seed: int) -> list[Work]:
    """Return jobs with measured durations."""
    chance = random.Random(seed)
    measured = json.loads(DURATIONS.read_text())["milliseconds_and_stablehlo_bytes"]
    found = []
    for milliseconds, size in chance.choices(measured, k=programs):
        seconds = milliseconds / 1000
        need = size_need(size)
        if chance.random() < HISTORY:
            need = Need(seconds * chance.lognormvariate(0, ERROR), need.bytes)
        found.append(Work(seconds, need))
    return found


def simulate(
    work: list[Work],
    slots: int,
    *,
    failures: bool = False,
    stragglers: bool = False,
    longest_first: bool = True,
    seed: int = 0,
) -> Outcome:
    """Run a schedule against simulated nodes until all jobs have ended."""
    chance = random.Random(seed)
    schedule = Schedule(slots=slots, window=1.0)
    for number, each in enumerate(work):
        schedule.add(f"{number}", each.need if longest_first else Need(0.0))
    sizes = [min(NODE_SLOTS, slots - at) for at in range(0, slots, NODE_SLOTS)]
    free, live = list(sizes), [True] * len(sizes)
    running: dict[int, int] = {}  # attempt: node
    events: list[tuple[float, int, str, int]] = []
    if failures:
        for node in range(len(sizes)):
            at = chance.expovariate(1 / NODE_LOSS_SECONDS)
            heapq.heappush(events, (at, 0, "node dies", node))
    now, attempts, second, lost, given_up = 0.0, 0, 0, 0, 0
    queue: list[Start] = []  # what found no node: one died between two decisions

    def release(attempt: int) -> None:
        if (node := running.pop(attempt, None)) is not None and live[node]:
            free[node] += 1

    while schedule.unfinished:
        for decision in schedule.decide(now):
            match decision:
                case Start():
                    queue.append(decision)
                    attempts += 1
                    second += decision.second
                case Cancel(attempt):
                    release(attempt)
                    queue = [each for each in queue if each.attempt != attempt]
                case GiveUp():
                    given_up += 1
        while queue and (place := _freest(free)) is not None:
            start = queue.pop(0)
            free[place] -= 1
            running[start.attempt] = place
            schedule.began(start.attempt, now, f"{place}")
            seconds = work[int(start.job)].seconds
            if stragglers and chance.random() < STRAGGLER:
                seconds *= SLOWER
            what = "ends"
            if failures and chance.random() < WORKER_LOSS:
                seconds, what = seconds * chance.random(), "worker dies"
            heapq.heappush(events, (now + seconds, 1, what, start.attempt))
        if not schedule.unfinished:
            break
        # The caller of a schedule asks again now and then, not only after events.
        tick = now + 1.0 if stragglers else float("inf")
        if not events or events[0][0] > tick:
            now = tick
            continue
        now, _, what, number = heapq.heappop(events)
        if what == "node dies":
            live[number], free[number] = False, 0
            for attempt in [a for a, node in running.items() if node == number]:
                del running[attempt]
                lost += 1
                schedule.lost(attempt, Loss.NODE)
            schedule.resize(sum(s for s, up in zip(sizes, live, strict=True) if up))
            heapq.heappush(events, (now + BACK_SECONDS, 0, "node is back", number))
        elif what == "node is back":
            live[number], free[number] = True, sizes[number]
            schedule.resize(sum(s for s, up in zip(sizes, live, strict=True) if up))
            at = now + chance.expovariate(1 / NODE_LOSS_SECONDS)
            heapq.heappush(events, (at, 0, "node dies", number))
        elif number in running:
            release(number)
            if what == "ends":
                schedule.finished(number, now)
            else:
                lost += 1
                schedule.lost(number, Loss.WORKER)
    return Outcome(now, attempts, second, lost, given_up)


def _freest(free: list[int]) -> int | None:
    best = max(range(len(free)), key=free.__getitem__)
    return best if free[best] else None


def bound(work: list[Work], slots: int) -> float:
    """Return the least makespan that any schedule could reach without failures."""
    return max(sum(each.seconds for each in work) / slots, max(each.seconds for each in work))


# ---------------------------------------------------------------------- the store


class MemoryRemote:
    """A shared store in memory that counts its requests."""

    name = "memory"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def read(self, path: str, most: int) -> bytes | None:
        """See `Remote.read`."""
        self.requests["read"] += 1
        content = self.files.get(path)
        self.bytes["read"] += len(content or b"")
        return content

    def download(self, path: str, write: Callable[[memoryview], object]) -> bool:
        """See `Remote.download`."""
        content = self.read(path, 0)
        if content is not None:
            write(memoryview(content))
        return content is not None

    def has(self, path: str) -> bool:
        """See `Remote.has`."""
        self.requests["look"] += 1
        return path in self.files

    def write(self, path: str, content: bytes | BinaryIO) -> None:
        """See `Remote.write`."""
        self.requests["write"] += 1
        self.files[path] = content if isinstance(content, bytes) else content.read()
        self.bytes["write"] += len(self.files[path])

    def create(self, path: str, content: bytes) -> bool:
        """See `Remote.create`."""
        if path in self.files:
            return False
        self.write(path, content)
        return True

    def remove(self, path: str) -> bool:
        """See `Remote.remove`."""
        self.requests["remove"] += 1
        return self.files.pop(path, None) is not None

    def listed(self) -> Iterator[RemoteFile]:
        """See `Remote.listed`."""
        return iter(())


def replay(programs: int, directory: Path) -> dict[str, dict[str, Any]]:
    """Send fake results of so many programs through the stores of a build, its nodes and a second machine.

    A program has StableHLO and an executable of the mean sizes of real builds.
    """
    chance = random.Random(0)
    remote = MemoryRemote()
    measured = json.loads(DURATIONS.read_text())["milliseconds_and_stablehlo_bytes"]
    sizes = [size for _, size in chance.choices(measured, k=programs)]
    found: dict[str, dict[str, Any]] = {}

    def figures(what: str) -> None:
        found[what] = {"requests": dict(remote.requests), "bytes": dict(remote.bytes)}
        remote.requests.clear()
        remote.bytes.clear()

    build = _layered(directory / "build", remote)
    node = DirectoryStore.open(directory / "node")
    local = DirectoryStore(build.root)
    for number in range(programs):
        lower, compile_key = _keys(number)
        build.get(lower)
        program = build.put_blob(chance.randbytes(sizes[number]))
        build.put(lower, {"program": program}, blobs=[program])
        find_compiled(build, compile_key)
        send(remote, local, program)
        bring(remote, node, program)
        executable = chance.randbytes(EXECUTABLE_BYTES)
        digest = node.put_blob(executable)
        send(remote, node, digest)
        bring(remote, local, digest)
        segment = Segment(0, len(executable), digest, len(executable), digest)
        compiled = Compiled(segment, ("avx2",), Memory(1, 2, 3, 4), 1000, 1000, 300 << 20)
        build.put(compile_key, compiled.to_plain(), blobs=[digest])
    build.finish()
    figures("a build on a cluster, empty store")
    second = _layered(directory / "second", remote)
    for number in range(programs):
        for key in _keys(number):
            assert second.get(key) is not None
    second.finish()
    figures("a second machine, nothing to compile")
    return found


def _layered(directory: Path, remote: MemoryRemote) -> LayeredStore:
    return LayeredStore(DirectoryStore.open(directory), [Tier(remote)], lambda text: None)


def _keys(number: int) -> tuple[Key, Key]:
    ingredients = tuple((f"ingredient {i}", digest_of(f"{number} {i}".encode())) for i in range(12))
    name = f"matrix/cpu-x86-64-v3/program-{number}"
    return Key("lower", name, ingredients), Key("compile", name, ingredients)


def main() -> None:
    """Simulate, count, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    programs = parser.parse_args().programs
    facts = begin(1, programs=programs)
    work = draw(programs, seed=1)
    simulations, rows = {}, []
    for slots in SLOTS:
        least = bound(work, slots)
        for what, options in (
            ("in the order of the manifest", {"longest_first": False}),
            ("longest first", {}),
            ("with failures", {"failures": True}),
            ("with failures and stragglers", {"failures": True, "stragglers": True}),
        ):
            outcome = simulate(work, slots, **options)
            simulations[f"{slots} slots, {what}"] = {**vars_of(outcome), "bound": least}
            rows.append(
                (
                    f"{slots}",
                    what,
                    f"{least:.0f}",
                    f"{outcome.makespan:.0f}",
                    f"{outcome.makespan / least:.3f}",
                    f"{outcome.attempts - programs}",
                    f"{outcome.second}",
                    f"{outcome.lost}",
                    f"{outcome.given_up}",
                )
            )
    head = (
        *("slots", "schedule", "bound, s", "makespan, s", "ratio"),
        *("more attempts", "beside stragglers", "lost", "given up"),
    )
    note = (
        "The bound is max(sum / slots, longest), without failures: what is lost and what straggles is in "
        "the makespan alone."
    )
    few = few_programs()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        counted = replay(programs, Path(directory))
    counts = [
        (
            what,
            *(f"{each['requests'].get(kind, 0):,}" for kind in ("look", "read", "write")),
            f"{sum(each['requests'].values()) / programs:.1f}",
            *(f"{each['bytes'].get(kind, 0) / 1e6:,.0f}" for kind in ("read", "write")),
        )
        for what, each in counted.items()
    ]
    counts_head = (
        "who",
        "look-ups",
        "reads",
        "writes",
        "requests a program",
        "MB read",
        "MB written",
    )
    counts_note = (
        "A build, its nodes and the shared store together. Sizes of StableHLO are measured; an executable "
        f"has {EXECUTABLE_BYTES} bytes. Nodes begin with an empty cache."
    )
    page = (
        f"# {programs:,} programs on a cluster, simulated\n\n"
        + Table("Makespan", head, rows, note).markdown()
        + "\n"
        + Table("Builds of one machine", _FEW_HEAD, _few_rows(few), _FEW_NOTE).markdown()
        + "\n"
        + Table("Requests to the shared store", counts_head, counts, counts_note).markdown()
    )
    name = f"{facts['date'][:10]}-schedule-simulation"
    save(RESULTS, name, {**facts, "simulations": simulations, "few": few, "store": counted}, page)


def few_programs() -> list[dict[str, float]]:
    """Return the mean makespan of small builds, in times of its bound, in both orders."""
    found = []
    for programs, workers in FEW:
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for seed in range(_FEW_RUNS):
            work = draw(programs, seed)
            least = bound(work, workers)
            for longest_first, each in ratios.items():
                outcome = simulate(work, workers, longest_first=longest_first)
                each.append(outcome.makespan / least)
        found.append(
            {
                "programs": programs,
                "workers": workers,
                "in order": statistics.mean(ratios[False]),
                "longest first": statistics.mean(ratios[True]),
            }
        )
    return found


def _few_rows(few: list[dict[str, float]]) -> list[tuple[str, ...]]:
    return [
        (
            f"{each['programs']}",
            f"{each['workers']}",
            f"{each['in order']:.3f}",
            f"{each['longest first']:.3f}",
        )
        for each in few
    ]


def vars_of(outcome: Outcome) -> dict[str, float]:
    """Return an outcome as JSON."""
    return {name: getattr(outcome, name) for name in Outcome.__dataclass_fields__}


if __name__ == "__main__":
    main()
