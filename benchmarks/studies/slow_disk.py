"""Measure first starts from a slow disk, and the share of the time in which the disk is busy.

    python -m benchmarks.studies.slow_disk [--runs 3] [--rate 200] [--model gpt2]

The models are GPT-2, and a decoder with 5 GB of weights (Llama's shape in float32). Each starts without a
receipt: from the machine's own disk with a warm page cache and from a cold one, then from a slow disk, on two
CPUs and on one. The slow disk is an image on a loop device that holds bundle, interpreter and libraries.
Beside each start stands the time of reading just the bytes that it needs. It needs root, loop devices, a
control group that limits reads, and 24 GB of free disk ($PREJIT_BENCH_DIR); 15 minutes. Writes
benchmarks/results/, or with --model to $PREJIT_BENCH_DIR/results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import cold
from benchmarks.cold import new_receipts
from benchmarks.harness import cold_report
from benchmarks.harness.cold_report import FIRST_LOAD, READ_ALL, ByCondition
from benchmarks.harness.comparison import ours
from benchmarks.harness.conditions import Condition, Start
from benchmarks.harness.control_groups import Group
from benchmarks.harness.fresh_processes import Row, interleave, progress
from benchmarks.harness.limited_disk import READ_AHEAD_KB, NoSlowDiskError, disk_below, slow_disk
from benchmarks.harness.report import MB, Samples, Table, Target, cell, median, ratio_within_rounds
from benchmarks.harness.results import RESULTS, begin, option_parser, publish_rows, use_two_cores
from benchmarks.harness.workspace import Bench, bench_directory

DTYPE = "float32"
WARM, COLD = Condition("own disk, page cache warm"), Condition("own disk, cold", cold=True)
SLOW = Condition("slow disk, cold", cold=True)
SLOW_ONE_CPU = Condition("slow disk, cold, 1 CPU", cold=True, one_cpu=True)
LIMIT = 1.2
"""Largest ratio of a first load to reading what it needs, from the slow disk."""


MODELS = {
    "gpt2": ("GPT-2 124M, float32", "prejit,llama.cpp"),
    "llama-1b": ("5 GB of weights: Llama's shape, float32", "prejit"),
}
"""Models, with the title of their table and parts of the names of their rows."""


def measure(
    bench: Bench, name: str, bytes_per_second: int, failures: dict[str, str]
) -> tuple[list[Row], dict[str, Samples]]:
    """Measure the starts of one model in all conditions.

    Args:
        bench: directory and number of rounds.
        name: a key of MODELS.
        bytes_per_second: speed of the slow disk.
        failures: receives the reason by name for each row that fails.

    Returns:
        The rows in the order of the table, and the samples by condition and row.

    Raises:
        NoSlowDiskError: this machine lets the benchmark make no slow disk.
    """
    samples: dict[str, Samples] = {}

    def under(conditions: Sequence[Condition], disk: str, slow: Group | None = None) -> list[Row]:
        # For each disk again, because the bytes that a start needs depend on the disk's read-ahead.
        prepared = cold.prepare(bench, name, (DTYPE,), MODELS[name][1], failures)
        for condition in conditions:
            progress(condition.name)
            start = Start(
                condition,
                bench.directory,
                new_receipts(bench),
                prepared.files,
                prepared.models,
                slow=slow,
                disk=disk,
            )
            samples[condition.name] = interleave(
                chosen(prepared.rows), bench.runs, failures=failures, run=start.run
            )
        return list(prepared.rows)

    own = under((WARM, COLD), disk_below(bench.directory))
    progress("copying everything to the slow disk")
    with slow_disk(bench.directory, sources(own), bytes_per_second) as slow:
        return chosen(under((SLOW, SLOW_ONE_CPU), slow.device, slow.group)), samples


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of this study: first loads, their peers, and reading all that they need."""
    return [
        row
        for row in rows
        if row.name.startswith(READ_ALL)
        or FIRST_LOAD in row.name
        or not (ours(row.name) or cold_report.is_reading(row.name))
    ]


