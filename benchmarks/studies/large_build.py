"""Build a model of 1.24 billion parameters in int8: seconds, and peak private memory of all processes.

    python -m benchmarks.studies.large_build               about 2 minutes, 6 GB of disk
    python -m benchmarks.studies.large_build --model llama-tiny    a trial

The first build compiles kernels too. The second one has them, and nothing else, in its cache: kernels are the
same for all models. Private memory is what smaps_rollup calls Private_Dirty, added over the build and all its
processes four times a second: pages of mapped files are not in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness.fresh_processes import environment, progress
from benchmarks.harness.models import decoder_manifest
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from benchmarks.harness.workload import Sizes
from benchmarks.harness.workspace import PREJIT_COMMAND, Bench, bench_directory


@dataclass(frozen=True)
class LargeBuild:
    """A build.

    Attributes:
        seconds: by the clock.
        cpu_seconds: of all its processes.
        peak_bytes: the most private memory of all its processes together.
        tokens: number of tokens on which accuracy was measured; 0: it was not.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    tokens: int


def build(manifest: Path, cache: Path) -> LargeBuild:
    """Build a manifest, and watch its processes."""
    command = [PREJIT_COMMAND, "build", str(manifest), "--cache", str(cache), "--json"]
    command += ["-o", str(cache.parent / "out")]
    cpu, started, peak = _cpu_seconds(), time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, env=environment({}))
        while process.poll() is None:
            peak = max(peak, sum(map(_private_bytes, _with_children(process.pid))))
            time.sleep(0.25)
        seconds = time.perf_counter() - started
        if process.returncode:
            raise SystemExit(f"{manifest}: exit status {process.returncode}")
        output.seek(0)
        [built] = json.load(output)
    tokens = (built["accuracy"] or {}).get("tokens", 0)
    return LargeBuild(seconds, _cpu_seconds() - cpu, peak, tokens)


def _cpu_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _with_children(pid: int) -> list[int]:
    found = [pid]
    for each in found:  # it grows
        for file in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += map(int, file.read_text().split())
            except OSError:  # the thread has ended
                continue
    return found


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:  # the process has ended
        return 0
    found = [line.split()[1] for line in lines if line.startswith("Private_Dirty:")]
    return int(found[0]) << 10 if found else 0


def main() -> None:
    """Build with and without kernels to compile, and without accuracy, and write the figures."""
    parser = option_parser()
    parser.add_argument("--model", default="llama-1b", choices=("llama-1b", "llama-tiny"))
    options = parser.parse_args()
    use_two_cores()
    facts = begin(1, model=options.model)
    source = Bench(bench_directory(), 1, False).model(options.model)
    sizes: Sizes = {"batch": (1,), "prompt": (32,), "context": (128,)}
    text = decoder_manifest("large", str(source), "int8", sizes)
    without = text.replace('"int8"\n', '"int8"\naccuracy = false\n')
    found: dict[str, LargeBuild] = {}
    with tempfile.TemporaryDirectory(prefix="large-", dir=bench_directory()) as root:
        manifest, cache = Path(root, "large.toml"), Path(root, "cache")
        for name, content in (
            ("the first on a machine", text),
            ("with kernels in the cache", text),
            ("the same with accuracy = false", without),
        ):
            progress(name)
            manifest.write_text(content)
            for results in cache.glob("v1/actions/*"):
                if results.name not in ("compiler", "kernels"):
                    shutil.rmtree(results)
            shutil.rmtree(Path(root, "out"), ignore_errors=True)
            found[name] = build(manifest, cache)
    rows = [
        (name, f"{each.seconds:.0f}", f"{each.cpu_seconds:.0f}", f"{each.peak_bytes / 1e9:.2f} GB")
        for name, each in found.items()
    ]
    head = ("build", "seconds", "CPU seconds", "peak private memory")
    note = f"Accuracy is measured on {found['the first on a machine'].tokens} tokens."
    facts["builds"] = {name: asdict(each) for name, each in found.items()}
    publish(facts, "large-build", "A large model in int8", [Table(options.model, head, rows, note)])


if __name__ == "__main__":
    main()
