"""Measure starts of five programs that know nothing of prejit: cold, with jax's cache, with a bundle.

    python -m benchmarks.studies.recording            medians of 5, about 15 minutes on two cores
    python -m benchmarks.studies.recording --quick    medians of 2, written beside the bundles only

The programs in recorded_programs/ are after the documentation of flax, optax, numpyro, orbax and blackjax.
Run this with a Python that has these packages: `pip install numpyro blackjax` beside the compiler's packages.
Time is from exec to the end of the process, in fresh processes that take turns. In a second home the files
are copies at another path, HOME and the runtime's cache are new, and nothing was unpacked before.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.fresh_processes import (
    BENCHMARKS,
    Row,
    Sample,
    interleave,
    progress,
    run_once,
)
from benchmarks.harness.report import Samples, Table, Target, cell, ratio_within_rounds
from benchmarks.harness.results import RESULTS, begin, option_parser, publish_rows, use_two_cores
from benchmarks.harness.workspace import bench_directory, jax_cache

PROGRAMS = ("flax_train", "optax_fit", "numpyro_schools", "orbax_serve", "blackjax_nuts")
COLD = "no cache"
PLAIN = "cache directory"
ALL = "cache directory, keeps all"
BUNDLE = "prejit run"
ALL_MOVED = "cache directory, keeps all, second home"
BUNDLE_MOVED = "prejit run, second home"
PAIRS = (
    (BUNDLE, COLD),
    (BUNDLE, PLAIN),
    (BUNDLE, ALL),
    (BUNDLE_MOVED, ALL_MOVED),
    (BUNDLE_MOVED, BUNDLE),
)


def rows(name: str, directory: Path) -> list[Row]:
    """Return the ways to start a program, each a process."""
    script = str(BENCHMARKS / "studies" / "recorded_programs" / f"{name}.py")
    command = (sys.executable, script, str(directory / "checkpoint"))
    prejit = (sys.executable, "-m", "prejit.runtime", "run")
    home, second = (_home(directory / each) for each in ("home", "second"))

    plain = {"JAX_COMPILATION_CACHE_DIR": str(directory / "plain")}
    return [
        Row(COLD, command, home),
        Row(PLAIN, command, {**home, **plain}),
        Row(ALL, command, {**home, **jax_cache(directory / "all")}),
        Row(BUNDLE, (*prejit, str(directory / "bundle"), "--", *command), home),
        Row(ALL_MOVED, command, {**second, **jax_cache(directory / "moved")}),
        Row(BUNDLE_MOVED, (*prejit, str(directory / "moved"), "--", *command), second),
    ]


def _home(at: Path) -> dict[str, str]:
    """Return the variables of a process with a home directory."""
    return {
        "HOME": str(at),
        "PREJIT_RUNTIME_CACHE": str(at / "runtime"),
        "XDG_CACHE_HOME": str(at / ".cache"),
    }


def measure(name: str, directory: Path, runs: int) -> dict[str, list[Sample]]:
    """Record a program, and start it in all ways in turn."""
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "home").mkdir(parents=True)

    def run(row: Row) -> Sample:
        for each in ("moved", "second"):  # what prejit unpacks cannot be written
            subprocess.run(["chmod", "-Rf", "u+w", directory / each], check=False)
            shutil.rmtree(directory / each, ignore_errors=True)
        (directory / "second").mkdir()
        if row.name in (ALL_MOVED, BUNDLE_MOVED):
            source = "all" if row.name == ALL_MOVED else "bundle"
            shutil.copytree(directory / source, directory / "moved")
        return run_once(row)

    made = rows(name, directory)
    run(made[0])  # it writes the checkpoint
    run(made[2])  # it fills the cache that is moved
    progress(f"{name}: recording")
    record = ("-m", "prejit.runtime", "record", "-o", str(directory / "bundle"), "--")
    run_once(replace(made[0], command=(sys.executable, *record, *made[0].command)))
    report = directory / "report.json"
    words = made[3].command
    run_once(replace(made[3], command=(*words[:5], "-o", str(report), *words[5:])))
    if missed := json.loads(report.read_text())["missed"]:
        raise SystemExit(f"{name}: {missed} programs were compiled with the bundle")
    return interleave(made, runs, run=run)


def tables(found: Mapping[str, Samples]) -> tuple[list[Table], list[Target]]:
    """Return the tables and targets."""
    ways = list(dict.fromkeys(way for samples in found.values() for way in samples))
    starts = Table(
        "Exec to the end of the program, s",
        ("program", *ways),
        [(name, *(cell(s[way], "exit_seconds") for way in ways)) for name, s in found.items()],
        "`keeps all`: jax's cache with a least compile time of 0. In the second home it is a copy.",
    )
    ratios = {
        name: [ratio_within_rounds(samples, mine, other, "exit_seconds") for mine, other in PAIRS]
        for name, samples in found.items()
    }
    compared = Table(
        "Ratios",
        ("program", *(f"{mine} to {other}" for mine, other in PAIRS)),
        [(name, *(f"{ratio:.2f}" for ratio in each)) for name, each in ratios.items()],
        "Medians of the ratios within each round; below 1, the first one is faster.",
    )
    differing = sum(
        len({sample["output"] for row in samples.values() for sample in row}) != 1
        for samples in found.values()
    )
    targets = [Target("programs whose rows print different results", differing, 0)]
    targets += [
        Target(f"{name}: prejit run to no cache", each[0], 1, " x") for name, each in ratios.items()
    ]
    return [starts, compared], targets


def main() -> None:
    """Parse the command line, measure, and write the results."""
    parser = option_parser()
    parser.add_argument("--runs", type=int, default=5, help="fresh processes of each row")
    parser.add_argument("--quick", action="store_true", help="2 runs, no page in results/")
    parser.add_argument("--only", nargs="*", default=PROGRAMS, help="these programs")
    given = parser.parse_args()
    runs = 2 if given.quick else given.runs
    use_two_cores()
    facts = begin(runs)
    directory = bench_directory() / "recording"
    facts["samples"] = {name: measure(name, directory / name, runs) for name in given.only}
    place = directory / "results" if given.quick else RESULTS
    publish_rows(facts, "recording", *tables(facts["samples"]), place)


if __name__ == "__main__":
    main()
