"""Build a matrix of programs by one machine and in shards, kill shards, and measure the memory of a build.

    python -m benchmarks.studies.scaled_builds                         about 10 minutes on two cores
    python -m benchmarks.studies.scaled_builds --programs 60           a trial
    python -m benchmarks.studies.scaled_builds --jax 0.12.0.1          beside the jax of this environment

A machine is an empty directory for caches, without a C++ compiler: kernels take minutes, and are not measured
here. All machines run here, on the same cores: so shards show what
sharing costs, and not what more machines gain. `--jax` compiles each target for another version, too, in an
environment that is made before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.matrix import TARGETS, write_functions, write_matrix
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.workspace import RESULTS

_NO_COMPILERS = "/nonexistent"
"""The PATH of builds: no machine finds a C++ compiler, which would take minutes for the kernels of models."""
SHARDS = 4
KILLED = 3
_COMPILED = re.compile(r"^compiled (.+?)(?: on \S+)? in ([\d.]+) s", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """How one process of a build went.

    Attributes:
        seconds: by the clock.
        compiled: the programs that it compiled: name and target, in order.
        compile_seconds: sum of their times.
        peak_mb: peak resident memory of the driver, without its workers.
        bundles: their digests, by name; empty: the process was killed.
        packed: names of those that it wrote.
    """

    seconds: float
    compiled: tuple[str, ...]
    compile_seconds: float
    peak_mb: float
    bundles: dict[str, str]
    packed: tuple[str, ...]


class Process:
    """A running `prejit build`."""

    def __init__(self, manifests: Sequence[Path], home: Path, *options: str | Path) -> None:
        command = [sys.executable, "-m", "prejit.runtime", "build", *map(str, manifests), "--json"]
        command += ["--cache", str(home / "cache"), "-o", str(home / "out"), *map(str, options)]
        self._started = time.perf_counter()
        home.mkdir(parents=True, exist_ok=True)
        self._output, self._errors = home / "output", home / "errors"
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                env=os.environ | {"PATH": _NO_COMPILERS},
            )
        self._peak_mb = 0.0
        self._watch = threading.Thread(target=self._poll)
        self._watch.start()

    def kill(self) -> None:
        """Kill the build with its workers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def finish(self) -> Run:
        """Wait for its end.

        Raises:
            SystemExit: it failed.
        """
        status = self._process.wait()
        seconds = time.perf_counter() - self._started
        self._watch.join()
        output, errors = self._output.read_text(), self._errors.read_text()
        if status and status != -signal.SIGKILL:
            raise SystemExit(errors)
        found = json.loads(output) if not status else []
        lines = _COMPILED.findall(errors)
        return Run(
            seconds,
            tuple(name for name, _ in lines),
            sum(float(each) for _, each in lines),
            self._peak_mb,
            {Path(each["path"]).name: each["digest"] for each in found},
            tuple(Path(each["path"]).name for each in found if each["packed_here"]),
        )

    def _poll(self) -> None:
        """Keep the high-water mark of the process until it ends."""
        status = Path(f"/proc/{self._process.pid}/status")
        while self._process.poll() is None:
            try:
                found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
            except OSError:
                return
            if found:
                self._peak_mb = int(found[1]) / 1000
            time.sleep(0.1)


def plain(manifests: Sequence[Path], home: Path) -> Run:
    """Build on one machine."""
    return Process(manifests, home).finish()


def sharded(manifests: Sequence[Path], home: Path) -> list[Run]:
    """Build in shards, each with one worker, over a directory."""
    shards = [_shard(manifests, home, number) for number in range(1, SHARDS + 1)]
    return [each.finish() for each in shards]


def _shard(manifests: Sequence[Path], home: Path, number: int) -> Process:
    own = home / f"machine{number}-{time.monotonic_ns()}"
    options = ["--store", str(home / "store"), "--shard", f"{number}/{SHARDS}", "--jobs", "1"]
    return Process(manifests, own, *options)


