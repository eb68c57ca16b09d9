"""Build on machines that share a store, in each kind of store, and kill machines and stores in the middle.

    python -m benchmarks.studies.shared_stores            about 8 minutes on two cores
    python -m benchmarks.studies.shared_stores --only nginx --programs 10     a trial, which is not saved

A machine is an empty directory for caches. The stores are those of tests/store_servers.py that this machine
can run: a directory, nginx with WebDAV, docker-registry and moto (S3, in $MOTO). For each:

- a first machine builds, and a second one builds the same;
- three shards build, and the first is killed in the middle;
- the server is killed in the middle of a build without shards, and stays away;
- it hangs from the middle of such a build on;
- it is killed in the middle of a build by two shards, and stays away: both must say so;
- it is killed in the middle of a build by three shards, and comes back after three seconds.

All bundles must have one digest, and no two machines that live may compile the same program, unless the store
has lost its files.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.store_servers import KINDS, Server

from benchmarks.harness.build_process import BuildProcess, Built
from benchmarks.harness.fresh_processes import progress
from benchmarks.harness.matrix import write_functions
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores

TARGETS = ("cpu-x86-64-v3",)
AWAY_SECONDS = 3.0
"""How long a store is away that comes back."""
STORE_ERROR = 6
"""The exit status of `StoreError`."""
SECOND = "a second machine"
GONE = "the server killed in the middle of 2 shards"


@dataclass(frozen=True)
class Step:
    """A build of one or more machines over one store, as measured.

    Attributes:
        name: what happened.
        machines: the processes.
        seconds: until the last one ended.
        requests: that the server had.
    """

    name: str
    machines: tuple[Built, ...]
    seconds: float
    requests: int

    @property
    def twice(self) -> int:
        """Number of programs that machines that live compiled, beyond one time each."""
        counts = Counter(
            name for each in self.machines if not each.status for name in each.compiled
        )
        return sum(times - 1 for times in counts.values())

    def row(self, store: str) -> tuple[str, ...]:
        """Return a row of the table."""
        compiled = (
            f"{len(each.compiled)}{' (killed)' if each.killed else ''}" for each in self.machines
        )
        read, read_mb, sent, sent_mb = map(
            sum, zip(*(m.traffic for m in self.machines), strict=True)
        )
        failed = any(each.status == STORE_ERROR for each in self.machines)
        return (
            *(store, self.name, f"{self.seconds:.1f}", " + ".join(compiled), f"{self.twice}"),
            f"{read:.0f} ({read_mb:.1f} MB)",
            f"{sent:.0f} ({sent_mb:.1f} MB)",
            f"{self.requests}" if self.requests else "-",
            "exit status 6 names the store" if failed else "one bundle",
        )


def build_all(server: Server, manifest: Path, directory: Path) -> list[Step]:
    """Do all builds over one store."""
    steps: list[Step] = []
    numbers = count()

    def step(
        name: str, shards: int, interrupt: Callable[[list[BuildProcess]], object] | None = None
    ) -> None:
        """Build by so many new machines; interrupt it once those that are watched compiled two programs."""
        progress(f"{server.name}: {name}")
        if name != SECOND:
            server.empty()
        requests, began = server.requests(), time.perf_counter()
        options: list[str | Path] = ["--store", server.url]
        machines = [
            BuildProcess(
                [manifest],
                directory / f"machine{next(numbers)}",
                *options,
                *(("--shard", f"{number}/{shards}", "--jobs", "1") if shards > 1 else ()),
                env=server.env,
            )
            for number in range(1, shards + 1)
        ]
        if interrupt is not None:
            watched = machines[:1] if name.endswith("of them killed") else machines
            while not all(each.compiled() >= 2 or each.ended() for each in watched):
                time.sleep(0.02)
            interrupt(machines)
        built = tuple(each.finish() for each in machines)
        seconds = time.perf_counter() - began
        steps.append(Step(name, built, seconds, server.requests() - requests))

    def away(_: object) -> None:
        server.kill()
        time.sleep(AWAY_SECONDS)
        server.start()

    server.start()
    try:
        step("a first machine", 1)
        step(SECOND, 1)
        step("3 shards, one of them killed", 3, lambda machines: machines[0].kill())
        if server.log is not None:
            step("the server killed in the middle", 1, lambda _: server.kill())
            step("the server hangs from the middle on", 1, lambda _: server.stop())
            step(GONE, 2, lambda _: server.kill())
            step("the server killed and back, 3 shards", 3, away)
    finally:
        server.kill()
    return steps


def mistakes(server: Server, steps: Sequence[Step]) -> list[str]:
    """Return what machines did that they must not do: other bundles, programs compiled twice, wrong ends."""
    wrong: list[str] = []
    digests = {
        digest for step in steps for each in step.machines for digest in each.bundles.values()
    }
    if len(digests) != 1:
        wrong.append(f"the bundles differ: {digests}")
    keeps = server.log is None or server.files is not None
    for step in steps:
        failed = [each for each in step.machines if each.status and not each.killed]
        named = [each for each in failed if server.url in " ".join(each.said)]
        refused = [each for each in named if each.status == STORE_ERROR]
        if failed and not (step.name == GONE and len(refused) == len(step.machines)):
            wrong.append(f"{step.name}: {step.machines}")
        if step.name == GONE and not failed:
            wrong.append(f"{step.name}: expected errors that name the store, found {step.machines}")
        if step.twice and keeps:
            wrong.append(f"{step.name}: {step.twice} programs were compiled twice")
        if step.name == SECOND and step.machines[0].compiled:
            wrong.append(f"{step.name}: compiled something: {step.machines[0]}")
    return [f"{server.name}: {line}" for line in wrong]


def main() -> None:
    """Measure every kind of store, and write the figures."""
    parser = option_parser()
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--only", metavar="TEXT", help="stores with this in their names")
    chosen = parser.parse_args()
    use_two_cores()
    stores: dict[str, Any] = {}
    facts = begin(1, programs=chosen.programs, target=TARGETS[0], stores=stores)
    rows: list[tuple[str, ...]] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="shared-stores-") as directory:
        root = Path(directory)
        functions = write_functions(root / "project", chosen.programs, targets=TARGETS)
        for kind in KINDS:
            server = kind(root)
            if server is None or (chosen.only or "") not in server.name:
                continue
            with tempfile.TemporaryDirectory(dir=root) as machines:
                steps = build_all(server, functions, Path(machines))
            wrong += mistakes(server, steps)
            stores[server.name] = [asdict(each) for each in steps]
            rows += [each.row(server.name) for each in steps]
    head = (
        *("store", "build", "seconds", "compiled", "twice"),
        *("results read", "results written", "requests", "end"),
    )
    note = (
        "All bundles of a store have one digest. Every machine begins empty, and so does the store, but for "
        "the second machine. `twice` counts programs that two machines compiled although neither was killed. "
        "Each shard has one worker. The server is killed, or one shard, when the machine that is watched has "
        "compiled two programs."
    )
    table = Table("Builds", head, rows, note)
    if wrong or chosen.only is not None:
        print(table.markdown())
        sys.exit("\n".join(wrong) or None)
    publish(facts, "shared-stores", "Machines that share a store", [table])


if __name__ == "__main__":
    main()
