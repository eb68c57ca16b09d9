"""The section `cold`: starts of a process on a machine that has not run the model before.

Every engine starts in turn, in every condition, from exec to its first token. Two rows read the bytes that
prejit needs and do nothing else: the physical limits. A clean environment holds prejit's dependencies: no
other process keeps their pages in memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import cold_report, peer_environments
from benchmarks.harness.cold_report import FIRST_LOAD, READ_ALL, READ_BUNDLE, RECEIPT, ByCondition
from benchmarks.harness.conditions import (
    COLD,
    CONDITIONS,
    RECEIPTS,
    WARM,
    Condition,
    Start,
    can_mount,
    interpreter_directories,
)
from benchmarks.harness.control_groups import MEMORY, NoControlGroupError, group
from benchmarks.harness.fresh_processes import (
    BENCHMARKS,
    Row,
    Sample,
    command_line,
    interleave,
    progress,
    run_once,
)
from benchmarks.harness.page_cache import Range, files_below, make_cold, resident_ranges
from benchmarks.harness.report import JAX_WARM, Samples, Table, Target, median
from benchmarks.harness.workspace import Bench
from benchmarks.peers import entrants
from benchmarks.peers.entrants import Work

TITLES = {"gpt2": "GPT-2 124M", "llama-1b": "Llama's shape, 1.24 billion parameters"}
ENGINES = ("prejit", "llama.cpp", "CTranslate2", "ONNX Runtime", JAX_WARM)
LIMIT_TO_PEAK = 1.1
"""Memory limit of a row, as a multiple of its own peak resident memory when nothing limits it."""
SETTLE_SECONDS = 2.5
"""prejit gives no receipt to files that changed less than two seconds ago."""


@dataclass(frozen=True)
class Prepared:
    """The rows of a model.

    Attributes:
        rows: rows in the order of the table.
        files: files that each row's process reads.
        models: among them, those of the model.
        needed_bytes: by dtype, bytes that prejit's start reads of its bundle, and in all.
    """

    rows: tuple[Row, ...]
    files: dict[str, list[Path]]
    models: dict[str, list[Path]]
    needed_bytes: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Found:
    """The results for one model.

    Attributes:
        samples: samples by condition, then by row.
        failures: reasons by condition, then by row.
        tables: tables of the model.
        targets: targets of the model.
    """

    samples: ByCondition
    failures: dict[str, dict[str, str]]
    tables: list[Table]
    targets: list[Target]


def measure(bench: Bench, model: str, dtypes: tuple[str, ...], wanted: str) -> Found:
    """Measure the starts of one model in every condition; in the quick form, in the first two.

    Args:
        bench: directory and number of rounds.
        model: a key of TITLES.
        dtypes: dtypes of its weights.
        wanted: parts of the names of rows to run, with commas; empty: all.
    """
    failures: dict[str, dict[str, str]] = {"prepare": {}}
    prepared = prepare(bench, model, dtypes, wanted, failures["prepare"])
    samples: dict[str, Samples] = {}
    for condition in (WARM, COLD) if bench.quick else CONDITIONS:
        progress(f"{model}, {condition.name}")
        failed = failures.setdefault(condition.name, {})
        try:
            samples[condition.name] = under(bench, condition, prepared, samples, failed)
        except NoControlGroupError as error:
            failed["every row"] = str(error)
    title = TITLES[model]
    rows = prepared.rows
    notes = cold_report.notes(samples, prepared.needed_bytes)
    if not can_mount(bench.directory):
        notes.append(
            "Fresh root: this machine forbids mounting the models read-only; they were writable."
        )
    notes += [
        f"Not there: {name} ({where}): {reason}."
        for where, reasons in failures.items()
        for name, reason in reasons.items()
    ]
    tables = [
        cold_report.seconds(f"Cold starts: {title}", rows, samples, notes),
        cold_report.ratios(f"Cold starts, ratios of prejit: {title}", rows, samples),
    ]
    return Found(samples, failures, tables, cold_report.targets(title, rows, samples))


def under(
    bench: Bench,
    condition: Condition,
    prepared: Prepared,
    earlier: dict[str, Samples],
    failures: dict[str, str],
) -> dict[str, list[Sample]]:
    """Run all rows in turn under one condition.

    Raises:
        NoControlGroupError: the condition limits memory, and this machine does not let us.
    """
    rows = [row for row in prepared.rows if condition in (WARM, COLD) or RECEIPT not in row.name]
    start = Start(condition, bench.directory, new_receipts(bench), prepared.files, prepared.models)
    if not condition.limited:
        return interleave(rows, bench.runs, failures=failures, run=start.run)
    limits = memory_limits(rows, earlier.get(WARM.name, {}))
    rows = [row for row in rows if row.name in limits]
    with group(MEMORY) as limited:
        progress(f"memory is limited by {limited.controller.name}")
        start = replace(start, group=limited, limits=limits)
        return interleave(rows, bench.runs, failures=failures, run=start.run)


def memory_limits(rows: Sequence[Row], warm: Samples) -> dict[str, int]:
    """Return the memory limit of each row in bytes, from its peak where nothing limited it.

    Rows that only read need next to nothing; they get the limit of prejit's row.
    """
    peaks = {name: median(found, "rss_bytes") for name, found in warm.items() if found}
    limits = {}
    for row in rows:
        reading = cold_report.is_reading(row.name)
        name = cold_report.prejit_name(row.dtype, FIRST_LOAD) if reading else row.name
        if name in peaks:
            limits[row.name] = int(LIMIT_TO_PEAK * peaks[name])
    return limits


def new_receipts(bench: Bench) -> Path:
    """Return the directory of receipts that is removed before each process."""
    return bench.directory / "cold" / "no-receipts"


def prepare(
    bench: Bench, model: str, dtypes: tuple[str, ...], wanted: str, failures: dict[str, str]
) -> Prepared:
    """Make what the rows need, and find out which bytes prejit's start reads.

    Args:
        bench: directory of the benchmark.
        model: a key of TITLES.
        dtypes: dtypes of its weights.
        wanted: parts of the names of rows to run, with commas; empty: all.
        failures: receives the reason by name for each row that cannot be prepared.
    """
    python = peer_environments.interpreter(bench.directory, "prejit")
    work = Work("generate", model, dtypes=dtypes, engines=ENGINES)
    rows: list[Row] = []
    needed_bytes: dict[str, tuple[int, int]] = {}
    for found in entrants.rows(bench, work, wanted, failures):
        row = in_clean_environment(found, python)
        if not found.name.startswith("prejit"):
            rows.append(row)
            continue
        receipt = replace(row, name=cold_report.prejit_name(row.dtype, RECEIPT))
        variables = {**row.environment, RECEIPTS: str(new_receipts(bench))}
        first = cold_report.prejit_name(row.dtype, FIRST_LOAD)
        rows += [replace(row, name=first, environment=variables), receipt]
        needed = needed_ranges(receipt)
        bundle = [part for part in needed if part.path in set(model_files(row))]
        needed_bytes[row.dtype] = (
            sum(part.length for part in bundle),
            sum(part.length for part in needed),
        )
        for what, parts in ((READ_BUNDLE, bundle), (READ_ALL, needed)):
            name = cold_report.reading_name(what, row.dtype)
            listed = bench.directory / "cold" / f"{model}-{name}.txt".replace(" ", "-")
            rows.append(reading_row(name, row.dtype, python, listed, parts))
    return Prepared(
        tuple(rows),
        {row.name: read_files(row) for row in rows},
        {row.name: model_files(row) for row in rows},
        needed_bytes,
    )


def in_clean_environment(row: Row, python: str) -> Row:
    """Return a row of prejit or JAX with an interpreter that has only prejit's dependencies."""
    if not row.command[0].endswith(".py"):
        return row
    paths = f"{BENCHMARKS.parent}:{BENCHMARKS.parent / 'runtime'}"
    return replace(
        row, command=command_line(row, python), environment={**row.environment, "PYTHONPATH": paths}
    )


