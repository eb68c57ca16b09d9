"""Tables, targets and picture of cold starts. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness import chart
from benchmarks.harness.comparison import ours
from benchmarks.harness.conditions import COLD, LIMITED, WARM
from benchmarks.harness.fresh_processes import Row, Sample, Spread, spread
from benchmarks.harness.report import (
    JAX_WARM,
    MB,
    Samples,
    Table,
    Target,
    cell,
    median,
    ratio_within_rounds,
)

KEY = "first_seconds"
FIRST_LOAD, RECEIPT = "first load", "with receipt"
READ_BUNDLE, READ_ALL = "reading the bundle", "reading bundle, interpreter and libraries"
LLAMA_CPP = "llama.cpp"

ByCondition = Mapping[str, Samples]
"""Samples by condition, then by row."""


def is_reading(name: str) -> bool:
    """Return whether a row only reads bytes: a physical limit."""
    return name.startswith("reading")


def prejit_name(dtype: str, how: str) -> str:
    """Return the name of a row of prejit: `prejit int8, first load`."""
    return f"prejit {dtype}, {how}"


def reading_name(what: str, dtype: str) -> str:
    """Return the name of a row that only reads: `reading the bundle, int8`."""
    return f"{what}, {dtype}"


def seconds(title: str, rows: Sequence[Row], found: ByCondition, notes: Sequence[str]) -> Table:
    """Return the table of seconds from exec to the first token, a column for each condition."""
    lines = []
    for row in rows:
        cells = [
            cell(samples[row.name], KEY) if samples.get(row.name) else ""
            for samples in found.values()
        ]
        lines.append((f"**{row.name}**" if ours(row.name) else row.name, *cells))
    return Table(title, ("exec → 1st token, s", *found), lines, "\n".join(notes))


def references(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """Return the rows that a row of prejit is compared with: column by name.

    JAX is compared with every dtype: its persistent cache is the other way to start without compiling.
    """
    found = {}
    for other in rows:
        if ours(other.name) or (other.dtype != row.dtype and other.name != JAX_WARM):
            continue
        if is_reading(other.name):
            found[f"to {other.name.rpartition(',')[0]}"] = other.name
        else:
            found[
                f"to {other.name if other.name == JAX_WARM else other.name.rpartition(' ')[0]}"
            ] = other.name
    receipt = prejit_name(row.dtype, RECEIPT)
    if row.name != receipt:
        found["to the start with a receipt"] = receipt
    return found


def ratios(title: str, rows: Sequence[Row], found: ByCondition) -> Table:
    """Return the table of prejit's ratios, in each condition, to its peers and to the physical limits."""
    mine = [row for row in rows if ours(row.name)]
    columns = list(dict.fromkeys(name for row in mine for name in references(row, rows)))
    lines = []
    for condition, samples in found.items():
        for row in mine:
            if not samples.get(row.name):
                continue
            against = references(row, rows)
            cells = [
                f"{ratio_within_rounds(samples, row.name, other, KEY):.2f}"
                if (other := against.get(column)) and samples.get(other)
                else ""
                for column in columns
            ]
            lines.append((condition, row.name, *cells))
    note = (
        "Medians of the ratios within each round; below 1, prejit is faster. `Reading the bundle` is the "
        "time of the reads alone; `reading bundle, interpreter and libraries` counts from exec."
    )
    return Table(title, ("condition", "", *columns), lines, note)


def targets(title: str, rows: Sequence[Row], found: ByCondition) -> list[Target]:
    """Return the goals of a first start, as far as both of their rows ran."""
    made = []
    llama = {row.dtype: row.name for row in rows if row.name.startswith(LLAMA_CPP)}
    for dtype in dict.fromkeys(row.dtype for row in rows):
        first = prejit_name(dtype, FIRST_LOAD)
        for condition, other, limit in (
            (WARM, llama.get(dtype, ""), 1.0),
            (WARM, prejit_name(dtype, RECEIPT), 1.15),
            (COLD, llama.get(dtype, ""), 1.0),
            (COLD, reading_name(READ_BUNDLE, dtype), 1.2),
        ):
            samples = found.get(condition.name, {})
            if samples.get(first) and samples.get(other):
                ratio = ratio_within_rounds(samples, first, other, KEY)
                what = f"{title}, {condition.name}, {dtype}: first load to {other}"
                made.append(Target(what, ratio, limit, " x"))
        cold, limited = (found.get(each.name, {}).get(first) for each in (COLD, LIMITED))
        if cold and limited:
            what = f"{title}, disk cold, {dtype}: first load with a memory limit to one without"
            made.append(Target(what, median(limited, KEY) / median(cold, KEY), 1.2, " x"))
    return made


def notes(found: ByCondition, bundle_bytes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the notes below a table: how files were made cold, the bytes that are read, limits of memory.

    Args:
        found: samples by condition and row.
        bundle_bytes: by dtype, bytes of the bundle that a start reads, and with interpreter and libraries.
    """
    made = [
        f"{dtype}: a start needs {bundle / MB:.0f} MB of the bundle, {everything / MB:.0f} MB with "
        "interpreter and libraries (what a start from a cold disk left in the page cache, with read-ahead)."
        for dtype, (bundle, everything) in bundle_bytes.items()
    ]
    cold = every_sample(found.get(COLD.name, {}))
    if cold:
        how = "; ".join(sorted({sample["made_cold"] for sample in cold}))
        left = max(sample["cached_share"] for sample in cold)
        made.append(
            f"Disk cold: before each process, {how}. At most {100 * left:.1f} % of a model's files was left "
            "in the page cache. On a virtual machine the host may still hold them."
        )
    limited = found.get(LIMITED.name, {})
    if limited:
        sizes = ", ".join(
            f"{name} {samples[0]['limit_bytes'] / MB:.0f}"
            for name, samples in limited.items()
            if samples
        )
        made.append(f"Memory limits in MB: {sizes}.")
    return made


def every_sample(samples: Samples) -> list[Sample]:
    """Return the samples of all rows."""
    return [sample for found in samples.values() for sample in found]


def picture(found: Mapping[str, ByCondition], goals: Sequence[Target]) -> str:
    """Draw the starts with the page cache warm and from a cold disk, a panel for each model and condition."""
    panels = [
        chart.Panel(
            f"{model}, {condition}: exec to the first token, seconds (less is better)",
            sorted(bars(samples), key=lambda bar: bar[1].median),
            "s",
        )
        for model, conditions in found.items()
        for condition, samples in conditions.items()
        if condition in (WARM.name, COLD.name) and samples
    ]
    return chart.draw(
        panels, [(f"{t.what}: {t.row()[1]}, wanted {t.row()[2]}", t.met) for t in goals]
    )


def bars(samples: Samples) -> list[tuple[str, Spread, bool]]:
    """Return the bars of one panel."""
    return [(name, spread(each, KEY), ours(name)) for name, each in samples.items() if each]
