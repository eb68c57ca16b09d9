"""What `prejit bench` measured, and how two measurements compare: plain data, JSON in and out.

Neighbours on a machine only ever slow it down. So a row is worse where the ratio of the medians exceeds the
tolerance, and that of the minima as well (at its best it is slower, too), and what was seen of the two sides
does not overlap: their middle halves, or all of it where samples are few. Where the sides were not measured
in turns, the medians must differ by more than the machine as a whole: a yardstick that no bundle has a part
in is measured with every bundle.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from prejit.runtime.base.tables import size, table
from prejit.runtime.errors import RegressionError, StoreError, UsageError
from prejit.runtime.programs.programs import ProgramReport

REPORT_VERSION = 1
"""Raised when a row's name no longer means the same work, or a reader could not read an older file."""
YARDSTICK = "sum of 64 MB"
"""The row that says how fast the machine is, whatever the bundle."""
GROUPS = {
    "start-up": "Start-up, in fresh processes",
    "latency": "Latency of a request, warm",
    "serving": "Requests that arrive together",
    "prefill": "Prefill programs",
    "decode": "Decode programs, one step",
    "verify": "Verify programs, one pass",
    "growth": "Growing a cache",
    "encode": "Encode programs",
    "call": "Programs",
    "memory": "Memory of a fresh process",
    "machine": "The machine itself",
}
"""What rows are about, in the order of tables, with their titles."""
MIN_P95_SAMPLES, MIN_P99_SAMPLES = 20, 100
"""Fewer samples have no such percentile: it would be their maximum."""
MIN_QUARTILE_SAMPLES = 20
"""Of fewer, quartiles say too little: the spread is from the least to the most."""
MIN_SAMPLES = 3
"""Times with fewer samples on either side are shown and not judged."""

_IDENTITY = (
    *("platform", "architecture", "cpu_features", "cpu_model", "cpu_count"),
    *("device_kind", "device_count", "topology"),
)
"""Axes of a fingerprint that make another machine; the others are versions and settings."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was measured. Less is better.

    Attributes:
        group: one of GROUPS.
        name: unlike that of every other row.
        work: what one sample did, with all sizes: rows compare only where it is the same.
        unit: `s`, `bytes`, or `x` (positions that were computed for each that was needed).
        samples: how many there are.
        minimum, p25, p50, p75, maximum: of the samples.
        p95, p99: None where there are too few.
        items: what a sample of time gave, such as 64 of the `tokens`.
        item: the name of these; None: nothing is counted.
    """

    group: str
    name: str
    work: str
    unit: str
    samples: int
    minimum: float
    p25: float
    p50: float
    p75: float
    maximum: float
    p95: float | None = None
    p99: float | None = None
    items: float | None = None
    item: str | None = None

    @property
    def per_second(self) -> float | None:
        """Items a second, by the median; None where nothing is counted."""
        return None if self.items is None else self.items / self.p50


def quantile(ordered: Sequence[float], q: float) -> float:
    """As numpy.quantile gives it: linear between the two nearest.

    Args:
        ordered: ascending, not empty.
        q: 0 to 1.
    """
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def summarize(
    group: str,
    name: str,
    work: str,
    samples: Sequence[float],
    *,
    unit: str = "s",
    items: float | None = None,
    item: str | None = None,
) -> Row:
    """The row of some samples, of which there is at least one. Arguments as the attributes of Row."""
    ordered = sorted(samples)
    count = len(ordered)
    return Row(
        group=group,
        name=name,
        work=work,
        unit=unit,
        samples=count,
        minimum=ordered[0],
        p25=quantile(ordered, 0.25),
        p50=quantile(ordered, 0.5),
        p75=quantile(ordered, 0.75),
        maximum=ordered[-1],
        p95=quantile(ordered, 0.95) if count >= MIN_P95_SAMPLES else None,
        p99=quantile(ordered, 0.99) if count >= MIN_P99_SAMPLES else None,
        items=items,
        item=item,
    )


