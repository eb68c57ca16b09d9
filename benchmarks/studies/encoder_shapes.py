"""Measure an encoder of 22 shapes: exec to the first embedding, and first calls compared with later ones.

    python -m benchmarks.studies.encoder_shapes             medians of 4, about 5 minutes on two quiet cores
    python -m benchmarks.studies.encoder_shapes --quick     medians of 2, written beside the bundles only

Fresh processes take turns: a bundle whose shapes are called right after load, one whose shapes are called a
second later, and plain JAX that runs the same shapes at start-up, without and with its persistent cache. The
model is that of encoder_model.py, of MiniLM's shape.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil

from benchmarks.harness import report
from benchmarks.harness.measure import Row, Sample, Spread, progress, run_once
from benchmarks.harness.report import JAX_COLD, JAX_WARM, MB, Table, Target, cell, ratio
from benchmarks.harness.results import begin, file_name, judged, save, use_two_cores
from benchmarks.harness.workspace import PREJIT_COMMAND, RESULTS, Bench, bench_directory
from benchmarks.peers.encode_child import SHAPES

AT_ONCE, LATER = "prejit, shapes at once after load", "prejit, a second after load"
NAMES = tuple(f"{batch}x{length}" for batch, length in SHAPES)
LIMIT = 2.0
"""Largest ratio of a shape's first call to its steady latency."""
SAME = 1e-4
"""Largest difference allowed between sums of embeddings' first values."""


