"""Measure starts of five programs that know nothing of prejit: cold, with jax's cache, with a bundle.

    python -m benchmarks.studies.recording            medians of 5, about 15 minutes on two cores
    python -m benchmarks.studies.recording --quick    medians of 2, written beside the bundles only

The programs in recorded_programs/ are after the documentation of flax, optax, numpyro, orbax and blackjax.
Run this with a Python that has these packages: `pip install numpyro blackjax` beside the compiler's packages.
Time is from exec to the end of the process, in fresh processes that take turns. In a second home the files
are copies at another path, HOME and the runtime's cache are new, and nothing was unpacked before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.measure import Sample, progress
from benchmarks.harness.report import Table, Target, cell, ratio_within_rounds
from benchmarks.harness.results import begin, judged, save, use_two_cores
from benchmarks.harness.workspace import RESULTS, bench_directory
from prejit.compiler.pipeline.pack.bundle_files import assemble
from prejit.compiler.recording.merging import RecordedFile, packed, read_targets
from prejit.runtime.format.writing import write_layout

PROGRAMS = ("flax_train", "optax_fit", "numpyro_schools", "orbax_serve", "blackjax_nuts")
COLD = "no cache"
PLAIN = "cache directory"
ALL = "cache directory, keeps all"
BUNDLE = "prejit run"
ALL_MOVED = "cache directory, keeps all, second home"
BUNDLE_MOVED = "prejit run, second home"
ROWS = (COLD, PLAIN, ALL, BUNDLE, ALL_MOVED, BUNDLE_MOVED)
KEEP_ALL = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@dataclass(frozen=True)
class Case:
    """A program with its files.

    Attributes:
        name: its name.
        directory: its caches, its bundle and its checkpoint.
        python: the interpreter that has its packages.
    """

    name: str
    directory: Path
    python: str

    @property
    def command(self) -> list[str]:
        """Return the program's command."""
        script = Path(__file__).parent / "recorded_programs" / f"{self.name}.py"
        return [self.python, str(script), str(self.directory / "checkpoint")]

    def prejit(self, *words: str) -> list[str]:
        """Return a command of prejit that ends with the program's."""
        return [self.python, "-m", "prejit.runtime", *words, "--", *self.command]

    def prepare(self) -> None:
        """Fill both cache directories, and record."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        for row in (COLD, PLAIN, ALL):  # the first writes the checkpoint
            self.run(row)
        words = ("record", "-o", str(self.directory / "bundle"))
        _run(self.prejit(*words), self.environment("home"))

    def environment(self, home: str, **more: str) -> dict[str, str]:
        """Return the environment of a process with a home directory, without the caller's settings of jax."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        at = self.directory / home
        at.mkdir(exist_ok=True)
        cache = {"PREJIT_RUNTIME_CACHE": str(at / "runtime"), "XDG_CACHE_HOME": str(at / ".cache")}
        return {**own, "HOME": str(at), **cache, **more}

    def run(self, row: str) -> Sample:
        """Run the program once as a row says, and return how long it took and what it printed."""
        moved = self.directory / "moved"
        shutil.rmtree(moved, ignore_errors=True)
        subprocess.run(["chmod", "-R", "u+w", self.directory / "second"], check=False, stderr=-3)
        shutil.rmtree(self.directory / "second", ignore_errors=True)
        command, environment = self.command, self.environment("home")
        if row in (PLAIN, ALL):
            place = self.directory / ("plain" if row == PLAIN else "all")
            settings = {} if row == PLAIN else KEEP_ALL
            environment |= {"JAX_COMPILATION_CACHE_DIR": str(place), **settings}
        elif row == ALL_MOVED:
            shutil.copytree(self.directory / "all", moved)
            environment = self.environment("second", **KEEP_ALL)
            environment["JAX_COMPILATION_CACHE_DIR"] = str(moved)
        elif row == BUNDLE:
            command = self.prejit("run", str(self.directory / "bundle"))
        elif row == BUNDLE_MOVED:
            shutil.copytree(self.directory / "bundle", moved)
            command, environment = self.prejit("run", str(moved)), self.environment("second")
        started = time.perf_counter()
        printed = _run(command, environment)
        return {"seconds": time.perf_counter() - started, "printed": printed}

    def report(self, bundle: Path, home: str) -> dict[str, Any]:
        """Return the report of a run with a bundle."""
        file = self.directory / "report.json"
        _run(self.prejit("run", str(bundle), "-o", str(file)), self.environment(home))
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def with_another_jaxlib(self) -> Path:
        """Return the bundle as another jaxlib would have recorded it: its requirement, its keys."""
        [target] = read_targets(self.directory / "bundle")

        def aged(file: RecordedFile) -> RecordedFile:
            entry = file.entry
            other = {**entry.ingredients, "jax_lib version": "0" * 64}
            name = f"{entry.file[:-70]}0000{entry.file[-66:]}"
            return RecordedFile(
                dataclasses.replace(entry, file=name, ingredients=other), file.frame
            )

        files = {each.entry.file: each for each in map(aged, target.programs.values())}
        needs = dataclasses.replace(target.requirement, jaxlib="0.0.1")
        changed = dataclasses.replace(target, requirement=needs, programs=files)
        write_layout(self.directory / "aged", *assemble("aged", [packed(changed, "aged")]))
        return self.directory / "aged"


