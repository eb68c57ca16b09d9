"""Build on machines that share a store, in each kind of store, and kill machines and stores in the middle.

    python -m benchmarks.studies.shared_stores            about 8 minutes on two cores
    python -m benchmarks.studies.shared_stores --only nginx --programs 10     a trial, which is not saved

A machine is an empty directory for caches. The stores are those of harness/stores.py that this machine can
run: a directory, nginx with WebDAV, docker-registry and moto (S3, in $MOTO). For each:

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

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.matrix import write_functions
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.stores import KINDS, Server
from benchmarks.harness.workspace import RESULTS

TARGETS = ("cpu-x86-64-v3",)
PROGRAMS = 20
SHARDS = 3
AWAY_SECONDS = 3.0
"""How long a store is away that comes back."""
_COMPILED = re.compile(r"^compiled (\S+) for", re.MULTILINE)
_TRAFFIC = re.compile(r"(\d+) results read \(([\d.]+) MB\), (\d+) written \(([\d.]+) MB\)")
_STORE_ERROR = 6
"""The exit status of `StoreError`."""


@dataclass(frozen=True)
class Built:
    """How a process of a build went.

    Attributes:
        seconds: by the clock.
        status: its exit status; negative: it was killed.
        compiled: names of the programs that it compiled.
        digest: of the bundle; None: the process failed.
        read, written: results that came from the store, and went there.
        read_mb, written_mb: their contents.
        said: what it said about the store, and its error.
    """

    seconds: float
    status: int
    compiled: tuple[str, ...]
    digest: str | None
    read: int
    written: int
    read_mb: float
    written_mb: float
    said: tuple[str, ...]


class Machine:
    """A running `prejit build` on a machine of its own."""

    def __init__(self, manifest: Path, home: Path, server: Server, shard: str | None) -> None:
        home.mkdir()
        command = [sys.executable, "-m", "prejit.runtime", "build", str(manifest), "--json"]
        command += ["-o", str(home / "artifacts"), "--cache", str(home / "cache")]
        command += ["--store", server.url]
        command += [] if shard is None else ["--shard", shard, "--jobs", "1"]
        self._output, self._errors = home / "output", home / "errors"
        self._started = time.perf_counter()
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **server.env},
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def compiled(self) -> tuple[str, ...]:
        """Return the programs that it has compiled until now."""
        return tuple(_COMPILED.findall(self._errors.read_text()))

    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it with its workers, unless it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def finish(self) -> Built:
        """Wait for its end."""
        status = self._process.wait()
        seconds = time.perf_counter() - self._started
        errors = self._errors.read_text()
        traffic = _TRAFFIC.search(errors)
        read, read_mb, written, written_mb = traffic.groups() if traffic else ("0", "0", "0", "0")
        lines = [
            line
            for line in errors.splitlines()
            if re.search("this build goes on|not used|does not answer|^error|hint:", line)
        ]
        digest = None if status else json.loads(self._output.read_text())[0]["digest"]
        return Built(
            seconds,
            status,
            tuple(_COMPILED.findall(errors)),
            digest,
            int(read),
            int(written),
            float(read_mb),
            float(written_mb),
            tuple(lines),
        )


@dataclass(frozen=True)
class Step:
    """A build of one or more machines over one store, as measured.

    Attributes:
        name: what happened.
        machines: the processes; one that was killed has a negative status.
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
        return sum(count - 1 for count in counts.values())


class Study:
    """The builds over one store."""

    def __init__(self, server: Server, manifest: Path, directory: Path) -> None:
        self._server = server
        self._manifest = manifest
        self._directory = directory
        self._count = 0
        self.steps: list[Step] = []

    def run(self) -> None:
        """Do all of them."""
        server = self._server
        server.start()
        try:
            self._finish("a first machine", self._start(1))
            self._finish("a second machine", self._start(1))
            server.empty()
            shards = self._start(SHARDS)
            _wait(shards[:1])
            shards[0].kill()
            self._finish(f"{SHARDS} shards, one of them killed", shards)
            if server.log is not None:
                self._break_server()
        finally:
            server.kill()

    def _break_server(self) -> None:
        server = self._server
        server.empty()
        machine = self._start(1)
        _wait(machine)
        server.kill()
        self._finish("the server killed in the middle", machine)
        server.empty()
        machine = self._start(1)
        _wait(machine)
        server.stop()
        self._finish("the server hangs from the middle on", machine)
        server.empty()
        shards = self._start(2)
        _wait(shards)
        server.kill()
        self._finish("the server killed in the middle of 2 shards", shards)
        server.empty()
        shards = self._start(SHARDS)
        _wait(shards)
        server.kill()
        time.sleep(AWAY_SECONDS)
        server.start()
        self._finish(f"the server killed and back, {SHARDS} shards", shards)

    def _start(self, count: int) -> list[Machine]:
        """Start a build by so many new machines."""
        self._requests = self._server.requests()
        self._began = time.perf_counter()
        shards = [None] if count == 1 else [f"{number}/{count}" for number in range(1, count + 1)]
        self._count += 1
        return [
            Machine(
                self._manifest,
                self._directory / f"machine{self._count}-{number}",
                self._server,
                shard,
            )
            for number, shard in enumerate(shards)
        ]

    def _finish(self, name: str, machines: Sequence[Machine]) -> None:
        progress(f"{self._server.name}: {name}")
        built = tuple(each.finish() for each in machines)
        seconds = time.perf_counter() - self._began
        requests = self._server.requests() - self._requests
        self.steps.append(Step(name, built, seconds, requests))