def prepare(bench: Bench) -> str:
    """Make the model and its bundle if they are missing or stale; return the model's directory."""
    model = bench.directory / "minilm"
    run_once(Row("model", ("harness/encoder_model.py", str(model))))
    shapes = json.dumps(SHAPES)
    manifest = bench.directory / "encoder.toml"
    manifest.write_text(
        f'[bundle]\nname = "encoder"\n\n[model]\nsource = "minilm"\n\n[encode]\nshapes = {shapes}\n\n'
        '[[target]]\nname = "cpu-host"\n'
    )
    progress("prejit build encoder.toml (22 shapes)")
    options = (
        "-o",
        str(bench.directory / "bundles"),
        "--cache",
        str(bench.directory / "build-cache"),
    )
    run_once(Row("build", (PREJIT_COMMAND, "build", str(manifest), *options), bench.prejit))
    shutil.rmtree(bench.warm["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    return str(model)


def measure(bench: Bench, model: str) -> dict[str, list[Sample]]:
    """Run every row in turn, round after round. The first round fills the caches and is thrown away."""
    path = bench.bundle("encoder")
    rows = [
        Row(AT_ONCE, ("peers/encode_child.py", "bundle", path, "0"), bench.prejit),
        Row(LATER, ("peers/encode_child.py", "bundle", path, "1"), bench.prejit),
        Row(JAX_COLD, ("peers/encode_child.py", "jax", model)),
        Row(JAX_WARM, ("peers/encode_child.py", "jax", model), bench.warm),
    ]
    samples: dict[str, list[Sample]] = {row.name: [] for row in rows}
    for number in range(bench.runs + 1):
        turn = number % len(rows)
        for row in [*rows[turn:], *rows[:turn]]:
            if not number and row.name == JAX_COLD:
                continue  # it fills no cache
            sample = run_once(row)
            if number:
                samples[row.name].append(sample)
        progress(f"round {number}/{bench.runs}" if number else "warm-up")
    return samples


def of_shape(found: list[Sample], key: str, shape: str) -> float:
    """Return the median milliseconds of a shape."""
    return Spread.of([sample[key][shape] for sample in found]).median * 1e3


def to_steady(found: list[Sample], shape: str) -> float:
    """Return the first call of a shape divided by later ones: the median over all processes."""
    return Spread.of([sample["first"][shape] / sample["steady"][shape] for sample in found]).median


def tables(samples: dict[str, list[Sample]]) -> tuple[list[Table], list[Target]]:
    """Return the tables and targets."""
    for found in samples.values():
        for sample in found:
            sample["dirty_bytes"] = sample["memory"]["Private_Dirty"]
            sample["worst"] = max(sample["first"][n] / sample["steady"][n] for n in NAMES)
    lines = [
        (
            name,
            cell(found, "first_seconds"),
            f"{ratio(samples, name, JAX_COLD, 'first_seconds'):.2f}",
            f"{ratio(samples, name, JAX_WARM, 'first_seconds'):.2f}",
            cell(found, "all_seconds"),
            cell(found, "worst", 1),
            cell(found, "dirty_bytes", 0, MB),
        )
        for name, found in samples.items()
    ]
    agree = all(
        abs(sample["sums"][name] - samples[JAX_COLD][0]["sums"][name]) <= SAME
        for found in samples.values()
        for sample in found
        for name in NAMES
    )
    ours = samples[AT_ONCE][0]
    start = Table(
        "An encoder of 22 shapes: MiniLM's sizes, float32",
        (
            *("", "exec → 1st embedding, s", "to cold jit", "to warm cache"),
            *("exec → all 22 shapes, s", "worst first call, to steady", "memory, MB"),
        ),
        lines,
        "The first shape is 1x16, in which the first embedding is made. Memory is what the process does not "
        f"share, at its end. Embeddings of all rows: {'the same' if agree else '**not the same**'}.",
    )
    each = Table(
        "Each shape: the first call, and steady latency",
        (
            *("sentences x tokens", "runs as", "first at once, ms", "to steady"),
            *("first later, ms", "to steady", "steady, ms", "JAX steady, ms"),
            *("JAX first cold, ms", "JAX first cached, ms"),
        ),
        [
            (
                name,
                ", ".join(f"{runs} x {shape}" for shape, runs in ours["used"][name].items()),
                f"{of_shape(samples[AT_ONCE], 'first', name):.1f}",
                f"{to_steady(samples[AT_ONCE], name):.2f}",
                f"{of_shape(samples[LATER], 'first', name):.1f}",
                f"{to_steady(samples[LATER], name):.2f}",
                f"{of_shape(samples[LATER], 'steady', name):.1f}",
                f"{of_shape(samples[JAX_WARM], 'steady', name):.1f}",
                f"{of_shape(samples[JAX_COLD], 'first', name):.1f}",
                f"{of_shape(samples[JAX_WARM], 'first', name):.1f}",
            )
            for name in NAMES
        ],
        "A call fills its shape; which shapes it ran as the first time is the library's choice, by cost and "
        "by what was loaded.",
    )
    goals = [
        Target(
            f"worst of 22 first calls, {when}, to steady",
            max(to_steady(samples[row], name) for name in NAMES),
            LIMIT,
            " x",
        )
        for when, row in (("at once after load", AT_ONCE), ("a second later", LATER))
    ]
    return [start, each], [*goals, Target("rows whose embeddings differ", 0 if agree else 1, 0)]


def main() -> None:
    """Parse the command line, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=4, help="fresh processes of each row")
    parser.add_argument("--quick", action="store_true", help="2 runs, no page in results/")
    given = parser.parse_args()
    bench = Bench(bench_directory(), 2 if given.quick else given.runs, given.quick)
    bench.directory.mkdir(parents=True, exist_ok=True)
    use_two_cores()
    facts = begin(bench.runs)
    samples = measure(bench, prepare(bench))
    made, targets = tables(samples)
    facts |= {
        "samples": samples,
        "load_average_after": os.getloadavg()[0],
        "targets": judged(targets),
    }
    command = "python -m benchmarks.studies.encoder_shapes"
    page = report.markdown(facts, made, targets, command=command)
    directory = bench.directory / "results" if given.quick else RESULTS
    save(directory, file_name(facts, "encode"), facts, page)


if __name__ == "__main__":
    main()
