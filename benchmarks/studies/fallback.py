"""Measure the portable tier: a start on a machine that matches none of a bundle's targets.

    python -m benchmarks.studies.fallback             medians of 7, about 5 minutes on two cores
    python -m benchmarks.studies.fallback --quick     medians of 3, written beside the bundles only

Time from exec to the first token in fresh processes that take turns: a load that matches; a first start on a
mismatch, which compiles; a second one, which finds what the first compiled; plain JAX, without and with its
persistent cache. Model, bundle and directories are those of run.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
from pathlib import Path

from benchmarks.harness import report
from benchmarks.harness.measure import Row, Sample, progress, run_once
from benchmarks.harness.report import Table, Target, cell, ratio, same_tokens
from benchmarks.harness.results import begin, file_name, judged, save, use_two_cores
from benchmarks.harness.workspace import RESULTS, Bench, bench_directory, prepare
from prejit.runtime import Fingerprint
from prejit.runtime.base.typed_json import to_json

MATCHED, FIRST, SECOND = "matched load", "mismatch, first start", "mismatch, second start"
LIMIT = 1.2
"""Largest ratio of the second start on a mismatch to a matched load."""


def rows(bench: Bench) -> list[Row]:
    """Return the rows. Each prejit row has its own runtime cache, with its own receipts."""
    other = bench.directory / "other-machine.json"
    here = Fingerprint.current()
    other.write_bytes(to_json(dataclasses.replace(here, jaxlib="0.0.1")))
    matched = ("peers/prejit_child.py", "generate", bench.bundle("gpt2-4"))
    plain = ("peers/jax_baseline.py", "generate", bench.weights)
    return [
        Row(MATCHED, matched, cache(bench, MATCHED)),
        Row(FIRST, (*matched, str(other)), cache(bench, FIRST)),
        Row(SECOND, (*matched, str(other)), cache(bench, SECOND)),
        Row(report.JAX_COLD, plain),
        Row(report.JAX_WARM, plain, bench.warm),
    ]


def cache(bench: Bench, row: str) -> dict[str, str]:
    """Return the environment with a row's runtime cache."""
    name = re.sub(r"[^a-z]+", "-", row)
    return {"PREJIT_RUNTIME_CACHE": str(bench.directory / "fallback-caches" / name)}


def measure(bench: Bench) -> dict[str, list[Sample]]:
    """Run every row in turn, round after round. The first round fills the caches and is thrown away."""
    every = rows(bench)
    compiled = Path(cache(bench, FIRST)["PREJIT_RUNTIME_CACHE"]) / "compiled"
    samples: dict[str, list[Sample]] = {row.name: [] for row in every}
    for number in range(bench.runs + 1):
        turn = number % len(every)
        for row in [*every[turn:], *every[:turn]]:
            if row.name == FIRST:
                shutil.rmtree(compiled, ignore_errors=True)  # its receipts stay
            sample = run_once(row)
            if number:
                samples[row.name].append(sample)
        progress(f"round {number}/{bench.runs}" if number else "warm-up")
    return samples


def tables(samples: dict[str, list[Sample]]) -> tuple[list[Table], list[Target]]:
    """Return the tables and targets."""
    others = (MATCHED, report.JAX_COLD, report.JAX_WARM)
    lines = [
        (
            name,
            cell(found, "first_seconds"),
            *(f"{ratio(samples, name, other, 'first_seconds'):.2f}" for other in others),
            cell(found, "last_seconds"),
            cell(found, "cpu_seconds"),
        )
        for name, found in samples.items()
    ]
    agree = same_tokens(samples)
    table = Table(
        "The portable tier: GPT-2 124M, float32, batch 1, 32 tokens in, 64 out",
        (
            *("", "exec → 1st token, s", "to a matched load", "to cold jit", "to warm cache"),
            *("exec → 64th token, s", "CPU, s"),
        ),
        lines,
        "A mismatch is declared (`load(fingerprint=)`); what is verified and its receipts are those of any "
        f"load. Tokens of all rows: {'the same' if agree else '**not the same**'}.",
    )
    wanted = {MATCHED: "loaded", FIRST: "compiled", SECOND: "kept"}
    strays = sum(
        how != wanted[name]
        for name in wanted
        for sample in samples[name]
        for how in sample["programs"].values()
    )
    second = ratio(samples, SECOND, MATCHED, "first_seconds")
    return [table], [
        Target("second start on a mismatch, to a matched load", second, LIMIT, " x"),
        Target("programs that were obtained in another way", strays, 0),
        Target("processes whose tokens differ", 0 if agree else 1, 0),
    ]


def main() -> None:
    """Parse the command line, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=7, help="fresh processes of each row")
    parser.add_argument("--quick", action="store_true", help="3 runs, no page in results/")
    given = parser.parse_args()
    bench = Bench(bench_directory(), 3 if given.quick else given.runs, given.quick)
    use_two_cores()
    facts = begin(bench.runs)
    prepare(bench, ("gpt2-4",))
    shutil.rmtree(bench.directory / "fallback-caches", ignore_errors=True)
    samples = measure(bench)
    made, targets = tables(samples)
    facts |= {
        "samples": samples,
        "load_average_after": os.getloadavg()[0],
        "targets": judged(targets),
    }
    command = "python -m benchmarks.studies.fallback"
    page = report.markdown(facts, made, targets, command=command)
    directory = bench.directory / "results" if given.quick else RESULTS
    save(directory, file_name(facts, "fallback"), facts, page)


if __name__ == "__main__":
    main()
