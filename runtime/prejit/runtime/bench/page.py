"""A report of `prejit bench` as one HTML page that needs nothing beside itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from prejit.runtime.bench.report import (
    GROUPS,
    Comparison,
    Delta,
    Report,
    Row,
    by_group,
    notes,
    spelled,
    spelled_programs,
    spelled_rate,
    spelled_ratio,
)

_STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfa; --card: #fff; --ink: #1d2127; --soft: #626a75;
  --line: #e2e4e1; --good: #0f766e; --bad: #b4321f; --track: #eceeeb; --bad-wash: #fbeae6;
  --p50: #0f766e; --p95: #b7791f; --p99: #b4321f }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1b1f24; --ink: #e6e8ea;
  --soft: #98a1ac; --line: #2d333a; --good: #3fbfae; --bad: #f08a75; --track: #272c33;
  --bad-wash: #38211d; --p50: #3fbfae; --p95: #e0b04c; --p99: #f08a75 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem }
p { margin: .25rem 0 .75rem; max-width: 75ch } .soft { color: var(--soft) }
code, .mono { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace }
.digest { overflow-wrap: anywhere }
.sums { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.5rem 0 0; padding: 0; list-style: none }
.sums li { flex: 1 1 10rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .75rem 1rem }
.sums b { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums }
.good { color: var(--good) } .bad { color: var(--bad) }
.wide { overflow: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card) }
.wide + .wide { margin-top: .75rem }
.picture { padding: .75rem 1rem }
.picture svg { display: block; width: 100%; min-width: 640px; height: auto }
figcaption { font-weight: 600; font-size: 14px } figure { margin: 0 }
.key { font-weight: 400; color: var(--soft); margin-left: .75rem }
.key i { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin: 0 .3rem 0 .8rem }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th, td { text-align: left; padding: .4rem .7rem; border-bottom: 1px solid var(--line);
  vertical-align: top }
tr:last-child td { border-bottom: 0 }
th { font-weight: 600; color: var(--soft); white-space: nowrap }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
tr.worse td { background: var(--bad-wash) } tr.worse .verdict { color: var(--bad); font-weight: 700 }
tr.better .verdict { color: var(--good) } .verdict { white-space: nowrap }
.notes { margin: .75rem 0; padding-left: 1.2rem }
svg text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--ink) }
svg .axis { fill: var(--soft); font-size: 12px } svg .grid { stroke: var(--line) }
svg .one { stroke: var(--soft); stroke-dasharray: 4 3 }
svg .bar { fill: var(--good) } svg .track { fill: var(--track) }
svg .range { stroke: var(--soft); stroke-width: 2; opacity: .6 }
svg .half { stroke: var(--p50); stroke-width: 7; opacity: .3 }
.p50 { fill: var(--p50); background: var(--p50) } .p95 { fill: var(--p95); background: var(--p95) }
.p99 { fill: var(--p99); background: var(--p99) }
svg .same, svg .shown { fill: var(--soft); stroke: var(--soft) }
svg .worse { fill: var(--bad); stroke: var(--bad) } svg .better { fill: var(--good); stroke: var(--good) }
svg .whisker { stroke-width: 2; opacity: .6 }
"""
_WIDTH, _LABELS, _VALUES, _STEP = 1000, 300, 150, 26
_PLOT = _WIDTH - _LABELS - _VALUES


def page(report: Report, comparison: Comparison | None) -> str:
    """The page. All text that comes from files is escaped.

    Args:
        report: what was measured.
        comparison: with another bundle or a baseline, where there is one.
    """
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    device = report.machine.get("device_kind") or report.machine.get("cpu_model", "")
    machine = f"{device}, {report.machine.get('cpu_count', '?')} CPUs"
    how = "loaded as built" if report.matched else "compiled here: this machine is no target"
    groups = "".join(_group(group, rows) for group, rows in by_group(report).items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(report.bundle)}: bench</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{escape(report.bundle)} for {escape(report.target)}, measured</h1>"
        f'<p class="soft mono digest">{escape(report.digest)}</p>'
        f"<p>{escape(machine)}; {escape(versions)}; {escape(report.date)}; {how}.</p>"
        f'<ul class="sums">{_tiles(report)}</ul>'
        f"{_comparison(comparison) if comparison else ''}{groups}{_obtained(report)}"
        "</main></body></html>\n"
    )


