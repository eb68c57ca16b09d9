"""Build a matrix of programs on one machine, in shards and on Ray clusters, and kill shards and nodes.

    python -m benchmarks.studies.many_machines                      half an hour on two cores
    python -m benchmarks.studies.many_machines --programs 60        a trial
    python -m benchmarks.studies.many_machines --jax 0.12.0.1       beside the jax of this environment

A machine is an empty directory for caches, without a C++ compiler: kernels take minutes, and are not measured
here. All machines run here, on the same cores: so the figures show what sharing costs, and not what more
machines gain. Clusters need `ray[client]` and are left out without it; their nodes have one core each. What
is killed is replaced. What a cluster compiled more than once is counted in the logs of the nodes, also of
those that were killed: each of their processes writes a line when a compile ends.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.ray_cluster import ray_cluster

from benchmarks.harness.build_process import BuildProcess, Built
from benchmarks.harness.fresh_processes import progress
from benchmarks.harness.matrix import TARGETS, write_functions, write_matrix
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from prejit.compiler.targets import environments

NO_COMPILERS = {"PATH": "/nonexistent"}
SHARDS, NODES, KILLED = 4, 2, 3
PORT, CLIENT_PORT = 9379, 9391
_LOST = ("the node died", "the worker died", "memory ran out")
_SECOND = "takes long: a second attempt runs"
_COMPILED = re.compile(r"^compiled (sha256:[0-9a-f]{64} for .+)$", re.MULTILINE)

Manifests = Sequence[Path]


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


def finished(process: BuildProcess) -> Built:
    """Wait for the end of a build.

    Raises:
        SystemExit: it failed, and was not killed.
    """
    built = process.finish()
    if built.status and not built.killed:
        raise SystemExit(process.log.read_text())
    return built


def alone(manifests: Manifests, home: Path) -> Built:
    """Build on one machine."""
    return finished(BuildProcess(manifests, home, env=NO_COMPILERS))


def killing(seconds: float, kill: Callable[[random.Random], None]) -> None:
    """Kill something at random times of a build that takes so long without."""
    pick = random.Random(7)
    started = time.perf_counter()
    for at in sorted(pick.uniform(0.15, 0.8) * seconds for _ in range(KILLED)):
        time.sleep(max(0.0, at - (time.perf_counter() - started)))
        progress(f"killed after {time.perf_counter() - started:.0f} s")
        kill(pick)


def sharded(manifests: Manifests, home: Path, kill_in: float = 0.0) -> list[Built]:
    """Build in shards, each with one worker, over a directory.

    Args:
        manifests: what to build.
        home: directory of the machines.
        kill_in: seconds in which shards are killed; 0: none is.
    """

    def begun(number: int) -> BuildProcess:
        machine = home / f"machine{number}-{time.monotonic_ns()}"
        options = ("--store", home / "store", "--shard", f"{number}/{SHARDS}", "--jobs", "1")
        return BuildProcess(manifests, machine, *options, env=NO_COMPILERS)

    shards = {number: begun(number) for number in range(1, SHARDS + 1)}
    dead: list[Built] = []

    def kill(pick: random.Random) -> None:
        number = pick.choice([*shards])
        shards[number].kill()
        dead.append(finished(shards[number]))
        shards[number] = begun(number)

    if kill_in:
        killing(kill_in, kill)
    return [*map(finished, shards.values()), *dead]


def on_cluster(
    manifests: Manifests, home: Path, nodes: int, kill_in: float = 0.0
) -> tuple[Built, Attempts]:
    """Build on a cluster.

    Args:
        manifests: what to build.
        home: directory of the machines.
        nodes: number of nodes with a core each.
        kill_in: seconds in which nodes are killed; 0: none is.

    Returns:
        How the build went, and what its nodes did.
    """
    killed: list[int] = []
    with ray_cluster(home / "nodes", PORT, CLIENT_PORT) as cluster:
        cluster.wait()
        running = [cluster.join() for _ in range(nodes)]

        def kill(pick: random.Random) -> None:
            killed.extend(running.pop(pick.randrange(len(running))).kill())
            running.append(cluster.join())

        time.sleep(10)  # they start
        options = ("--executor", "ray://auto", "--store", home / "store")
        env = {**NO_COMPILERS, "RAY_ADDRESS": cluster.address}
        try:
            process = BuildProcess(manifests, home / "build", *options, env=env)
            if kill_in:
                killing(kill_in, kill)
            built = finished(process)
        finally:
            for each in running:
                each.kill()
        return built, count(cluster.logs, killed, process.log.read_text().splitlines())


def check_shards(found: Sequence[Built], one: Built) -> int:
    """Return how many programs were compiled again because a machine was killed.

    Raises:
        SystemExit: a program is missing, was compiled twice by machines that lived, or bundles differ.
    """
    lived = Counter(name for each in found if not each.killed for name in each.compiled)
    died = Counter(name for each in found if each.killed for name in each.compiled)
    twice = [name for name, times in lived.items() if times > 1]
    bundles = [each.bundles for each in found if not each.killed]
    packed = {name for each in found for name in each.packed}
    if (
        len(lived | died) != len(one.compiled)
        or twice
        or any(each != one.bundles for each in bundles)
        or packed != one.bundles.keys()
    ):
        raise SystemExit(
            f"{len(lived | died)} of {len(one.compiled)} programs; twice: {twice}; expected {one.bundles}, "
            f"found {bundles}; packed: {packed}"
        )
    return len(lived.keys() & died.keys())


def check_cluster(built: Built, attempts: Attempts, one: Built) -> None:
    """Check that nothing was lost, and nothing compiled again without a reason.

    Raises:
        SystemExit: something was.
    """
    wanted = len(one.compiled)
    if (
        built.bundles != one.bundles
        or len(built.compiled) != wanted
        or attempts.programs != wanted
        or attempts.elsewhere > attempts.second
    ):
        raise SystemExit(
            f"expected {one.bundles} of {wanted} programs, and nothing compiled again but beside stragglers; "
            f"found {built.bundles} of {len(built.compiled)} by the build's lines, {attempts}"
        )


def main() -> None:
    """Measure, and write the figures."""
    parser = option_parser()
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--jax", action="append", default=[], metavar="VERSION")
    chosen = parser.parse_args()
    use_two_cores()
    versions: list[str | None] = [None, *chosen.jax]
    facts = begin(1, programs=chosen.programs, jax=versions, targets=TARGETS, builds={})
    rows: list[tuple[str, ...]] = []

    def add(name: str, found: Sequence[Built], lost: int = 0, again: int = 0) -> None:
        progress(f"{name}: {max(each.seconds for each in found):.0f} s")
        facts["builds"][name] = [{**asdict(each), "compiled": len(each.compiled)} for each in found]
        seconds, peak = (
            max(getattr(each, key) for each in found) for key in ("seconds", "peak_mb")
        )
        compiled = " + ".join(str(len(each.compiled)) for each in found)
        rows.append((name, f"{seconds:.0f}", compiled, f"{lost}", f"{again}", f"{peak:.0f}"))

    # Nodes have caches of their own; environments take minutes to make, which is not measured here.
    os.environ["PREJIT_ENVIRONMENTS"] = str(environments.root().parent)
    with tempfile.TemporaryDirectory(prefix="many-machines-") as directory:
        root = Path(directory)
        alone([write_functions(root / "few", 1, jax_versions=versions)], root / "first")
        few = write_matrix(root / "fifth", chosen.programs // 5, jax_versions=versions)
        manifests = write_matrix(root / "all", chosen.programs, jax_versions=versions)
        add("one machine, a fifth of the programs", [alone(few, root / "small")])
        one = alone(manifests, root / "one")
        add("one machine", [one])
        add("the same again", [alone(manifests, root / "one")])
        shards = sharded(manifests, root / "shards")
        add(f"{SHARDS} shards", shards, again=check_shards(shards, one))
        longest = max(each.seconds for each in shards)
        shards = sharded(manifests, root / "killed-shards", longest)
        name = f"{SHARDS} shards, {KILLED} killed and replaced"
        add(name, shards, again=check_shards(shards, one))
        seconds = 0.0
        cases = ((1, 0), (NODES, 0), (NODES, KILLED)) if importlib.util.find_spec("ray") else ()
        for nodes, kills in cases:
            home = root / f"nodes{nodes}-{kills}"
            built, attempts = on_cluster(manifests, home, nodes, seconds if kills else 0.0)
            seconds = built.seconds
            check_cluster(built, attempts, one)
            name = f"Ray nodes: {nodes}" + (f", {kills} killed and replaced" if kills else "")
            lost = sum(number for _, number in attempts.lost)
            add(name, [built], lost, attempts.on_killed + attempts.elsewhere)
    head = (
        *("build", "seconds", "compiled", "attempts lost", "compiled twice"),
        "peak memory of a driver, MB",
    )
    note = (
        "All processes share two cores; each shard has one worker. Compiles on nodes are counted in their "
        "logs. Only what a machine that was killed had compiled and not sent was compiled twice, or a second "
        "attempt beside a straggler. Each bundle has the digest that one machine gives it."
    )
    publish(facts, "many-machines", "Builds on many machines", [Table("Builds", head, rows, note)])


if __name__ == "__main__":
    main()
