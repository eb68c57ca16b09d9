"""The first answer of a serverless function with 1 CPU and 512 MB: with a bundle, and on plain jax.

    python -m benchmarks.studies.serverless             about 3 minutes
    python -m benchmarks.studies.serverless --trial     prints the table and writes nothing

Fresh processes take turns, from exec to the first answer, on one CPU and in a control group of 512 MB. The
page cache is warm. The function ranks 64 rows by 24 products of 1024 x 1024: 100 MB of weights. jax.jit has
a warm persistent cache. A first load has no receipts and no kept golden answers, as in a new sandbox.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.control_groups import MEMORY, Group, group
from benchmarks.harness.fresh_processes import Row, Sample, command_line, interleave, run_once
from benchmarks.harness.report import Table, cell
from benchmarks.harness.results import begin, option_parser, publish
from benchmarks.harness.workspace import jax_cache
from benchmarks.peers.serverless_child import LAYERS, ROWS, WIDTH, rank

LIMIT_BYTES = 512 << 20
FIRST_LOAD, LATER, PLAIN = "ServerlessHandler, first load", "ServerlessHandler, later", "jax.jit"
CACHE = "PREJIT_RUNTIME_CACHE"


def make_rows(directory: Path) -> list[Row]:
    """Build the bundle, write the weights for jax, and return the rows."""
    from prejit.compiler import Program, build

    random = np.random.default_rng(4)
    shape = (WIDTH, WIDTH)
    weights = [random.standard_normal(shape, np.float32) / np.float32(32) for _ in range(LAYERS)]
    np.savez(directory / "weights.npz", *weights)
    program = Program("rank", rank, [f"float32[{ROWS}, {WIDTH}]"], params=weights)
    bundle = build(program, directory, name="rank", cache=directory / "cache", quiet=True).path
    child, jax = "peers/serverless_child.py", jax_cache(directory / "jax")
    with_bundle = (child, "prejit", str(bundle))
    return [
        Row(FIRST_LOAD, with_bundle, {CACHE: str(directory / "new")}),
        Row(LATER, with_bundle, {CACHE: str(directory / "kept")}),
        Row(PLAIN, (child, "jax", str(directory / "weights.npz")), jax),
    ]


def run(row: Row, limited: Group) -> Sample:
    """Run a row once within the limits."""
    if row.name == FIRST_LOAD:
        shutil.rmtree(row.environment[CACHE], ignore_errors=True)
    limited.limit_memory(LIMIT_BYTES)
    cpu = str(min(os.sched_getaffinity(0)))
    command = ("taskset", "--cpu-list", cpu, *command_line(row))
    return run_once(replace(row, command=limited.command(command)))


def main() -> None:
    """Measure, and write the figures."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trial", action="store_true")
    options = parser.parse_args()
    facts: dict[str, Any] = begin(options.rounds, limit_bytes=LIMIT_BYTES)
    with tempfile.TemporaryDirectory(prefix="serverless-") as root, group(MEMORY) as limited:
        rows = make_rows(Path(root))
        samples = interleave(rows, options.rounds, run=lambda row: run(row, limited))
    facts["samples"] = samples
    scores = [each["scores"] for found in samples.values() for each in found]
    np.testing.assert_allclose(scores, [scores[0]] * len(scores), rtol=1e-3)
    lines = []
    for row in rows:
        found = samples[row.name]
        restored = cell(found, "restored_seconds") if "restored_seconds" in found[0] else ""
        figures = (cell(found, key) for key in ("first_seconds", "cpu_seconds"))
        memory = f"{max(each['rss_bytes'] for each in found) / 1e6:.0f}"
        lines.append((row.name, *figures, memory, restored))
    head = (
        "handler",
        "seconds from exec",
        "CPU seconds in all",
        "most MB",
        "seconds after a restore",
    )
    note = "After a restore on an equal machine: fingerprint, new random numbers, the first answer."
    table = Table("First answers with 1 CPU and 512 MB", head, lines, note)
    title = "A serverless function: first answers"
    publish(facts, "serverless", title, [table], is_trial=options.trial)


if __name__ == "__main__":
    main()
