"""The report of `prejit bench`, plain data that is written as JSON and read back, and its comparison.

Other work on a machine only ever slows a measurement down. So a row counts as worse only if three things
hold: the ratio of the medians exceeds the tolerance; the ratio of the minima exceeds it too, so that even
the best run is slower; and the spreads of both sides do not overlap. Where the sides were not measured in
alternation, the medians must also differ by more than the machine itself, which a yardstick without any
bundle measures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prejit.runtime.base.files import store_errors
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.errors import UsageError
from prejit.runtime.programs.ready_programs import ProgramReport

REPORT_VERSION = 1
"""The version changes when the name of a row means other work, or when a reader cannot read older files."""
YARDSTICK = "sum of 64 MB"
"""The name of the row that measures the machine itself."""
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
"""The groups of rows, in the order of tables, with their titles."""
MIN_P95_SAMPLES, MIN_P99_SAMPLES = 20, 100
"""With fewer samples the percentile would be the maximum, so it is left out."""


@dataclass(frozen=True, slots=True)
class Head:
    """The name of a row, and what one of its samples is.

    Attributes:
        group: one of GROUPS.
        name: unique within a report.
        work: what one sample does, with all sizes; only rows of equal work are compared.
        unit: `s`, `bytes`, or `x` (positions computed for each position needed).
        items: the number of results of one sample, such as 64 tokens.
        item: what `items` counts, such as `tokens`; None: nothing is counted.
    """

    group: str
    name: str
    work: str
    unit: str = "s"
    items: float | None = None
    item: str | None = None


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One thing that was measured. Less is better.

    Attributes:
        group, name, work, unit, items, item: as in Head.
        samples: the number of samples.
        minimum, p25, p50, p75, maximum: statistics of the samples, in `unit`.
        p95, p99: None: there are too few samples.
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
        """Items a second at the median; None: nothing is counted."""
        return None if self.items is None else self.items / self.p50


def summarize(head: Head, samples: Sequence[float]) -> BenchRow:
    """Return the row of at least one sample."""
    p25, p50, p75, p95, p99 = np.quantile(samples, (0.25, 0.5, 0.75, 0.95, 0.99)).tolist()
    return BenchRow(
        **asdict(head),
        samples=len(samples),
        minimum=min(samples),
        p25=p25,
        p50=p50,
        p75=p75,
        maximum=max(samples),
        p95=p95 if len(samples) >= MIN_P95_SAMPLES else None,
        p99=p99 if len(samples) >= MIN_P99_SAMPLES else None,
    )


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The measurements of one bundle.

    Attributes:
        report_version: REPORT_VERSION of the writer.
        bundle, digest, target: what was measured.
        matched: whether this machine matches the target; False: programs were compiled here.
        date: the time in UTC, in ISO 8601.
        machine: the fingerprint of the machine.
        versions: the versions of Python and of the packages.
        runs: the number of fresh processes.
        seconds: the time given to all measurements in one process.
        programs: how each program was obtained.
        rows: the measurements, in the order of GROUPS.
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
    rows: tuple[BenchRow, ...]

    def described(self) -> dict[str, Any]:
        """Return the report as plain data for JSON, with `per_second` added to each row."""
        rows = [{**asdict(row), "per_second": row.per_second} for row in self.rows]
        return {**asdict(self), "rows": rows}


def read(path: str) -> BenchReport:
    """Read a report that `prejit bench -o FILE` wrote.

    Raises:
        StoreError: the file cannot be read.
        UsageError: it is not such a report.
    """
    with store_errors(
        path, "read a baseline", hint=f"save one with `prejit bench BUNDLE -o {path}`"
    ):
        content = Path(path).read_bytes()
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _foreign(path, f"expected JSON, {error}") from error
    try:
        version = plain.get("report_version") if isinstance(plain, dict) else None
        if type(version) is int and version != REPORT_VERSION:
            raise ValueError(f"report_version: expected {REPORT_VERSION}, found {version}")
        report = from_plain(BenchReport, plain)
        _check(report)
    except ValueError as error:
        raise _foreign(path, str(error)) from error
    return report


def _foreign(path: str, complaint: str) -> UsageError:
    return UsageError(
        f"{path}: not a report of `prejit bench`: {complaint}",
        hint=f"save one with `prejit bench BUNDLE -o {path}`",
    )


def _check(report: BenchReport) -> None:
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


MIN_QUARTILE_SAMPLES = 20
"""With fewer samples the spread is from the minimum to the maximum instead of the middle half."""
MIN_SAMPLES = 3
"""Times with fewer samples on either side are shown without a verdict."""

_IDENTITY = (
    *("platform", "architecture", "cpu_features", "cpu_model", "cpu_count"),
    *("device_kind", "device_count", "topology"),
)
"""The axes of a fingerprint that identify a machine; the others are versions and settings."""


def better_of(report: BenchReport, again: BenchReport) -> BenchReport:
    """Return the report with each row replaced by that of `again` where its median is lower."""
    better = {row.name: row for row in again.rows}
    rows = tuple(
        min(row, better.get(row.name, row), key=lambda one: one.p50) for row in report.rows
    )
    return replace(report, rows=rows)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of after to before; 1.2 is a fifth more, which is worse.

    Attributes:
        least: the ratio of the minima.
        middle: the ratio of the medians; for sides that alternate, the median of the ratios within each
        round.
        low, high: the spread; with many samples that of the middle half.
    """

    least: float
    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Delta:
    """One row on both sides.

    Attributes:
        name, group, unit: as in BenchRow.
        before, after: the medians.
        ratio: of after to before.
        verdict: `worse`, `better`, `same` (within tolerance or spread) or `shown` (without a verdict).
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
    """One report compared with another.

    Attributes:
        other: the file of the baseline, or the path of the other bundle.
        tolerance: the part by which a value may grow; 0.25: a quarter more still counts as the same.
        drift: how many times longer the machine itself takes now; 1 for sides that alternate.
        deltas: the rows that both sides have.
        differences: of machine, versions, settings and bundle, such as `cpu_count: expected 8, found 2`.
        incomparable: the names of rows whose work differs, with the work of both sides.
        only_before, only_after: the names of rows that only one side has.
        is_same_machine: False: times are shown without a verdict.
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
        """The rows whose verdict is `worse`."""
        return tuple(delta for delta in self.deltas if delta.verdict == "worse")


