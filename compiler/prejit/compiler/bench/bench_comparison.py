"""Compare two reports of `prejit bench`, row by row.

Other work on a machine only ever slows a measurement down. So a row counts as worse only if three things
hold: the ratio of the medians exceeds the tolerance; the ratio of the minima exceeds it too, so that even
the best run is slower; and the spreads of both sides do not overlap. Where the sides were not measured in
alternation, the medians must also differ by more than the machine itself, which a yardstick without any
bundle measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prejit.compiler.bench.bench_report import YARDSTICK, BenchReport, BenchRow

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

    Args:
        before: the report to compare with.
        after: the report to judge.
        other: the name of `before` in messages.
        tolerance: as in Comparison.
        in_turns: for sides measured in alternation, the ratio of each row by name; None: they were not.
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