def killed(manifests: Sequence[Path], home: Path, seconds: float) -> tuple[list[Run], list[Run]]:
    """Build in shards of which some are killed at random times and begin again on new machines.

    Args:
        manifests: what to build.
        home: directory of the machines.
        seconds: how long the build takes without kills.

    Returns:
        The processes that ended by themselves, and those that were killed.
    """
    pick = random.Random(7)
    shards = {number: _shard(manifests, home, number) for number in range(1, SHARDS + 1)}
    dead: list[Run] = []
    times = sorted(pick.uniform(0.15, 0.8) * seconds for _ in range(KILLED))
    started = time.perf_counter()
    for at, number in zip(times, pick.sample([*shards], KILLED), strict=True):
        time.sleep(max(0.0, at - (time.perf_counter() - started)))
        progress(f"shard {number} is killed after {time.perf_counter() - started:.0f} s")
        shards[number].kill()
        dead.append(shards[number].finish())
        shards[number] = _shard(manifests, home, number)
    return [each.finish() for each in shards.values()], dead


def check(found: Sequence[Run], dead: Sequence[Run], programs: int) -> dict[str, int]:
    """Return how often programs were compiled again.

    Raises:
        SystemExit: a program is missing, was compiled twice by processes that lived, or bundles differ.
    """
    lived = Counter(name for each in found for name in each.compiled)
    died = Counter(name for each in dead for name in each.compiled)
    total = len(lived | died)
    twice = [name for name, count in lived.items() if count > 1]
    bundles = {name: digest for each in found for name, digest in each.bundles.items()}
    packed = {name for each in found for name in each.packed}
    equal = all(each.bundles == bundles for each in found)
    if total != programs or twice or not equal or packed != bundles.keys():
        raise SystemExit(
            f"{total} of {programs} programs; twice: {twice}; bundles: "
            f"{[each.bundles for each in found]}; packed: {packed}"
        )
    return {
        "programs": programs,
        "compiled": sum(lived.values()) + sum(died.values()),
        "again": len(lived.keys() & died.keys()),
    }


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--jax", action="append", default=[], metavar="VERSION")
    chosen = parser.parse_args()
    use_two_cores()
    versions: list[str | None] = [None, *chosen.jax]
    facts = begin(1, programs=chosen.programs, jax=versions, targets=TARGETS)
    rows: list[tuple[str, ...]] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="scaled-builds-") as directory:
        root = Path(directory)
        progress("environments")
        plain([write_functions(root / "few", 1, jax_versions=versions)], root / "first")
        hundred = write_matrix(root / "hundred", chosen.programs // 5, jax_versions=versions)
        manifests = write_matrix(root / "all", chosen.programs, jax_versions=versions)
        progress(f"{chosen.programs // 5} programs, one machine")
        small = plain(hundred, root / "small")
        progress(f"{chosen.programs} programs, one machine")
        one = plain(manifests, root / "one")
        again = plain(manifests, root / "one")
        progress("shards")
        shards = sharded(manifests, root / "shards")
        check(shards, [], len(one.compiled))
        progress("shards that are killed")
        seconds = max(each.seconds for each in shards)
        lived, dead = killed(manifests, root / "killed", seconds)
        counts = check(lived, dead, len(one.compiled))
    for name, runs in (
        (f"one machine, {len(small.compiled)} programs", [small]),
        (f"one machine, {len(one.compiled)} programs", [one]),
        ("the same again", [again]),
        (f"{SHARDS} shards", shards),
        (f"{SHARDS} shards, {KILLED} killed and restarted", [*lived, *dead]),
    ):
        rows.append(
            (
                name,
                f"{max(each.seconds for each in runs):.0f}",
                f"{sum(each.compile_seconds for each in runs):.0f}",
                " + ".join(str(len(each.compiled)) for each in runs),
                f"{max(each.peak_mb for each in runs):.0f}",
            )
        )
        found[name] = [{**asdict(each), "compiled": len(each.compiled)} for each in runs]
    head = (
        "build",
        "seconds",
        "sum of compile times, s",
        "compiled",
        "peak memory of a driver, MB",
    )
    note = (
        "All processes share two cores; each shard has one worker. After the kills "
        f"{counts['again']} of {counts['programs']} programs were compiled again, which a machine that was "
        "killed had compiled and not sent. No other program was compiled twice. Each bundle has the digest "
        "that one machine gives it."
    )
    for each in (*shards, *lived):
        if each.bundles != one.bundles:
            raise SystemExit(
                f"expected the bundles of one machine, {one.bundles}, found {each.bundles}"
            )
    page = f"# Builds at scale\n\n{Table('Builds', head, rows, note).markdown()}"
    save(RESULTS, f"{facts['date'][:10]}-scaled-builds", {**facts, **counts, "builds": found}, page)


if __name__ == "__main__":
    main()
