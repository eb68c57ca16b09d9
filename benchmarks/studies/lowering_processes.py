"""Lower a manifest's functions in the build's own process, and in two processes beside it.

    python -m benchmarks.studies.lowering_processes             about 5 minutes on two cores
    python -m benchmarks.studies.lowering_processes --small     seconds; writes nothing

For each number of functions a fresh process runs a build up to the point where all programs are submitted;
nothing is compiled. It counts its own CPU time and largest memory, and those of the processes that it starts.
Each function has eight layers of `tanh(x @ w)`, and a constant of its own, so that no two programs are equal.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness.measure import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.workspace import RESULTS
from prejit.compiler.compile.executor import Executor
from prejit.compiler.compile.jobs import Compiled, CompileJob
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.pipeline.lowerers import units
from prejit.compiler.pipeline.run import build
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.errors import BuildError

COUNTS = (40, 160)
PROCESSES = 2


@dataclass(frozen=True)
class Lowered:
    """The cost of lowering a manifest.

    Attributes:
        functions: number of its functions.
        processes: number of processes that lowered; 0: the build's own.
        cpu_seconds: CPU time of the build's own process.
        others_cpu_seconds: CPU time of the processes that it started.
        megabytes: largest memory of the build's own process.
        others_megabytes: largest memory of one of the others.
        imports_jax: whether the build's own process imported jax.
        programs: digests of the programs.
    """

    functions: int
    processes: int
    cpu_seconds: float
    others_cpu_seconds: float
    megabytes: float
    others_megabytes: float
    imports_jax: bool
    programs: tuple[str, ...]


class Nothing(Executor):
    """Compiles nothing, and notes what it would compile."""

    def __init__(self, processes: int) -> None:
        """Say how many processes may lower."""
        self._processes = processes
        self.programs: list[str] = []

    @property
    def compiled(self) -> frozenset[str]:
        """See `Executor.compiled`."""
        return frozenset()

    @property
    def lowering_processes(self) -> int:
        """See `Executor.lowering_processes`."""
        return self._processes

    def submit(self, job: CompileJob) -> Future[Compiled]:
        """See `Executor.submit`."""
        self.programs.append(job.source.program)
        future: Future[Compiled] = Future()
        future.set_exception(BuildError("nothing is compiled"))
        return future

    def close(self) -> None:
        """See `Executor.close`."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def write(directory: Path, functions: int) -> Path:
    """Write a manifest of functions with its module, and return its path."""
    lines = ["import jax.numpy as jnp", "", ""]
    text = ['[bundle]\nname = "functions"', '[[target]]\nname = "cpu-host"']
    for number in range(functions):
        lines += [
            f"def f{number}(x, w):",
            "    for layer in range(8):",
            f"        x = jnp.tanh(x @ w + {number} + layer)",
            "    return x",
            "",
            "",
        ]
        args = '["float32[8, 64]", "float32[64, 64]"]'
        name = f'name = "f{number}"\nfunction = "functions:f{number}"'
        text.append(f"[[program]]\n{name}\nargs = {args}")
    (directory / "functions.py").write_text("\n".join(lines))
    path = directory / "m.toml"
    path.write_text("\n".join(text) + "\n")
    return path


def lower(manifest: Path, processes: int) -> Lowered:
    """Lower all functions of a manifest in this process, or in others."""
    units._PROCESS_SECONDS = 0.01  # as many processes as may be, however few functions there are
    functions = read_manifest(manifest)
    executor = Nothing(processes)
    try:
        build(
            functions,
            manifest.parent / "out",
            store=DirectoryStore.open(manifest.parent / "cache"),
            executor=executor,
            progress=Quiet(),
        )
    except BuildError as error:
        if "nothing is compiled" not in str(error):
            raise
    own, others = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Lowered(
        len(functions.programs),
        processes,
        round(own.ru_utime + own.ru_stime, 1),
        round(others.ru_utime + others.ru_stime, 1),
        round(own.ru_maxrss / 1024),
        round(others.ru_maxrss / 1024),
        "jax" in sys.modules,
        tuple(sorted(executor.programs)),
    )


def measure(functions: int, processes: int) -> Lowered:
    """Lower in a fresh process, with an empty cache."""
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory), functions)
        module = "benchmarks.studies.lowering_processes"
        options = ("--lower", str(path), "--processes", str(processes))
        done = subprocess.run(
            [sys.executable, "-m", module, *options], capture_output=True, text=True, check=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return Lowered(**{**found, "programs": tuple(found["programs"])})


def main() -> None:
    """Lower each manifest twice, compare, and write what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a trial of 8 functions")
    parser.add_argument("--lower", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.lower is not None:
        print(json.dumps(asdict(lower(given.lower, given.processes))))
        return
    use_two_cores()
    found = []
    for functions in (8,) if given.small else COUNTS:
        pair = [measure(functions, processes) for processes in (0, PROCESSES)]
        if pair[0].programs != pair[1].programs or len(pair[0].programs) != functions:
            raise SystemExit(f"{functions} functions: expected the same programs, found others")
        found += pair
        progress(f"{functions} functions: " + ", ".join(f"{each.megabytes} MB" for each in pair))
    head = (
        *("functions", "lowered by", "CPU s, build", "CPU s, others"),
        *("MB, build", "MB, largest other", "build imports jax"),
    )
    rows = [
        (
            *(
                str(each.functions),
                f"{each.processes} processes" if each.processes else "the build",
            ),
            *(f"{each.cpu_seconds:.1f}", f"{each.others_cpu_seconds:.1f}"),
            *(f"{each.megabytes:.0f}", f"{each.others_megabytes:.0f}"),
            "yes" if each.imports_jax else "no",
        )
        for each in found
    ]
    note = "One build each; nothing is compiled."
    table = Table("Builds", head, rows, note).markdown()
    page = f"# Lowering in processes of their own\n\n{table}\n"
    if given.small:
        print(page)
        return
    facts = begin(1, lowered=[{**asdict(each), "programs": len(each.programs)} for each in found])
    save(RESULTS, f"{facts['date'][:10]}-lowering-processes", facts, page)


if __name__ == "__main__":
    main()
