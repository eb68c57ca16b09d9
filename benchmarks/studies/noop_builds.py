"""Build again when nothing changed: a decoder's programs, functions of the user, and many programs.

    python -m benchmarks.studies.noop_builds               about 10 minutes, most of it to build first
    python -m benchmarks.studies.noop_builds --scale 0.05  a try of a minute

The first build compiles with the quick flags of tests/quick_compiling.py, which are no part of any key here.
Each measured build is a new process, by the clock from start to end; none may import jax.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.fresh_processes import Row, Sample, interleave, progress, run_once
from benchmarks.harness.report import Table, cell
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores

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
assert "jax" not in sys.modules
sys.exit(status)
"""


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


def write_decoder(directory: Path, programs: int) -> Path:
    """Write a manifest of the demo model with at least so many programs: 9 for each context."""
    contexts = [16 * number for number in range(1, 1 + -(-programs // 9))]
    path = directory / "decoder.toml"
    source = json.dumps(str(Path("manifests/demo-model").absolute()))
    path.write_text(
        f'[bundle]\nname = "decoder"\n[model]\nsource = {source}\n'
        f"[generate]\nbatch = [1, 2]\nprompt = [8, 16]\ncontext = {contexts}\n"
        '[[target]]\nname = "cpu-x86-64-v2"\n'
    )
    return path


def measure(manifest: Path, rounds: int) -> list[Sample]:
    """Build a manifest once, and then measure builds that change nothing.

    Raises:
        SystemExit: a build changed something.
    """
    at = manifest.parent
    arguments = ("build", str(manifest), "-o", str(at / "out"), "--json", "--no-measure")
    caches = {"PREJIT_CACHE": str(at / "cache"), "PREJIT_RUNTIME_CACHE": str(at / "runtime")}
    progress(f"{manifest.stem}: first build")
    run_once(Row("first", (sys.executable, "-c", _QUICKLY, *arguments), caches))
    row = Row(manifest.stem, (sys.executable, "-c", _NOOP, *arguments), caches)
    [samples] = interleave([row], rounds).values()
    for sample in samples:
        [built] = json.loads(sample["output"])
        if built["compiled"] or built["written"]:
            raise SystemExit(f"{manifest}: expected a build that changes nothing, found {built}")
        sample["programs"] = built["cached"]
    return samples


def main() -> None:
    """Measure builds that change nothing, and write the figures."""
    parser = option_parser()
    parser.add_argument("--scale", type=float, default=1.0, help="share of the programs to build")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    use_two_cores()
    facts = begin(options.rounds, scale=options.scale)
    count = max(1, round(100 * options.scale))
    rows, facts["builds"] = [], {}
    with tempfile.TemporaryDirectory(prefix="noop-") as root:
        for name, title in (
            ("decoder", "programs of a decoder"),
            ("functions", "functions of the user"),
            ("many", "programs of functions of the user, ten each"),
        ):
            at = Path(root, name)
            at.mkdir()
            sizes = 10 if name == "many" else 1
            decoder = name == "decoder"
            manifest = write_decoder(at, count) if decoder else write_functions(at, count, sizes)
            samples = facts["builds"][name] = measure(manifest, options.rounds)
            seconds, cpu = (cell(samples, key) for key in ("exit_seconds", "cpu_seconds"))
            rows.append((f"{samples[0]['programs']} {title}", seconds, cpu))
    note = "Whole processes from start to end; none imports jax."
    table = Table("Builds", ("build", "seconds", "CPU seconds"), rows, note)
    publish(facts, "noop-builds", "Builds that change nothing", [table])


if __name__ == "__main__":
    main()