def compare_reports(
    before: BenchReport,
    after: BenchReport,
    *,
    other: str,
    tolerance: float,
    in_turns: Mapping[str, Ratio] | None = None,
) -> Comparison:
    """Compare two reports.

    `in_turns` has the ratio of each row by name, for sides that were measured in alternation.
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


def _ratio(old: BenchRow, new: BenchRow) -> Ratio:
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
    old: BenchRow, new: BenchRow, ratio: Ratio, tolerance: float, drift: float, same_machine: bool
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


def _differences(before: BenchReport, after: BenchReport) -> tuple[str, ...]:
    pairs: list[tuple[str, Any, Any]] = [
        (name, getattr(before, name), getattr(after, name))
        for name in ("bundle", "target", "matched", "runs", "seconds")
    ]
    for old, new in ((before.machine, after.machine), (before.versions, after.versions)):
        # jaxlib is both an axis of the machine and a version.
        pairs += [(name, old.get(name), new.get(name)) for name in {**old, **new}]
    differences = dict.fromkeys(
        f"{name}: expected {a}, found {b}" for name, old, new in pairs for a, b in _unlike(old, new)
    )
    return tuple(differences)


def _unlike(old: Any, new: Any) -> list[tuple[str, str]]:
    """Return both sides as text if they differ; of two lists only what the other side lacks."""
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        sides = [x for x in old if x not in new], [x for x in new if x not in old]
        words = [" ".join(map(str, side)) or "none more" for side in sides]
        return [(words[0], words[1])] if any(sides) else []
    shown = ["none" if value is None else str(value) for value in (old, new)]
    return [(shown[0], shown[1])] if old != new else []