def _tiles(report: Report) -> str:
    """The figures that people ask for first."""
    rows = {row.name: row for row in report.rows}
    tiles: list[tuple[str, str]] = []
    for name, told in (
        ("exec to first result", "from the start of a process to its first result"),
        ("further token, alone", "a further token of one request"),
    ):
        if name in rows:
            tiles.append((spelled(rows[name].p50, "s"), told))
    rates = [row for row in report.rows if row.item == "tokens" and row.group == "latency"]
    if rates:
        best = max(rates, key=lambda row: row.per_second or 0)
        tiles.append((spelled_rate(best), f"a second, {best.name.partition(', ')[2]}"))
    for name, row in rows.items():
        if row.group == "encode" and "mixed" in name and row.item is not None:
            tiles.append((spelled_rate(row), f"a second, {name.removeprefix('encode ')}"))
    if "peak RSS" in rows:
        tiles.append((spelled(rows["peak RSS"].p50, "bytes"), "peak memory of a fresh process"))
    return "".join(f"<li><b>{escape(value)}</b>{escape(told)}</li>" for value, told in tiles)


def _group(group: str, rows: Sequence[Row]) -> str:
    """The pictures of a group and its table."""
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
    head = "".join(
        f'<th class="num" scope="col">{name}</th>'
        for name in ("least", "p50", "p95", "p99", "a second", "samples")
    )
    body = "".join(
        f'<tr><td>{escape(row.name)}<br><span class="soft">{escape(row.work)}</span></td>'
        + "".join(
            f'<td class="num">{escape(text)}</td>'
            for text in (
                *(spelled(v, row.unit) for v in (row.minimum, row.p50, row.p95, row.p99)),
                spelled_rate(row),
                str(row.samples),
            )
        )
        + "</tr>"
        for row in rows
    )
    return (
        f"<h2>{escape(GROUPS[group])}</h2>{''.join(pictures)}"
        f'<div class="wide"><table><thead><tr><th scope="col">what</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _obtained(report: Report) -> str:
    body = "".join(
        f"<tr><td>{escape(one.program)}</td><td>{escape(one.source)}</td>"
        f'<td class="num">{spelled(one.seconds or None, "s")}</td></tr>'
        for one in report.programs
    )
    return (
        f"<h2>How programs were obtained</h2><p>{escape(spelled_programs(report))}.</p>"
        '<div class="wide"><table><thead><tr><th scope="col">program</th><th scope="col">how</th>'
        f'<th class="num" scope="col">took</th></tr></thead><tbody>{body}</tbody></table></div>'
    )


# ---------------------------------------------------------------------- the comparison


def _comparison(comparison: Comparison) -> str:
    worse = len(comparison.regressions)
    told = (
        f'<b class="bad">{worse} row{"s" * (worse != 1)} worse</b>'
        if worse
        else '<b class="good">Nothing is worse</b>'
    )
    rows = "".join(_delta(delta) for delta in comparison.deltas)
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes(comparison))
    head = "".join(
        f'<th class="num" scope="col">{name}</th>'
        for name in ("before", "after", "ratio", "spread")
    )
    return (
        f"<h2>Beside <code>{escape(comparison.other)}</code></h2>"
        f"<p>{told} by more than {comparison.tolerance:.0%} and by more than the spread. A ratio of 1.2 x "
        "is a fifth more time or memory.</p>"
        f"{_ratios(comparison.deltas)}"
        + (f'<ul class="notes soft">{listed}</ul>' if listed else "")
        + f'<div class="wide"><table><thead><tr><th scope="col">what</th>{head}'
        f'<th scope="col">verdict</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _delta(delta: Delta) -> str:
    ratio, half = spelled_ratio(delta.ratio)
    cells = (spelled(delta.before, delta.unit), spelled(delta.after, delta.unit), ratio, half)
    numbers = "".join(f'<td class="num">{cell}</td>' for cell in cells)
    return (
        f'<tr class="{delta.verdict}"><td>{escape(delta.name)}</td>{numbers}'
        f'<td class="verdict">{delta.verdict}</td></tr>'
    )


def _ratios(deltas: Sequence[Delta]) -> str:
    if not deltas:
        return ""
    values = [v for d in deltas for v in (d.ratio.low, d.ratio.middle, d.ratio.high)]
    # What lies far outside ends at the edge: it would press all the others together.
    low = max(min(*values, 0.5), 0.1)
    high = min(max(*values, 2.0), 10.0)
    axis = _Log(low, high)
    parts = [axis.grid(len(deltas), lambda value: f"{value:g} x")]
    bottom = 24 + _STEP * len(deltas)
    at_one = axis.x(1)
    parts.append(f'<line class="one" x1="{at_one:.1f}" x2="{at_one:.1f}" y1="24" y2="{bottom}"/>')
    for place, delta in enumerate(deltas):
        y = 24 + _STEP * place + _STEP / 2
        ratio = delta.ratio
        parts += [
            _label(delta.name, y),
            f'<line class="whisker {delta.verdict}" x1="{axis.x(ratio.low):.1f}" '
            f'x2="{axis.x(ratio.high):.1f}" y1="{y}" y2="{y}"/>',
            f'<circle class="{delta.verdict}" cx="{axis.x(ratio.middle):.1f}" cy="{y}" r="5"/>',
            _value(f"{ratio.middle:.2f} x {delta.verdict}", y),
        ]
    return _figure(
        "Ratio of after to before, with its spread; left is better", "", parts, len(deltas)
    )


# ---------------------------------------------------------------------- pictures


class _Log:
    """A logarithmic axis across the plot."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, max(high, low * 1.5)

    def x(self, value: float) -> float:
        """Where a value is drawn; at the edge, if it lies outside."""
        part = math.log(value / self._low) / math.log(self._high / self._low)
        return _LABELS + _PLOT * min(1.0, max(0.0, part))

    def grid(self, rows: int, spell: Callable[[float], str]) -> str:
        """Lines at 1, 2 and 5 of each power of ten, or at the powers alone where those are many."""
        first, last = math.floor(math.log10(self._low)), math.ceil(math.log10(self._high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        bottom = 24 + _STEP * rows
        return "".join(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="{bottom}"/>'
            f'<text class="axis" x="{x:.1f}" y="16" text-anchor="middle">{spell(tick)}</text>'
            for tick in ticks
            if self._low <= tick <= self._high
            for x in (self.x(tick),)
        )


def _latencies(rows: Sequence[Row]) -> str:
    """p50, p95 and p99 of each row on one logarithmic axis."""
    values = [v for row in rows for v in (row.minimum, row.p50, row.p75, row.p95, row.p99) if v]
    axis = _Log(min(values) / 1.1, max(values) * 1.1)
    parts = [axis.grid(len(rows), lambda v: f"{v:g} s" if v >= 1 else f"{v * 1e3:g} ms")]
    for place, row in enumerate(rows):
        y = 24 + _STEP * place + _STEP / 2
        last = row.p99 or row.p95 or row.p75
        parts += [
            _label(row.name, y),
            f'<line class="range" x1="{axis.x(row.minimum):.1f}" x2="{axis.x(last):.1f}" '
            f'y1="{y}" y2="{y}"/>',
            f'<line class="half" x1="{axis.x(row.p25):.1f}" x2="{axis.x(row.p75):.1f}" '
            f'y1="{y}" y2="{y}"/>',
        ]
        for kind, value in (("p99", row.p99), ("p95", row.p95), ("p50", row.p50)):
            if value is not None:
                told = f"<title>{kind}: {spelled(value, 's')}</title>"
                x = axis.x(value)
                parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="5">{told}</circle>')
        parts.append(_value(spelled(row.p50, "s"), y))
    key = "".join(f'<i class="{kind}"></i>{kind}' for kind in ("p50", "p95", "p99"))
    return _figure("Time", f"{key}; line: from the least; band: the middle half", parts, len(rows))


def _bars(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Bars from nought, each with its value."""
    most = max(value for _, value, _ in bars)
    parts = []
    for place, (name, value, told) in enumerate(bars):
        top = _STEP * place
        width = _PLOT * value / most
        parts += [
            _label(name, top + _STEP / 2),
            f'<rect class="track" x="{_LABELS}" y="{top + 6}" width="{_PLOT}" height="14" rx="4"/>',
            f'<rect class="bar" x="{_LABELS}" y="{top + 6}" width="{width:.1f}" height="14" rx="4"/>',
            _value(told, top + _STEP / 2),
        ]
    return _figure(title, "", parts, len(bars), axis=False)


def _label(text: str, y: float) -> str:
    short = text if len(text) <= 42 else f"{text[:40]} ..."
    title = "" if short == text else f"<title>{escape(text)}</title>"
    return f'<text x="{_LABELS - 12}" y="{y + 4}" text-anchor="end">{escape(short)}{title}</text>'


def _value(text: str, y: float) -> str:
    return f'<text x="{_WIDTH - _VALUES + 12}" y="{y + 4}">{escape(text)}</text>'


def _figure(title: str, key: str, parts: Sequence[str], rows: int, *, axis: bool = True) -> str:
    height = _STEP * rows + (30 if axis else 4)
    keyed = f'<span class="key">{key}</span>' if key else ""
    return (
        f'<div class="wide picture"><figure><figcaption>{escape(title)}{keyed}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></figure></div>"
    )