def sources(rows: Sequence[Row]) -> list[Path]:
    """Return what the slow disk holds: the model, packages, interpreter and sources of each row."""
    running = [row for row in rows if not cold_report.is_reading(row.name)]
    paths = [p for row in running for p in (*cold.model_paths(row), *cold.code_directories(row))]
    return list(dict.fromkeys(paths))


def table(title: str, rows: Sequence[Row], found: ByCondition) -> Table:
    """Return the table of one model: seconds, what the disk did meanwhile, and the physical limit."""
    lines = []
    for condition, samples in found.items():
        for row in rows:
            if not samples.get(row.name):
                continue
            here, limit = samples[row.name], cold_report.reading_name(READ_ALL, row.dtype)
            to_reading = (
                f"{ratio_within_rounds(samples, row.name, limit, cold_report.KEY):.2f}"
                if ours(row.name) and samples.get(limit)
                else ""
            )
            shares = [
                {
                    "busy": 100 * each["disk_busy_seconds"] / each[cold_report.KEY],
                    "speed": each["disk_read_bytes"] / each[cold_report.KEY],
                }
                for each in here
            ]
            lines.append(
                (
                    condition,
                    f"**{row.name}**" if ours(row.name) else row.name,
                    cell(here, cold_report.KEY),
                    to_reading,
                    cell(shares, "busy", 0),
                    f"{median(here, 'disk_read_bytes') / MB:.0f}",
                    f"{median(shares, 'speed') / MB:.0f}",
                )
            )
    head = (
        *("condition", "", "exec → 1st token, s", "to reading what it needs"),
        *("disk busy, %", "read, MB", "MB/s"),
    )
    return Table(title, head, lines)


def targets(title: str, samples: ByCondition) -> list[Target]:
    """Return the goals on the slow disk, as far as both of their rows ran."""
    first, other = (
        cold_report.prejit_name(DTYPE, FIRST_LOAD),
        cold_report.reading_name(READ_ALL, DTYPE),
    )
    return [
        Target(
            f"{title}, {condition.name}: first load to {READ_ALL}",
            ratio_within_rounds(samples[condition.name], first, other, cold_report.KEY),
            LIMIT,
            " x",
        )
        for condition in (SLOW, SLOW_ONE_CPU)
        if samples[condition.name].get(first) and samples[condition.name].get(other)
    ]


def main() -> None:
    """Parse the command line, measure, and write the results."""
    parser = option_parser()
    parser.add_argument("--runs", type=int, default=3, help="fresh processes of each row")
    parser.add_argument("--rate", type=int, default=200, help="MB/s of the slow disk")
    parser.add_argument("--model", choices=MODELS, help="one model")
    given = parser.parse_args()
    bench = Bench(bench_directory(), given.runs, quick=False)
    bench.directory.mkdir(parents=True, exist_ok=True)
    use_two_cores()
    facts = begin(bench.runs, megabytes_per_second=given.rate)
    tables: list[Table] = []
    goals: list[Target] = []
    failures: dict[str, str] = {}
    facts["samples"] = {}
    for name in [given.model] if given.model else list(MODELS):
        progress(MODELS[name][0])
        try:
            rows, samples = measure(bench, name, given.rate * 1_000_000, failures)
        except NoSlowDiskError as error:
            sys.exit(f"cannot make a slow disk: {error}")
        facts["samples"][name] = samples
        tables.append(table(MODELS[name][0], rows, samples))
        goals += targets(MODELS[name][0], samples)
    directory = bench.directory / "results" if given.model else RESULTS
    about = [
        f"Slow disk: an image on a loop device, limited to {given.rate} MB/s, read-ahead {READ_AHEAD_KB} KB, "
        "with bundle, interpreter and libraries. The disk is busy while a request is in flight (io_ticks of "
        "its `stat`), from exec to the first token. On the own disk that counts other processes, too. Caches "
        "are dropped before each cold process. `Reading` reads the bytes that the start needs in large "
        "blocks.",
        *(f"Not there: {name}: {reason}." for name, reason in failures.items()),
    ]
    tables[-1] = replace(tables[-1], note="\n".join(about))
    publish_rows(facts, "slow-disk", tables, goals, directory)


if __name__ == "__main__":
    main()
