"""Measure the examples: exec to the first result and seconds of a call, from a bundle and by jax.jit.

    python -m benchmarks.studies.examples [--runs 5] [--calls 21] [--only NAME]

Builds each example, after training it if it has a train.py, then runs fresh processes in turns: from the
bundle without a receipt, by jax.jit, and by jax.jit with a warm persistent cache. Also says how far the
results are from those of jax.jit. Writes benchmarks/results/.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.fresh_processes import Row, Sample, interleave, progress, run_once
from benchmarks.harness.report import Table, Target, cell, ratio_within_rounds
from benchmarks.harness.results import begin, option_parser, publish_rows, use_two_cores
from benchmarks.harness.workspace import jax_cache
from prejit.compiler import build

EXAMPLES = Path(__file__).parents[2] / "examples"
BUNDLE, COLD, CACHED = "prejit", "jax.jit", "jax.jit, warm cache"
SPLIT = "training"
"""The example that runs on two devices; jax.jit runs it on one."""


def measure(name: str, directory: Path, runs: int, calls: int) -> dict[str, list[Sample]]:
    """Build an example, run it, and add the greatest difference of results to the bundle's samples."""
    example = EXAMPLES / name
    if (example / "train.py").exists() and not (example / "checkpoint").exists():
        progress(f"training {name}")
        subprocess.run([sys.executable, example / "train.py"], check=True)
    progress(f"prejit build {name}")
    build(example / "manifest.toml", directory, quiet=True)
    outputs = {row: directory / f"{name}-{place}.npz" for place, row in enumerate((BUNDLE, COLD))}
    receipts = directory / "receipts"

    def row(title: str, source: str, environment: dict[str, str]) -> Row:
        output = outputs.get(title, directory / "unused.npz")
        command = ("studies/example_child.py", str(example), source, str(calls), str(output))
        return Row(title, command, environment)

    def run(row: Row) -> Sample:
        shutil.rmtree(receipts, ignore_errors=True)
        return run_once(row)

    rows = [
        row(BUNDLE, str(directory / name), {"PREJIT_RUNTIME_CACHE": str(receipts)}),
        row(COLD, "jit", {}),
        row(CACHED, "jit", jax_cache(directory / f"{name}-cache")),
    ]
    samples = interleave(rows, runs, run=run)
    difference = _difference(outputs[BUNDLE], outputs[COLD])
    for sample in samples[BUNDLE]:
        sample["difference"] = difference
    return samples


def _difference(ours: Path, theirs: Path) -> float:
    """Return the greatest difference of two results, as a share of the greatest value of its array."""
    worst = 0.0
    with np.load(ours) as mine, np.load(theirs) as other:
        assert mine.files == other.files
        for name in mine.files:
            expected: Any = other[name].astype(np.float64)
            scale = max(float(np.abs(expected).max(initial=0)), 1e-30)
            worst = max(worst, float(np.abs(mine[name] - expected).max(initial=0)) / scale)
    return worst


def main() -> None:
    """Measure all examples and write the table."""
    parser = option_parser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--calls", type=int, default=21)
    parser.add_argument("--only", metavar="NAME", help="measure one example")
    given = parser.parse_args()
    use_two_cores()
    facts = begin(given.runs)
    names = sorted(at.parent.name for at in EXAMPLES.glob(f"{given.only or '*'}/manifest.toml"))
    with tempfile.TemporaryDirectory() as directory:
        samples = {name: measure(name, Path(directory), given.runs, given.calls) for name in names}
    lines, targets = [], []
    for name, rows in samples.items():
        for title, found in rows.items():
            ours = title == BUNDLE
            difference = found[0].get("difference")
            lines.append(
                (
                    name,
                    f"**{title}**" if ours else title,
                    cell(found, "first_seconds"),
                    cell(found, "call_seconds", 2, 1e-3),
                    ""
                    if difference is None
                    else f"{difference:.0e}"
                    if difference
                    else "0 (equal)",
                )
            )
        first = ratio_within_rounds(rows, BUNDLE, CACHED, "first_seconds")
        targets.append(Target(f"{name}: exec to first result, to {CACHED}", first, 1, " x"))
        steady = ratio_within_rounds(rows, BUNDLE, COLD, "call_seconds")
        targets.append(Target(f"{name}: a call, to {COLD}", steady, 1.1, " x"))
    head = ("example", "", "exec → 1st result, s", "a call, ms", "largest difference to jax.jit")
    note = (
        "A difference is a share of the greatest value of its array. "
        f"`{SPLIT}` runs on a mesh of two CPU devices from the bundle, and on one by jax.jit. "
        "The first result of a decoder is its first token, and a call is one token after it."
    )
    facts["samples"] = samples
    what = f"examples-{given.only}" if given.only else "examples"
    publish_rows(facts, what, [Table("Examples", head, lines, note)], targets)


if __name__ == "__main__":
    main()