@dataclass(frozen=True, slots=True)
class Report:
    """A bundle, measured.

    Attributes:
        report_version: of this form.
        bundle, digest, target: what was measured.
        matched: whether this machine is that target; otherwise programs were compiled here.
        date: when, in UTC, as ISO 8601 spells it.
        machine: its fingerprint.
        versions: of Python and of the packages that ran.
        runs: fresh processes.
        seconds: that sampling in one process was to take.
        programs: how each was obtained.
        rows: in the order of GROUPS.
    """

    report_version: int
    bundle: str
    digest: str
    target: str
    matched: bool
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    runs: int
    seconds: float
    programs: tuple[ProgramReport, ...]
    rows: tuple[Row, ...]

    def described(self) -> dict[str, Any]:
        """As JSON: what `read` reads, and a little that only people and scripts want."""
        rows = [{**asdict(row), "per_second": row.per_second} for row in self.rows]
        return {**asdict(self), "rows": rows}


def read(path: str) -> Report:
    """A report that an earlier `prejit bench -o FILE` wrote.

    Raises:
        StoreError: the file cannot be read.
        UsageError: it is not such a report.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path}: cannot read a baseline: {error.strerror}",
            hint=f"save one with `prejit bench BUNDLE -o {path}`",
        ) from error
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _foreign(path, f"expected JSON, {error}") from error
    try:
        version = plain.get("report_version") if isinstance(plain, dict) else None
        if type(version) is int and version != REPORT_VERSION:
            raise ValueError(f"report_version: expected {REPORT_VERSION}, found {version}")
        report: Report = _typed(Report, plain, "")
        _check(report)
    except ValueError as error:
        raise _foreign(path, str(error)) from error
    return report


def _foreign(path: str, complaint: str) -> UsageError:
    return UsageError(
        f"{path}: not a report of `prejit bench`: {complaint}",
        hint=f"save one with `prejit bench BUNDLE -o {path}`",
    )


def _typed(kind: Any, value: Any, where: str) -> Any:
    """A JSON value as its annotation says. Keys that nobody knows are passed over."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _typed(args[0], value, where)
    wanted = "an object" if origin is dict or is_dataclass(kind) else "an array"
    nested = is_dataclass(kind) or origin in (dict, tuple)
    if nested and type(value) is not (list if origin is tuple else dict):
        raise ValueError(f"{where or 'file'}: expected {wanted}, found {value!r:.40}")
    if isinstance(kind, type) and is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        given = {}
        for field in fields(kind):
            at = f"{where}.{field.name}" if where else field.name
            if field.name not in value:
                raise ValueError(f"{at}: expected it, found nothing")
            given[field.name] = _typed(hints[field.name], value[field.name], at)
        return kind(**given)
    if origin is tuple:
        return tuple(_typed(args[0], one, f"{where}[{i}]") for i, one in enumerate(value))
    if origin is dict:
        return {key: _typed(args[1], one, f"{where}.{key}") for key, one in value.items()}
    if kind is Any:
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{where}: expected {kind.__name__}, found {value!r:.40}")
    return value


def _check(report: Report) -> None:
    seen = set()
    for at, row in enumerate(report.rows):
        where = f"rows[{at}]"
        if row.group not in GROUPS:
            raise ValueError(
                f"{where}.group: expected one of {', '.join(GROUPS)}; found {row.group!r}"
            )
        if row.unit not in ("s", "bytes", "x"):
            raise ValueError(f"{where}.unit: expected s, bytes or x; found {row.unit!r}")
        if row.name in seen:
            raise ValueError(f"{where}.name: expected each name once, found {row.name!r} twice")
        seen.add(row.name)
        values = (0.0, row.minimum, row.p25, row.p50, row.p75, row.maximum)
        if list(values) != sorted(values) or row.minimum <= 0:
            raise ValueError(f"{where}: expected 0 < minimum <= p25 <= p50 <= p75 <= maximum")
        if row.samples < 1:
            raise ValueError(f"{where}.samples: expected 1 or more, found {row.samples}")
        for name, value in (("p95", row.p95), ("p99", row.p99), ("items", row.items)):
            if value is not None and value <= 0:
                raise ValueError(f"{where}.{name}: expected more than 0, found {value}")


