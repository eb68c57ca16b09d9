"""Build a matrix of programs on Ray clusters of one and of two nodes, and kill nodes.

    python -m benchmarks.studies.cluster_builds                     about 20 minutes on two cores
    python -m benchmarks.studies.cluster_builds --programs 60       a trial

It needs `ray[client]`. Nodes have one core each and share the machine with the head node and the build, so
two nodes cannot be twice as fast on two cores. Nodes are killed at random; another joins for each.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.matrix import TARGETS, write_matrix
from benchmarks.harness.measure import progress
from benchmarks.harness.ray_cluster import ray_cluster
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.workspace import RESULTS
from benchmarks.studies.scaled_builds import Process, Run, plain

KILLED = 3
PORT, CLIENT_PORT = 9379, 9391
_LOST = ("the node died", "the worker died")


def on_cluster(manifest: Path, home: Path, nodes: int, kill_in: float = 0.0) -> tuple[Run, int]:
    """Build on a cluster.

    Args:
        manifest: what to build.
        home: directory of the machines.
        nodes: number of nodes with a core each.
        kill_in: seconds in which nodes are killed; 0: none is.

    Returns:
        How the build went, and how many attempts were lost.
    """
    pick = random.Random(7)
    with ray_cluster(home / "nodes", PORT, CLIENT_PORT) as cluster:
        os.environ["RAY_ADDRESS"] = cluster.address
        time.sleep(10)  # the head node starts
        running = [cluster.join() for _ in range(nodes)]
        time.sleep(10)
        options = ["--executor", "ray://auto", "--store", str(home / "store")]
        try:
            process = Process(manifest, home / "build", *options)
            if kill_in:
                started = time.perf_counter()
                for at in sorted(pick.uniform(0.15, 0.8) * kill_in for _ in range(KILLED)):
                    time.sleep(max(0.0, at - (time.perf_counter() - started)))
                    progress(f"a node is killed after {time.perf_counter() - started:.0f} s")
                    running.pop(pick.randrange(len(running))).kill()
                    running.append(cluster.join())
            run = process.finish()
        finally:
            for each in running:
                each.kill()
    errors = (home / "build" / "errors").read_text().splitlines()
    return run, sum(line.endswith(_LOST) for line in errors)


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--programs", type=int, default=500)
    programs = parser.parse_args().programs
    use_two_cores()
    facts = begin(1, programs=programs, targets=TARGETS)
    found: dict[str, tuple[Run, int]] = {}
    with tempfile.TemporaryDirectory(prefix="cluster-builds-") as directory:
        root = Path(directory)
        manifest = write_matrix(root / "matrix", programs)
        progress("this machine alone")
        alone = plain(manifest, root / "alone")
        found["this machine, two workers"] = alone, 0
        for nodes in (1, 2):
            progress(f"{nodes} nodes")
            name = f"{nodes} Ray node{'s' if nodes > 1 else ''}"
            found[name] = on_cluster(manifest, root / f"nodes{nodes}", nodes)
        progress(f"2 nodes, {KILLED} killed")
        seconds = found["2 Ray nodes"][0].seconds
        name = f"2 Ray nodes, {KILLED} killed and replaced"
        found[name] = on_cluster(manifest, root / "killed", 2, seconds)
    rows = [
        (
            name,
            f"{run.seconds:.0f}",
            f"{run.compile_seconds:.0f}",
            f"{len(run.compiled)}",
            f"{lost}",
            f"{run.peak_mb:.0f}",
        )
        for name, (run, lost) in found.items()
    ]
    for name, (run, _) in found.items():
        if run.digest != alone.digest or len(set(run.compiled)) != len(alone.compiled):
            raise SystemExit(f"{name}: expected the bundle of one machine, found another")
    head = (
        *("build", "seconds", "sum of compile times, s", "compiled"),
        *("attempts lost", "peak memory of the driver, MB"),
    )
    note = (
        "All processes share two cores. All bundles have one digest. An attempt is lost when its node is "
        "killed; nothing else is compiled again."
    )
    page = f"# Builds on a Ray cluster\n\n{Table('Builds', head, rows, note).markdown()}"
    builds: dict[str, Any] = {
        name: {**asdict(run), "compiled": len(run.compiled), "lost": lost}
        for name, (run, lost) in found.items()
    }
    save(RESULTS, f"{facts['date'][:10]}-cluster-builds", {**facts, "builds": builds}, page)


if __name__ == "__main__":
    main()