def model_paths(row: Row) -> list[Path]:
    """Return the files and directories of the model that a row's command names."""
    return [path for word in row.command[2:] if (path := Path(word)).is_absolute()]


def model_files(row: Row) -> list[Path]:
    """Return the files of the model that a row's command names."""
    return files_below(model_paths(row))


def code_directories(row: Row) -> list[Path]:
    """Return the directories of the code that a row's process runs: packages, interpreter, sources."""
    sources = [BENCHMARKS.parent / "runtime", BENCHMARKS / "peers", BENCHMARKS / "harness"]
    return [*interpreter_directories(row.command[0]), *sources]


def read_files(row: Row) -> list[Path]:
    """Return the files that a row's process may read: model, packages, interpreter, sources, caches."""
    named = [Path(value) for value in row.environment.values() if value.startswith("/")]
    return files_below((*model_paths(row), *code_directories(row), *named))


def needed_ranges(row: Row) -> list[Range]:
    """Return what a start reads from the disk: what the page cache holds after it, and did not before."""
    time.sleep(SETTLE_SECONDS)
    run_once(row)  # to the end: it writes receipts and bytecode
    files = read_files(row)
    make_cold(files)
    run_once(row, until="FIRST")
    return [part for path in files for part in resident_ranges(path)]


def reading_row(name: str, dtype: str, python: str, listed: Path, parts: Sequence[Range]) -> Row:
    """Return a row that reads these bytes, and write its list."""
    listed.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{part.start} {part.length} {part.path}\n" for part in parts]
    listed.write_text("".join(lines), encoding="utf-8")
    script = str(BENCHMARKS / "peers/read_child.py")
    alone = ("reads-alone",) if READ_BUNDLE in name else ()
    return Row(name, (python, "-I", "-S", script, str(listed), *alone), {}, dtype)
