"""The report of `prejit bench`: plain data that is written as JSON and read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.programs.ready import ProgramReport

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
class BenchRow:
    """One thing that was measured. Less is better.

    Attributes:
        group: one of GROUPS.
        name: unique within a report.
        work: what one sample does, with all sizes; only rows of equal work are compared.
        unit: `s`, `bytes`, or `x` (positions computed for each position needed).
        samples: the number of samples.
        minimum, p25, p50, p75, maximum: statistics of the samples, in `unit`.
        p95, p99: None: there are too few samples.
        items: the number of results of one sample, such as 64 tokens.
        item: what `items` counts, such as `tokens`; None: nothing is counted.
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


def summarize(
    group: str,
    name: str,
    work: str,
    samples: Sequence[float],
    *,
    unit: str = "s",
    items: float | None = None,
    item: str | None = None,
) -> BenchRow:
    """Return the row of at least one sample. The arguments are the attributes of BenchRow."""
    p25, p50, p75, p95, p99 = np.quantile(samples, (0.25, 0.5, 0.75, 0.95, 0.99)).tolist()
    count = len(samples)
    return BenchRow(
        group=group,
        name=name,
        work=work,
        unit=unit,
        samples=count,
        minimum=min(samples),
        p25=p25,
        p50=p50,
        p75=p75,
        maximum=max(samples),
        p95=p95 if count >= MIN_P95_SAMPLES else None,
        p99=p99 if count >= MIN_P99_SAMPLES else None,
        items=items,
        item=item,
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