def better_of(report: Report, again: Report) -> Report:
    """A report with those rows of a second one that have the lower medians. Both are of one bundle."""
    better = {row.name: row for row in again.rows}
    rows = tuple(
        min(row, better.get(row.name, row), key=lambda one: one.p50) for row in report.rows
    )
    return replace(report, rows=rows)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times the other side's value a value is; 1.2: a fifth more, and so worse.

    Attributes:
        least: of the minima.
        middle: of the medians; where the sides took turns, the median of the ratios within each turn.
        low, high: the spread: between which what was seen lies, but for outer quarters where samples abound.
    """

    least: float
    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Delta:
    """One row of both sides.

    Attributes:
        name, group, unit: of the row.
        before, after: the medians.
        ratio: of after to before.
        verdict: `worse`, `better`, `same` (within tolerance or spread) or `shown` (not judged).
    """

    name: str
    group: str
    unit: str
    before: float
    after: float
    ratio: Ratio
    verdict: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A report beside another.

    Attributes:
        other: the file of the baseline, or the other bundle.
        tolerance: 0.25: a quarter more is still the same.
        drift: of the machine between the two, as a ratio of times; 1 where the sides took turns.
        deltas: rows of both sides.
        differences: of machine, versions, settings and bundle: `cpu_count: expected 8, found 2`.
        incomparable: rows of one name that did different work, and what.
        only_before, only_after: names of rows that one side alone has.
        is_same_machine: where not, times are shown and not judged.
    """

    other: str
    tolerance: float
    drift: float
    deltas: tuple[Delta, ...]
    differences: tuple[str, ...]
    incomparable: tuple[str, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    is_same_machine: bool

    @property
    def regressions(self) -> tuple[Delta, ...]:
        """The rows that are worse."""
        return tuple(delta for delta in self.deltas if delta.verdict == "worse")


def compare(
    before: Report,
    after: Report,
    *,
    other: str,
    tolerance: float,
    in_turns: Mapping[str, Ratio] | None = None,
) -> Comparison:
    """Judges a report by another.

    Args:
        before: what was expected.
        after: what was found.
        other: what to call `before`.
        tolerance: as in Comparison.
        in_turns: where both were measured in turns, the ratios within the turns, by name of the row.
    """
    known = {row.name: row for row in before.rows}
    found = {row.name: row for row in after.rows}
    both = [name for name in found if name in known]
    differing = [name for name in both if found[name].work != known[name].work]
    drift = 1.0
    if in_turns is None and YARDSTICK in both:
        drift = found[YARDSTICK].p50 / known[YARDSTICK].p50
    same_machine = not any(before.machine.get(a) != after.machine.get(a) for a in _IDENTITY)
    deltas = []
    for name in both:
        if name in differing:
            continue
        old, new = known[name], found[name]
        ratio = (in_turns or {}).get(name) or _ratio(old, new)
        deltas.append(
            Delta(
                name,
                new.group,
                new.unit,
                old.p50,
                new.p50,
                ratio,
                _verdict(old, new, ratio, tolerance, drift, same_machine),
            )
        )
    return Comparison(
        other=other,
        tolerance=tolerance,
        drift=drift,
        deltas=tuple(deltas),
        differences=_differences(before, after),
        incomparable=tuple(
            f"{name}: expected {known[name].work}; found {found[name].work}" for name in differing
        ),
        only_before=tuple(name for name in known if name not in found),
        only_after=tuple(name for name in found if name not in known),
        is_same_machine=same_machine,
    )


def _ratio(old: Row, new: Row) -> Ratio:
    few = min(old.samples, new.samples) < MIN_QUARTILE_SAMPLES
    (low_old, high_old), (low_new, high_new) = (
        (row.minimum, row.maximum) if few else (row.p25, row.p75) for row in (old, new)
    )
    return Ratio(
        least=new.minimum / old.minimum,
        middle=new.p50 / old.p50,
        low=low_new / high_old,
        high=high_new / low_old,
    )


def _verdict(
    old: Row, new: Row, ratio: Ratio, tolerance: float, drift: float, same_machine: bool
) -> str:
    if new.group == "machine" or new.unit == "x":
        return "shown"
    if new.unit == "s":
        if not same_machine or min(old.samples, new.samples) < MIN_SAMPLES:
            return "shown"
    else:
        drift = 1.0
    allowed = 1 + tolerance
    if ratio.middle > allowed * max(1.0, drift) and ratio.least > allowed and ratio.low > 1:
        return "worse"
    if (
        ratio.middle * allowed * max(1.0, 1 / drift) < 1
        and ratio.least * allowed < 1
        and ratio.high < 1
    ):
        return "better"
    return "same"


def _differences(before: Report, after: Report) -> tuple[str, ...]:
    pairs: list[tuple[str, Any, Any]] = [
        (name, getattr(before, name), getattr(after, name))
        for name in ("bundle", "target", "matched", "runs", "seconds")
    ]
    for old, new in ((before.machine, after.machine), (before.versions, after.versions)):
        # jaxlib is both an axis of the machine and a version.
        pairs += [(name, old.get(name), new.get(name)) for name in {**old, **new}]
    told = dict.fromkeys(
        f"{name}: expected {a}, found {b}" for name, old, new in pairs for a, b in _unlike(old, new)
    )
    return tuple(told)


def _unlike(old: Any, new: Any) -> list[tuple[str, str]]:
    """Both sides in words, where they differ; of two lists what one side alone has."""
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        sides = [x for x in old if x not in new], [x for x in new if x not in old]
        words = [" ".join(map(str, side)) or "none more" for side in sides]
        return [(words[0], words[1])] if any(sides) else []
    shown = ["none" if value is None else str(value) for value in (old, new)]
    return [(shown[0], shown[1])] if old != new else []


def regression(comparison: Comparison) -> RegressionError:
    """The error of a comparison with regressions: it names them all."""
    rows = "; ".join(
        f"{delta.name}: expected {spelled(delta.before, delta.unit)}, "
        f"found {spelled(delta.after, delta.unit)} ({delta.ratio.middle:.2f} x)"
        for delta in comparison.regressions
    )
    return RegressionError(
        f"worse than {comparison.other} by more than {comparison.tolerance:.0%}: {rows}",
        hint="if that is as it should be, save a new baseline with `prejit bench BUNDLE -o FILE`",
    )


# ---------------------------------------------------------------------- in words


def spelled(value: float | None, unit: str) -> str:
    """A value with its unit: `12.3 ms`, `1.20 s`, `1.2 MB`, `1.30 x`; nothing where there is none."""
    if value is None:
        return ""
    if unit == "bytes":
        return size(round(value))
    if unit == "x":
        return f"{value:.2f} x"
    return f"{_short(value)} s" if value >= 1 else f"{_short(value * 1e3)} ms"


def spelled_rate(row: Row) -> str:
    """`1,234 tokens`: what a row gives in a second; nothing where nothing is counted."""
    rate = row.per_second
    return "" if rate is None else f"{_short(rate)} {row.item}"


def spelled_ratio(ratio: Ratio) -> tuple[str, str]:
    """The ratio, and its spread: `1.20 x`, `1.18 to 1.23`."""
    return f"{ratio.middle:.2f} x", f"{ratio.low:.2f} to {ratio.high:.2f}"


def _short(value: float) -> str:
    """Three digits that count, and no exponent."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(digits, 6)}f}"


def spelled_programs(report: Report) -> str:
    """`24 loaded in 1.3 s, 2 unused; compiled: nothing`."""
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


def by_group(report: Report) -> dict[str, list[Row]]:
    """The rows of each group that has any, in the order of GROUPS."""
    found = {group: [row for row in report.rows if row.group == group] for group in GROUPS}
    return {group: rows for group, rows in found.items() if rows}


def text(report: Report, comparison: Comparison | None) -> str:
    """All of it for a terminal."""
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
    """What a reader must know of a comparison, a sentence each."""
    told = [f"differs: {text}" for text in comparison.differences]
    if not comparison.is_same_machine:
        told.append("another machine: times are shown and not judged; save a baseline on this one")
    if comparison.drift != 1:
        told.append(
            f"the machine itself ({YARDSTICK}) takes {comparison.drift:.2f} x as long as before; "
            "what slowed down no more than that is not blamed on the bundle"
        )
    told += [f"not compared, other work: {text}" for text in comparison.incomparable]
    for side, names in (("before", comparison.only_before), ("now", comparison.only_after)):
        told += [f"only {side}: {'; '.join(names)}"] if names else []
    return told
