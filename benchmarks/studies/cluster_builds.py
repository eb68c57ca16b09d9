"""Build a matrix of programs on Ray clusters of one and of two nodes, and kill nodes.

    python -m benchmarks.studies.cluster_builds                     about 17 minutes on two cores
    python -m benchmarks.studies.cluster_builds --programs 60       a trial
    python -m benchmarks.studies.cluster_builds --jax 0.12.0.1      beside the jax of this environment

It needs `ray[client]`. Nodes have one core each and share the machine with the head node and the build, so
two nodes cannot be twice as fast on two cores. Nodes are killed at random; another joins for each. What was
compiled more than once is counted in the logs of the nodes, also of those that were killed: each of their
processes writes a line when a compile ends.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.matrix import TARGETS, write_functions, write_matrix
from benchmarks.harness.measure import progress
from benchmarks.harness.ray_cluster import ray_cluster
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.workspace import RESULTS
from benchmarks.studies.scaled_builds import Process, Run, plain
from prejit.compiler.targets import environments

KILLED = 3
PORT, CLIENT_PORT = 9379, 9391
_LOST = ("the node died", "the worker died", "memory ran out")
_SECOND = "takes long: a second attempt runs"
_COMPILED = re.compile(r"^compiled (sha256:[0-9a-f]{64} for .+)$", re.MULTILINE)


@dataclass(frozen=True)
class Attempts:
    """Numbers of compiles on a cluster, by the logs of its nodes and by the lines of the build.

    Attributes:
        compiled: compiles that ended on nodes.
        programs: different programs among them.
        on_killed: compiles that were made again and had ended once on a node that was killed.
        elsewhere: compiles that were made again though no node had been killed that ended them.
        second: second attempts beside stragglers, as the build says.
        lost: attempts that the build lost, by reason.
    """

    compiled: int = 0
    programs: int = 0
    on_killed: int = 0
    elsewhere: int = 0
    second: int = 0
    lost: tuple[tuple[str, int], ...] = ()


def count(logs: Path, killed: Collection[int], lines: Sequence[str]) -> Attempts:
    """Count what was compiled, and what was compiled more than once.

    Args:
        logs: directory of the nodes' logs.
        killed: numbers of the processes of nodes that were killed.
        lines: what the build printed.
    """
    ended = defaultdict[str, list[bool]](list)  # by program and target: whether on a killed node
    for path in logs.rglob("worker-*.err"):  # Ray moves those of dead processes to `old`
        process = int(path.stem.rpartition("-")[2])
        for name in _COMPILED.findall(path.read_text(errors="replace")):
            ended[name].append(process in killed)
    elsewhere = sum(max(0, each.count(False) - 1) for each in ended.values())
    compiled = sum(map(len, ended.values()))
    lost = Counter(reason for line in lines for reason in _LOST if line.endswith(reason))
    return Attempts(
        compiled,
        len(ended),
        compiled - len(ended) - elsewhere,
        elsewhere,
        sum(_SECOND in line for line in lines),
        tuple(sorted(lost.items())),
    )


def on_cluster(
    manifests: Sequence[Path], home: Path, nodes: int, kill_in: float = 0.0
) -> tuple[Run, Attempts]:
    """Build on a cluster.

    Args:
        manifests: what to build.
        home: directory of the machines.
        nodes: number of nodes with a core each.
        kill_in: seconds in which nodes are killed; 0: none is.

    Returns:
        How the build went, and what its nodes did.
    """
    pick = random.Random(7)
    killed = list[int]()
    with ray_cluster(home / "nodes", PORT, CLIENT_PORT) as cluster:
        os.environ["RAY_ADDRESS"] = cluster.address
        cluster.wait()
        running = [cluster.join() for _ in range(nodes)]
        time.sleep(10)  # they start
        options = ["--executor", "ray://auto", "--store", str(home / "store")]
        try:
            process = Process(manifests, home / "build", *options)
            if kill_in:
                started = time.perf_counter()
                for at in sorted(pick.uniform(0.15, 0.8) * kill_in for _ in range(KILLED)):
                    time.sleep(max(0.0, at - (time.perf_counter() - started)))
                    progress(f"a node is killed after {time.perf_counter() - started:.0f} s")
                    killed += running.pop(pick.randrange(len(running))).kill()
                    running.append(cluster.join())
            run = process.finish()
        finally:
            for each in running:
                each.kill()
        lines = (home / "build" / "errors").read_text().splitlines()
        return run, count(cluster.logs, killed, lines)


def check(name: str, run: Run, attempts: Attempts, alone: Run) -> None:
    """Check that nothing was lost, and nothing compiled again without a reason.

    Raises:
        SystemExit: something was.
    """
    if run.bundles != alone.bundles:
        raise SystemExit(f"{name}: expected the bundles of one machine, found {run.bundles}")
    if len(run.compiled) != len(alone.compiled) or attempts.programs != len(alone.compiled):
        raise SystemExit(
            f"{name}: expected {len(alone.compiled)} programs, found {len(run.compiled)} in the build's "
            f"lines and {attempts.programs} in the nodes' logs"
        )
    if attempts.elsewhere > attempts.second:
        raise SystemExit(
            f"{name}: {attempts.elsewhere} programs were compiled again, and only {attempts.second} of them "
            "beside stragglers"
        )


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--jax", action="append", default=[], metavar="VERSION")
    chosen = parser.parse_args()
    use_two_cores()
    versions: list[str | None] = [None, *chosen.jax]
    facts = begin(1, programs=chosen.programs, jax=versions, targets=TARGETS)
    # Nodes have caches of their own; environments take minutes to make, which is not measured here.
    os.environ["PREJIT_ENVIRONMENTS"] = str(environments.root().parent)
    found: dict[str, tuple[Run, Attempts]] = {}
    with tempfile.TemporaryDirectory(prefix="cluster-builds-") as directory:
        root = Path(directory)
        if chosen.jax:
            progress("environments")
            plain([write_functions(root / "few", 1, jax_versions=versions)], root / "first")
        manifests = write_matrix(root / "matrix", chosen.programs, jax_versions=versions)
        progress("this machine alone")
        alone = plain(manifests, root / "alone")
        for nodes in (1, 2):
            progress(f"{nodes} nodes")
            name = f"{nodes} Ray node{'s' if nodes > 1 else ''}"
            found[name] = on_cluster(manifests, root / f"nodes{nodes}", nodes)
        progress(f"2 nodes, {KILLED} killed")
        seconds = found["2 Ray nodes"][0].seconds
        name = f"2 Ray nodes, {KILLED} killed and replaced"
        found[name] = on_cluster(manifests, root / "killed", 2, seconds)
    for name, (run, attempts) in found.items():
        check(name, run, attempts, alone)
    found = {"this machine, two workers": (alone, Attempts(len(alone.compiled)))} | found
    rows = [
        (
            name,
            f"{run.seconds:.0f}",
            f"{run.compile_seconds:.0f}",
            f"{attempts.compiled}",
            f"{sum(number for _, number in attempts.lost)}",
            f"{attempts.on_killed}",
            f"{attempts.elsewhere}",
            f"{run.peak_mb:.0f}",
        )
        for name, (run, attempts) in found.items()
    ]
    head = (
        *("build", "seconds", "sum of compile times, s", "compiles that ended", "attempts lost"),
        *("again: ended on a killed node", "again: others", "peak memory of the driver, MB"),
    )
    note = (
        "All processes share two cores. Each bundle has the digest that one machine gives it. Compiles are "
        "counted in the logs of the nodes. An attempt is lost when its node is killed; a compile that had "
        "ended there, and whose result had not arrived, is made again. Others are second attempts beside "
        "stragglers."
    )
    page = f"# Builds on a Ray cluster\n\n{Table('Builds', head, rows, note).markdown()}"
    builds: dict[str, Any] = {
        name: {**asdict(run), "compiled": len(run.compiled), "attempts": asdict(attempts)}
        for name, (run, attempts) in found.items()
    }
    save(RESULTS, f"{facts['date'][:10]}-cluster-builds", {**facts, "builds": builds}, page)


if __name__ == "__main__":
    main()
