"""Reports and comparisons of `prejit bench` as text for people."""

from __future__ import annotations

import math
from collections import Counter

from prejit.compiler.bench.bench_comparison import MIN_SAMPLES, Comparison, Ratio
from prejit.compiler.bench.bench_report import GROUPS, YARDSTICK, BenchReport, BenchRow
from prejit.runtime.base.text_table import size, table
from prejit.runtime.errors import RegressionError


def regression(comparison: Comparison) -> RegressionError:
    """Return the error that names all regressions of a comparison."""
    rows = "; ".join(
        f"{delta.name}: expected {spelled(delta.before, delta.unit)}, "
        f"found {spelled(delta.after, delta.unit)} ({delta.ratio.middle:.2f} x)"
        for delta in comparison.regressions
    )
    return RegressionError(
        f"worse than {comparison.other} by more than {comparison.tolerance:.0%}: {rows}",
        hint="if this is intended, save a new baseline with `prejit bench BUNDLE -o FILE`",
    )


def spelled(value: float | None, unit: str) -> str:
    """Return a value with its unit: `12.3 ms`, `1.20 s`, `1.2 MB`, `1.30 x`; None gives an empty text."""
    if value is None:
        return ""
    if unit == "bytes":
        return size(round(value))
    if unit == "x":
        return f"{value:.2f} x"
    return f"{_short(value)} s" if value >= 1 else f"{_short(value * 1e3)} ms"


def spelled_rate(row: BenchRow) -> str:
    """Return what a row gives in a second, such as `1,234 tokens`; empty: nothing is counted."""
    rate = row.per_second
    return "" if rate is None else f"{_short(rate)} {row.item}"


def spelled_ratio(ratio: Ratio) -> tuple[str, str]:
    """Return the ratio and its spread: `1.20 x`, `1.18 to 1.23`."""
    return f"{ratio.middle:.2f} x", f"{ratio.low:.2f} to {ratio.high:.2f}"


def _short(value: float) -> str:
    """Return a number with three significant digits and no exponent."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(digits, 6)}f}"


def spelled_programs(report: BenchReport) -> str:
    """Return how programs were obtained: `24 loaded in 1.3 s, 2 unused; compiled: nothing`."""
    counts = Counter(one.source for one in report.programs)
    seconds = {name: sum(p.seconds for p in report.programs if p.source == name) for name in counts}
    parts = [
        f"{count} {name}" + (f" in {seconds[name]:.1f} s" if seconds[name] else "")
        for name, count in counts.items()
        if name != "compiled"
    ]
    compiled = counts["compiled"]
    parts_text = ", ".join(parts)
    last = f"{compiled} in {seconds['compiled']:.1f} s" if compiled else "nothing"
    return f"{parts_text}; compiled: {last}" if parts_text else f"compiled: {last}"


def by_group(report: BenchReport) -> dict[str, list[BenchRow]]:
    """Return the rows of each group that has rows, in the order of GROUPS."""
    found = {group: [row for row in report.rows if row.group == group] for group in GROUPS}
    return {group: rows for group, rows in found.items() if rows}


def text(report: BenchReport, comparison: Comparison | None) -> str:
    """Return the report and its comparison as text for a terminal."""
    lines: list[tuple[str, ...]] = []
    for group, rows in by_group(report).items():
        lines += [("",) * 6] * bool(lines)  # an empty line between groups
        lines.append((GROUPS[group], *("",) * 5))
        lines += [
            (
                f"  {row.name}",
                *(spelled(value, row.unit) for value in (row.p50, row.p95, row.p99)),
                spelled_rate(row),
                str(row.samples),
            )
            for row in rows
        ]
    parts = [
        f"{report.bundle} for {report.target}, {report.digest[:19]}, {report.date}",
        table(["", "p50", "p95", "p99", "a second", "samples"], lines),
        f"programs: {spelled_programs(report)}",
    ]
    if few := sum(row.unit == "s" and row.samples < MIN_SAMPLES for row in report.rows):
        parts.append(
            f"{few} times have fewer than {MIN_SAMPLES} samples; --seconds and --runs give more"
        )
    return "\n".join([*parts, *([_comparison_text(comparison)] if comparison else [])])


def _comparison_text(comparison: Comparison) -> str:
    rows = [
        (
            delta.name,
            spelled(delta.before, delta.unit),
            spelled(delta.after, delta.unit),
            *spelled_ratio(delta.ratio),
            delta.verdict.upper() if delta.verdict == "worse" else delta.verdict,
        )
        for delta in comparison.deltas
    ]
    head = ["", "before", "after", "ratio", "spread", ""]
    lines = [f"\nbeside {comparison.other}", table(head, rows), *notes(comparison)]
    worse = len(comparison.regressions)
    lines.append(
        f"{worse or 'no'} row{'s' * (worse != 1)} worse by more than {comparison.tolerance:.0%} and "
        "by more than the spread"
    )
    return "\n".join(lines)


def notes(comparison: Comparison) -> list[str]:
    """Return what a reader of a comparison must know, one sentence each."""
    found = [f"differs: {text}" for text in comparison.differences]
    if not comparison.is_same_machine:
        found.append(
            "the baseline is from another machine: times get no verdict; save a baseline on this machine"
        )
    if comparison.drift != 1:
        found.append(
            f"the machine itself ({YARDSTICK}) takes {comparison.drift:.2f} x as long as before; "
            "rows that slowed down no more than that are not regressions"
        )
    found += [f"not compared, because the work differs: {text}" for text in comparison.incomparable]
    for side, names in (("before", comparison.only_before), ("now", comparison.only_after)):
        found += [f"only {side}: {'; '.join(names)}"] if names else []
    return found
