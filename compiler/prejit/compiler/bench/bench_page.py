"""Reports and comparisons of `prejit bench` for people: text for a terminal, and the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prejit.compiler.bench.bench_report import (
    GROUPS,
    MIN_SAMPLES,
    YARDSTICK,
    BenchReport,
    BenchRow,
    Comparison,
    Delta,
    Ratio,
)
from prejit.compiler.pages import render
from prejit.runtime.base.wording import size, table
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


_WIDTH, _LABELS, _VALUES, _STEP, _HEAD = 1000, 300, 150, 26, 24
_PLOT = _WIDTH - _LABELS - _VALUES
_LABEL_CHARACTERS = 42


@dataclass(frozen=True, slots=True)
class Mark:
    """A line, a dot or a bar of a picture.

    Attributes:
        kind: the class of the style sheet.
        start: where it begins, in units of the drawing.
        end: where it ends; equal to `start`: a dot.
        text: what shows under the pointer.
    """

    kind: str
    start: float
    end: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a picture: its label, its marks and its value."""

    label: str
    marks: tuple[Mark, ...]
    value: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture: rows of marks over a common axis.

    Attributes:
        title: the caption.
        lines: from top to bottom.
        ticks: places and labels of the axis; empty: bars from zero without an axis.
        one: where the ratio 1 lies; None: the picture shows no ratios.
        has_percentiles: whether the caption explains the colours of p50, p95 and p99.
    """

    title: str
    lines: tuple[Line, ...]
    ticks: tuple[tuple[float, str], ...] = ()
    one: float | None = None
    has_percentiles: bool = False

    @property
    def top(self) -> int:
        """Where the first row begins."""
        return _HEAD if self.ticks else 0

    @property
    def height(self) -> int:
        """The height of the drawing."""
        return _STEP * len(self.lines) + (_HEAD + 6 if self.ticks else 4)


def bench_page(report: BenchReport, comparison: Comparison | None) -> str:
    """Return the page as HTML."""
    device = report.machine.get("device_kind") or report.machine.get("cpu_model", "")
    return render(
        "bench.html",
        report=report,
        machine=f"{device}, {report.machine.get('cpu_count', '?')} CPUs",
        versions=", ".join(f"{name} {version}" for name, version in report.versions.items()),
        tiles=_tiles(report),
        groups=[(GROUPS[g], _pictures(g, rows), rows) for g, rows in by_group(report).items()],
        programs=spelled_programs(report),
        comparison=comparison,
        notes=notes(comparison) if comparison else (),
        ratios=_ratios(comparison.deltas) if comparison and comparison.deltas else None,
        spelled=spelled,
        spelled_rate=spelled_rate,
        spelled_ratio=spelled_ratio,
        width=_WIDTH,
        labels=_LABELS,
        values=_WIDTH - _VALUES,
        plot=_PLOT,
        step=_STEP,
        label_characters=_LABEL_CHARACTERS,
    )


def _tiles(report: BenchReport) -> list[tuple[str, str]]:
    """Return the figures that people look for first, each with its meaning."""
    rows = {row.name: row for row in report.rows}
    tiles: list[tuple[str, str]] = []
    for name, meaning in (
        ("exec to first result", "from the start of a process to its first result"),
        ("further token, alone", "a further token of one request"),
    ):
        if name in rows:
            tiles.append((spelled(rows[name].p50, "s"), meaning))
    rates = [row for row in report.rows if row.item == "tokens" and row.group == "latency"]
    if rates:
        best = max(rates, key=lambda row: row.per_second or 0)
        tiles.append((spelled_rate(best), f"a second, {best.name.partition(', ')[2]}"))
    for name, row in rows.items():
        if row.group == "encode" and "mixed" in name and row.item is not None:
            tiles.append((spelled_rate(row), f"a second, {name.removeprefix('encode ')}"))
    if "peak RSS" in rows:
        tiles.append((spelled(rows["peak RSS"].p50, "bytes"), "peak memory of a fresh process"))
    return tiles


def _pictures(group: str, rows: Sequence[BenchRow]) -> list[Picture]:
    pictures = []
    times = [row for row in rows if row.unit == "s"]
    if times and group != "machine":
        pictures.append(_latencies(times))
    for item in dict.fromkeys(row.item for row in rows if row.item):
        counted = [row for row in rows if row.item == item]
        bars = [(row.name, row.per_second or 0.0, spelled_rate(row)) for row in counted]
        pictures.append(_bars(f"{item[0].upper()}{item[1:]} a second", bars))
    if memory := [row for row in rows if row.unit == "bytes"]:
        bars = [(row.name, row.p50, spelled(row.p50, "bytes")) for row in memory]
        pictures.append(_bars("Bytes", bars))
    return pictures


def _ratios(deltas: Sequence[Delta]) -> Picture:
    """Return the ratios of a comparison on one logarithmic axis."""
    values = [v for d in deltas for v in (d.ratio.low, d.ratio.middle, d.ratio.high)]
    # Values far outside end at the edge: they would press all the others together.
    axis = _Axis(max(min(*values, 0.5), 0.1), min(max(*values, 2.0), 10.0))
    lines = []
    for delta in deltas:
        ratio = delta.ratio
        middle = axis.x(ratio.middle)
        whisker = Mark(f"whisker {delta.verdict}", axis.x(ratio.low), axis.x(ratio.high))
        marks = (whisker, Mark(delta.verdict, middle, middle))
        lines.append(Line(delta.name, marks, f"{ratio.middle:.2f} x {delta.verdict}"))
    title = "Ratio of after to before, with its spread; left is better"
    return Picture(title, tuple(lines), axis.ticks(lambda value: f"{value:g} x"), axis.x(1))


def _latencies(rows: Sequence[BenchRow]) -> Picture:
    """Return p50, p95 and p99 of each row on one logarithmic axis."""
    values = [v for row in rows for v in (row.minimum, row.p50, row.p75, row.p95, row.p99) if v]
    axis = _Axis(min(values) / 1.1, max(values) * 1.1)
    lines = []
    for row in rows:
        last = row.p99 or row.p95 or row.p75
        marks = [
            Mark("range", axis.x(row.minimum), axis.x(last)),
            Mark("half", axis.x(row.p25), axis.x(row.p75)),
        ]
        for kind, value in (("p99", row.p99), ("p95", row.p95), ("p50", row.p50)):
            if value is not None:
                x = axis.x(value)
                marks.append(Mark(kind, x, x, f"{kind}: {spelled(value, 's')}"))
        lines.append(Line(row.name, tuple(marks), spelled(row.p50, "s")))
    ticks = axis.ticks(lambda v: f"{v:g} s" if v >= 1 else f"{v * 1e3:g} ms")
    return Picture("Time", tuple(lines), ticks, has_percentiles=True)


def _bars(title: str, bars: Sequence[tuple[str, float, str]]) -> Picture:
    most = max(value for _, value, _ in bars)
    lines = (
        Line(name, (Mark("bar", _LABELS, _LABELS + _PLOT * value / most),), text)
        for name, value, text in bars
    )
    return Picture(title, tuple(lines))


class _Axis:
    """A logarithmic axis across the plot."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, max(high, low * 1.5)

    def x(self, value: float) -> float:
        """Return where a value is drawn: at the edge where it lies outside."""
        part = math.log(value / self._low) / math.log(self._high / self._low)
        return _LABELS + _PLOT * min(1.0, max(0.0, part))

    def ticks(self, spell: Callable[[float], str]) -> tuple[tuple[float, str], ...]:
        """Return ticks at 1, 2 and 5 of each power of ten; at the powers alone where those are many."""
        first, last = math.floor(math.log10(self._low)), math.ceil(math.log10(self._high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return tuple((self.x(v), spell(v)) for v in values if self._low <= v <= self._high)
