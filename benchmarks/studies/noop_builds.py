"""Build again when nothing changed: a decoder's programs, functions of the user, and many programs.

    python -m benchmarks.studies.noop_builds               about 10 minutes, most of it to build first
    python -m benchmarks.studies.noop_builds --scale 0.05  a try of a minute

The first build compiles with the quick flags of tests/quick_compiling.py, which are no part of any key here.
Each measured build is a new process: seconds by the clock from start to end, CPU seconds of it and its
children, and whether it imported jax.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness.measure import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.workspace import RESULTS

_QUICKLY = """
import sys
from tests.quick_compiling import compile_quickly
from prejit.runtime.__main__ import main
compile_quickly()
sys.exit(main(sys.argv[1:]))
"""
_NOOP = """
import sys
from prejit.runtime.__main__ import main
status = main(sys.argv[1:])
print("jax" if "jax" in sys.modules else "no jax", file=sys.stderr)
sys.exit(status)
"""


@dataclass(frozen=True)
class Noop:
    """Builds that change nothing.

    Attributes:
        programs: number of programs.
        seconds: median by the clock.
        cpu_seconds: median CPU time of the process and its children.
        jax: whether it imported jax.
        first_seconds: the first build, which compiled.
    """

    programs: int
    seconds: float
    cpu_seconds: float
    jax: bool
    first_seconds: float


def write_functions(directory: Path, count: int, sizes: int) -> Path:
    """Write a manifest of functions, ten in a module, each with some sizes of its bucket."""
    sections = ['[bundle]\nname = "functions"\n', '[[target]]\nname = "cpu-x86-64-v2"\n']
    (directory / "shared_helper.py").write_text("OFFSET = 1\n")
    for number in range(count):
        module = f"functions{number // 10}"
        path = directory / f"{module}.py"
        before = path.read_text() if path.exists() else "import shared_helper\n"
        body = f"x * {number + 2} + shared_helper.OFFSET"
        path.write_text(f"{before}\n\ndef f{number}(x):\n    return {body}\n")
        sections.append(
            f'[[program]]\nname = "f{number}"\nfunction = "{module}:f{number}"\n'
            f'args = {{ x = "float32[{{n}}]" }}\nbuckets = {{ n = {[*range(1, sizes + 1)]} }}\n'
        )
    (directory / "functions.toml").write_text("\n".join(sections))
    return directory / "functions.toml"


def write_decoder(directory: Path, source: Path, programs: int) -> Path:
    """Write a manifest of a published decoder with at least so many programs."""
    from prejit.compiler.manifest.reading import read_manifest
    from prejit.compiler.manifest.specs import program_specs

    path = directory / "decoder.toml"
    contexts = [16]
    while True:
        path.write_text(
            f'[bundle]\nname = "decoder"\n[model]\nsource = {json.dumps(str(source))}\n'
            f"[generate]\nbatch = [1, 2]\nprompt = [8, 16]\ncontext = {contexts}\n"
            '[[target]]\nname = "cpu-x86-64-v2"\n'
        )
        if len(program_specs(read_manifest(path))) >= programs:
            return path
        contexts.append(contexts[-1] + 16)


def measure(manifest: Path, rounds: int) -> Noop:
    """Build a manifest once, and then measure builds that change nothing."""
    directory = manifest.parent
    env = {
        **os.environ,
        "PREJIT_CACHE": str(directory / "cache"),
        "PREJIT_RUNTIME_CACHE": str(directory / "runtime"),
    }
    # An installation has its modules compiled. With this, each process would compile those that are not.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    arguments = ["build", str(manifest), "-o", str(directory / "out"), "--json", "--no-measure"]
    progress(f"{manifest.stem}: first build")
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", _QUICKLY, *arguments], env=env, check=True, capture_output=True
    )
    first = time.perf_counter() - started
    seconds, cpu = [], []
    for _ in range(rounds + 1):  # the first of them warms the page cache
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _NOOP, *arguments],
            env=env,
            check=True,
            capture_output=True,
            text=True,
        )
        seconds.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        [built] = json.loads(done.stdout)
        if built["compiled"] or built["written"]:
            raise SystemExit(f"{manifest}: expected a build that changes nothing, found {built}")
    has_jax = done.stderr.splitlines()[-1] == "jax"
    median = statistics.median
    return Noop(built["cached"], median(seconds[1:]), median(cpu[1:]), has_jax, first)


def main() -> None:
    """Measure builds that change nothing, and write the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the programs to build")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    scale: float = options.scale
    use_two_cores()
    facts = begin(options.rounds, scale=scale)

    def share(count: int) -> int:
        return max(1, round(scale * count))

    found: dict[str, Noop] = {}
    with tempfile.TemporaryDirectory(prefix="noop-") as root:
        for name in ("decoder", "functions", "many"):
            directory = Path(root, name)
            directory.mkdir()
            if name == "decoder":
                source = Path("manifests/demo-model").absolute()
                manifest = write_decoder(directory, source, share(100))
            else:
                sizes = 1 if name == "functions" else 10
                manifest = write_functions(directory, share(100), sizes)
            found[name] = measure(manifest, options.rounds)
    what = {
        "decoder": "programs of a decoder",
        "functions": "functions of the user",
        "many": "programs of 100 functions of the user",
    }
    rows = [
        (
            f"{each.programs} {what[name]}",
            f"{each.seconds:.2f}",
            f"{each.cpu_seconds:.2f}",
            "yes" if each.jax else "no",
            f"{each.first_seconds:.0f}",
        )
        for name, each in found.items()
    ]
    head = ("build", "seconds", "CPU seconds", "imports jax", "first build, seconds")
    note = "Processes from start to end, medians."
    page = f"# Builds that change nothing\n\n{Table('Builds', head, rows, note).markdown()}"
    measured = {name: asdict(each) for name, each in found.items()}
    save(RESULTS, f"{facts['date'][:10]}-noop-builds", {**facts, "builds": measured}, page)


if __name__ == "__main__":
    main()