def _run(command: list[str], environment: Mapping[str, str]) -> str:
    """Run a command, and return its standard output.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def measure(case: Case, runs: int) -> dict[str, list[Sample]]:
    """Run every row in turn, round after round. The first round is thrown away."""
    samples: dict[str, list[Sample]] = {row: [] for row in ROWS}
    for number in range(runs + 1):
        turn = number % len(ROWS)
        for row in (*ROWS[turn:], *ROWS[:turn]):
            sample = case.run(row)
            if number:
                samples[row].append(sample)
        progress(f"{case.name}: round {number}/{runs}" if number else f"{case.name}: warm-up")
    return samples


def looked_at(case: Case) -> dict[str, Any]:
    """Return what the reports say: at home, in a second home, and with another jaxlib."""
    bundle = case.directory / "bundle"
    home, second = case.report(bundle, "home"), case.report(bundle, "third")
    aged = case.report(case.with_another_jaxlib(), "home")
    causes = sorted({d["name"] for miss in aged["misses"] for d in miss["differs"]})
    return {
        "programs": home["hits"] + home["missed"],
        "missed": home["missed"],
        "missed_in_second_home": second["missed"],
        "missed_after_jaxlib_change": aged["missed"],
        "causes_after_jaxlib_change": causes,
        "mismatch_after_jaxlib_change": aged["mismatch"],
        "bundle_bytes": sum(f.stat().st_size for f in bundle.rglob("*") if f.is_file()),
    }


def tables(
    samples: Mapping[str, dict[str, list[Sample]]], looked: Mapping[str, dict[str, Any]]
) -> tuple[list[Table], list[Target]]:
    """Return the tables and targets."""
    starts = Table(
        "Exec to the end of the program, s",
        ("program", *ROWS),
        [(name, *(cell(rows[row], "seconds") for row in ROWS)) for name, rows in samples.items()],
        "`keeps all`: jax's cache with a least compile time of 0. In the second home it is a copy.",
    )
    pairs = (
        (BUNDLE, COLD),
        (BUNDLE, PLAIN),
        (BUNDLE, ALL),
        (BUNDLE_MOVED, ALL_MOVED),
        (BUNDLE_MOVED, BUNDLE),
    )
    ratios = Table(
        "Ratios",
        ("program", *(f"{mine} to {other}" for mine, other in pairs)),
        [
            (
                name,
                *(
                    f"{ratio_within_rounds(rows, mine, other, 'seconds'):.2f}"
                    for mine, other in pairs
                ),
            )
            for name, rows in samples.items()
        ],
        "Medians of the ratios within each round; below 1, the first one is faster.",
    )
    reports = Table(
        "What `prejit run -o` reports",
        (
            *("program", "jax asked for", "compiled", "compiled in a second home"),
            *("compiled after a change of jaxlib", "why", "bundle, MB"),
        ),
        [
            (
                name,
                str(found["programs"]),
                str(found["missed"]),
                str(found["missed_in_second_home"]),
                str(found["missed_after_jaxlib_change"]),
                ", ".join(found["causes_after_jaxlib_change"]),
                f"{found['bundle_bytes'] / 1e6:.1f}",
            )
            for name, found in looked.items()
        ],
        "The change of jaxlib is simulated: requirement and keys of the bundle are those of another version.",
    )
    differing = sum(
        len({sample["printed"] for row in rows.values() for sample in row}) != 1
        for rows in samples.values()
    )
    targets = [
        Target(
            "programs that were compiled with the bundle",
            sum(found["missed"] + found["missed_in_second_home"] for found in looked.values()),
            0,
        ),
        Target("programs whose rows print different results", differing, 0),
        *(
            Target(
                f"{name}: prejit run to no cache",
                ratio_within_rounds(rows, BUNDLE, COLD, "seconds"),
                1,
                " x",
            )
            for name, rows in samples.items()
        ),
    ]
    return [starts, ratios, reports], targets


def main() -> None:
    """Parse the command line, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes of each row")
    parser.add_argument("--quick", action="store_true", help="2 runs, no page in results/")
    parser.add_argument("--only", nargs="*", default=PROGRAMS, help="these programs")
    given = parser.parse_args()
    runs = 2 if given.quick else given.runs
    use_two_cores()
    facts = begin(runs)
    directory = bench_directory() / "recording"
    cases = [Case(name, directory / name, sys.executable) for name in given.only]
    samples, looked = {}, {}
    for case in cases:
        progress(f"{case.name}: recording")
        case.prepare()
        looked[case.name] = looked_at(case)
        samples[case.name] = measure(case, runs)
    made, targets = tables(samples, looked)
    facts |= {
        "samples": samples,
        "reports": looked,
        "load_average_after": os.getloadavg()[0],
        "targets": judged(targets),
    }
    page = report.markdown(facts, made, targets, command="python -m benchmarks.studies.recording")
    place = directory / "results" if given.quick else RESULTS
    save(place, f"{facts['date'][:10]}-recording", facts, page)


if __name__ == "__main__":
    main()