def _wait(machines: Sequence[Machine]) -> None:
    """Wait until these machines have compiled two programs each."""
    while not all(len(each.compiled()) >= 2 or each.ended() for each in machines):
        time.sleep(0.02)


def mistakes(server: Server, steps: Sequence[Step]) -> list[str]:
    """Return what machines did that they must not do: other bundles, programs compiled twice, wrong ends."""
    wrong: list[str] = []
    digests = {each.digest for step in steps for each in step.machines if each.digest}
    if len(digests) != 1:
        wrong.append(f"the bundles differ: {digests}")
    keeps = server.log is None or server.files is not None
    for number, step in enumerate(steps):
        statuses = [each.status for each in step.machines]
        gone = step.name.endswith("of 2 shards")
        if gone and not (
            statuses == [_STORE_ERROR] * 2
            and all(server.url in " ".join(each.said) for each in step.machines)
        ):
            wrong.append(f"{step.name}: expected errors that name the store, found {step.machines}")
        if not gone and any(status not in (0, -signal.SIGKILL) for status in statuses):
            wrong.append(f"{step.name}: {step.machines}")
        if step.twice and keeps:
            wrong.append(f"{step.name}: {step.twice} programs were compiled twice")
        if number == 1 and step.machines[0].compiled:
            wrong.append(f"{step.name}: compiled something: {step.machines[0]}")
    return [f"{server.name}: {line}" for line in wrong]


def row(server: str, step: Step) -> tuple[str, ...]:
    """Return a row of the table."""
    killed = [" (killed)" if each.status < 0 else "" for each in step.machines]
    counts = [f"{len(m.compiled)}{k}" for m, k in zip(step.machines, killed, strict=True)]
    read, read_mb = sum(m.read for m in step.machines), sum(m.read_mb for m in step.machines)
    sent, sent_mb = sum(m.written for m in step.machines), sum(m.written_mb for m in step.machines)
    failed = any(each.status == _STORE_ERROR for each in step.machines)
    return (
        server,
        step.name,
        f"{step.seconds:.1f}",
        " + ".join(counts),
        f"{step.twice}",
        f"{read} ({read_mb:.1f} MB)",
        f"{sent} ({sent_mb:.1f} MB)",
        f"{step.requests}" if step.requests else "-",
        "exit status 6 names the store" if failed else "one bundle",
    )


def main() -> None:
    """Measure every kind of store, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    parser.add_argument("--only", metavar="TEXT", help="stores with this in their names")
    chosen = parser.parse_args()
    use_two_cores()
    facts = begin(1, programs=chosen.programs, target=TARGETS[0])
    found: dict[str, Any] = {}
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
                study = Study(server, functions, Path(machines))
                study.run()
            wrong += mistakes(server, study.steps)
            found[server.name] = [asdict(each) for each in study.steps]
            rows += [row(server.name, each) for each in study.steps]
    head = (
        "store",
        "build",
        "seconds",
        "compiled",
        "twice",
        "results read",
        "results written",
        "requests",
        "end",
    )
    note = (
        "All bundles of a store have one digest. Every machine begins empty, and so does the store, but for "
        "the second machine. `twice` counts programs that two machines compiled although neither was killed. "
        "Each shard has one worker. The server is killed, or one shard, when the machine that is watched has "
        "compiled two programs."
    )
    page = f"# Machines that share a store\n\n{Table('Builds', head, rows, note).markdown()}"
    if wrong or chosen.only is not None:
        print(page)
        sys.exit("\n".join(wrong) or None)
    save(RESULTS, f"{facts['date'][:10]}-shared-stores", {**facts, "stores": found}, page)


if __name__ == "__main__":
    main()
