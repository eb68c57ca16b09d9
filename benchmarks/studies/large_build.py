"""Build a large model with few bits: seconds by stage, and peak private memory of all processes.

    python -m benchmarks.studies.large_build                      about 2 minutes, 6 GB of disk
    python -m benchmarks.studies.large_build --model llama-8b --dtype int4 --limit 6.3    4 minutes, 26 GB
    python -m benchmarks.studies.large_build --model llama-tiny   a trial

The first build compiles kernels too. A model in shards is built once, and its bundle generates. Of others a
second build has the kernels, and nothing else, in its cache: they are the same for all models. Private memory
is what smaps_rollup calls Private_Dirty, added over all processes four times a second: pages of mapped files
are not in it. A limit is that of a control group, which counts them too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import control_groups
from benchmarks.harness.fresh_processes import environment, progress
from benchmarks.harness.models import LARGE, decoder_manifest
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from benchmarks.harness.workload import Sizes
from benchmarks.harness.workspace import PREJIT_COMMAND, Bench, bench_directory

MODELS = ("llama-1b", *LARGE, "llama-tiny")
NEW_TOKENS = 32
GENERATE = """
import json, sys, time
from prejit.runtime import load
from prejit.runtime.base.process_facts import peak_memory_bytes
bundle = load(sys.argv[1], on_mismatch="error")
times = []
for piece in bundle.stream([1, 2, 3, 4, 5, 6, 7, 8], max_new_tokens=int(sys.argv[2]) + 1, temperature=0.0):
    times.append(time.perf_counter())
rate = (len(times) - 1) / (times[-1] - times[0])
print(json.dumps({"tokens": len(times) - 1, "tokens_per_second": rate, "peak_bytes": peak_memory_bytes()}))
"""
"""It generates from a bundle, and tells how fast, after the first token."""


@dataclass(frozen=True)
class LargeBuild:
    """A build.

    Attributes:
        seconds: by the clock.
        cpu_seconds: of all its processes.
        peak_bytes: the most private memory of all its processes together.
        peak_stage: what the build did then.
        stages: seconds of each stage that the build waited for.
        tokens: number of tokens on which accuracy was measured; 0: it was not.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    peak_stage: str
    stages: dict[str, float]
    tokens: int


def build(
    manifest: Path, cache: Path, output: Path, group: control_groups.Group | None = None
) -> LargeBuild:
    """Build a manifest, and watch its processes."""
    command = [PREJIT_COMMAND, "build", str(manifest), "--cache", str(cache), "--json"]
    command += ["-o", str(output)]
    if group is not None:
        command = [*group.command(tuple(command))]
    cpu, started, peak = _cpu_seconds(), time.perf_counter(), (0, 0.0)
    with tempfile.TemporaryFile("w+") as stdout:
        process = subprocess.Popen(command, stdout=stdout, env=environment({}))
        while process.poll() is None:
            held = sum(map(_private_bytes, _with_children(process.pid)))
            peak = max(peak, (held, time.perf_counter() - started))
            time.sleep(0.25)
        seconds = time.perf_counter() - started
        if process.returncode:
            raise SystemExit(f"{manifest}: exit status {process.returncode}")
        stdout.seek(0)
        [built] = json.load(stdout)
    tokens = (built["accuracy"] or {}).get("tokens", 0)
    [report] = output.glob("*.report.json")
    path = json.loads(report.read_text())["critical_path"]
    stages: Counter[str] = Counter()
    for step in path:
        stages[_stage(step)] += step["end"] - step["start"]
    # The report's clock begins when the modules are there.
    at = peak[1] - (seconds - path[-1]["end"])
    there = next((_stage(step) for step in path if step["start"] <= at <= step["end"]), "start")
    return LargeBuild(seconds, _cpu_seconds() - cpu, peak[0], there, dict(stages), tokens)


def _stage(step: dict[str, Any]) -> str:
    """Return the kind of a step: `lowering`, `packing weights`."""
    what: str = step["what"]
    if what == "other work" and not step["start"]:
        return "kernels"
    first = what.split(" ")[0]
    return first if first in ("lowering", "compiling", "writing") or "/" in what else what


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


def generated(bundle: Path) -> dict[str, Any]:
    """Return the tokens a second of a bundle, and the peak memory of the process."""
    command = [sys.executable, "-c", GENERATE, str(bundle), str(NEW_TOKENS)]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Build, and write the figures."""
    parser = option_parser()
    parser.add_argument("--model", default="llama-1b", choices=MODELS)
    parser.add_argument("--dtype", default="int8", choices=("int8", "int4"))
    parser.add_argument("--limit", type=float, help="gigabytes of memory that a build may take")
    parser.add_argument("--output", type=Path, help="directory of bundles; none: beside the models")
    options = parser.parse_args()
    use_two_cores()
    facts = begin(1, model=options.model, dtype=options.dtype, limit=options.limit)
    source = Bench(bench_directory(), 1, False).model(options.model)
    sizes: Sizes = {"batch": (1,), "prompt": (32,), "context": (128,)}
    text = decoder_manifest("large", str(source), options.dtype, sizes)
    quoted = f'"{options.dtype}"\n'
    without = text.replace(quoted, f"{quoted}accuracy = false\n")
    manifests = {"the first on a machine": text}
    if options.model not in LARGE:
        manifests["with kernels in the cache"] = text
        manifests["the same with accuracy = false"] = without
    found: dict[str, LargeBuild] = {}
    with contextlib.ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(prefix="large-", dir=bench_directory())
        root = Path(stack.enter_context(directory))
        output = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="large-", dir=options.output or root)
            )
        )
        group = None
        if options.limit is not None:
            group = stack.enter_context(control_groups.group(control_groups.MEMORY))
            group.limit_memory(int(options.limit * 1e9))
        manifest, cache = root / "large.toml", root / "cache"
        for name, content in manifests.items():
            progress(name)
            manifest.write_text(content)
            for results in cache.glob("v1/actions/*"):
                if results.name not in ("compiler", "kernels"):
                    shutil.rmtree(results)
            shutil.rmtree(output / "large", ignore_errors=True)
            found[name] = build(manifest, cache, output, group)
        progress("generate")
        facts["generated"] = generated(output / "large")
    _publish(facts, found)


def _publish(facts: dict[str, Any], found: dict[str, LargeBuild]) -> None:
    rows = [
        (
            name,
            f"{each.seconds:.0f}",
            f"{each.cpu_seconds:.0f}",
            f"{each.peak_bytes / 1e9:.2f} GB",
            each.peak_stage,
        )
        for name, each in found.items()
    ]
    head = ("build", "seconds", "CPU seconds", "peak private memory", "while")
    first, made = found["the first on a machine"], facts["generated"]
    limit = facts["limit"]
    note = f"Accuracy is measured on {first.tokens} tokens. "
    if limit is not None:
        note += f"A control group limits the build to {limit} GB, pages of files included. "
    note += (
        f"The bundle gives {made['tokens_per_second']:.1f} tokens a second in a process of "
        f"{made['peak_bytes'] / 1e9:.2f} GB, weights included."
    )
    facts["builds"] = {name: asdict(each) for name, each in found.items()}
    stages = [(name, f"{seconds:.1f}") for name, seconds in first.stages.items()]
    tables = [
        Table(f"{facts['model']} in {facts['dtype']}", head, rows, note),
        Table("The first build waits for", ("stage", "seconds"), stages),
    ]
    what = f"large-build-{facts['model']}-{facts['dtype']}"
    publish(facts, what, "A large model", tables, is_trial=facts["model"] == "llama-tiny")


if __name__ == "__main__":
    main()
