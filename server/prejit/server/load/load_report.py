"""The result of a measurement of load: its numbers, as a table, JSON and a page.

Names are the field's: TTFT (time to first token), TPOT (mean time of the tokens after the first), ITL (time
between two parts of a stream), E2E (until the end), goodput (requests a second within the limits). Each
percentile is one of all samples of a rate, never a mean of percentiles.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prejit.runtime.base.wording import few, table
from prejit.server.load.load_search import (
    GOOD_SHARE,
    MOST_LAG_SECONDS,
    FoundRate,
    LoadAnswer,
    LoadLimits,
    generator_lag,
    growth,
)

_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class RateMeasures:
    """The measures of one rate.

    Attributes:
        rate: requests a second that were sent.
        seconds: how long, in all windows.
        requests, failed: how many were sent; how many of them had no whole answer.
        failures: how often each reason for that occurred.
        answered_rate: answers a second, until the last one came.
        tokens_rate: new tokens a second.
        goodput: answers a second that were within the limits; None: there are no limits.
        good_share: their share.
        prompt_tokens, new_tokens: means of a request.
        ttft_ms, tpot_ms, itl_ms, e2e_ms: p50, p95, p99 and max of those that did not fail; None: no samples.
        growth: seconds by which latency grows in a second of load.
        lag_p99_ms: how late the generator itself was.
    """

    rate: float
    seconds: float
    requests: int
    failed: int
    failures: dict[str, int]
    answered_rate: float
    tokens_rate: float
    goodput: float | None
    good_share: float | None
    prompt_tokens: float
    new_tokens: float
    ttft_ms: dict[str, float] | None
    tpot_ms: dict[str, float] | None
    itl_ms: dict[str, float] | None
    e2e_ms: dict[str, float] | None
    growth: float | None
    lag_p99_ms: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of `prejit load`.

    Attributes:
        server: its URL, or the bundle.
        load: what was sent, in words.
        limits: what requests must keep.
        rates: the measures of each rate, ascending.
        knee: the highest rate with which the server keeps up; None: it was not searched.
        within_limits: the highest rate at which 95 % of the requests are within the limits.
    """

    server: str
    load: str
    limits: LoadLimits
    rates: tuple[RateMeasures, ...]
    knee: FoundRate | None = None
    within_limits: FoundRate | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return asdict(self)


def measures(
    rate: float, windows: Sequence[Sequence[LoadAnswer]], limits: LoadLimits
) -> RateMeasures:
    """Return the measures of a rate from what its windows saw."""
    every = [each for window in windows for each in window]
    kept = [each for each in every if not each.failed]
    good = sum(limits.allow(each) for each in every)
    # Behind the colon may be an id.
    failures = Counter(each.failed.partition(": ")[0] for each in every if each.failed)
    # From the first request of a window to its last answer.
    lasted = sum(
        max([window[-1].due, *(each.due + each.whole for each in window if not each.failed)])
        for window in windows
    )
    grown = growth(windows).value
    return RateMeasures(
        rate=rate,
        seconds=sum(window[-1].due for window in windows),
        requests=len(every),
        failed=len(every) - len(kept),
        failures=dict(failures),
        answered_rate=len(kept) / lasted,
        tokens_rate=sum(each.new_tokens for each in kept) / lasted,
        goodput=good / lasted if limits.is_any else None,
        good_share=good / len(every) if limits.is_any else None,
        prompt_tokens=sum(each.prompt_tokens for each in kept) / max(1, len(kept)),
        new_tokens=sum(each.new_tokens for each in kept) / max(1, len(kept)),
        ttft_ms=_quantiles([each.first for each in kept]),
        tpot_ms=_quantiles([each.per_token for each in kept]),
        itl_ms=_quantiles([gap for each in kept for gap in each.gaps]),
        e2e_ms=_quantiles([each.whole for each in kept]),
        growth=grown if math.isfinite(grown) else None,
        lag_p99_ms=generator_lag(windows) * 1e3,
    )


def _quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    samples = np.array([each for each in seconds if not math.isnan(each)])
    if not len(samples):
        return None
    found = np.quantile(samples, [*_SHARES.values()]) * 1e3
    return {name: round(float(value), 3) for name, value in zip(_SHARES, found, strict=True)}


HEADS = (
    *("rate", "answered", "failed", "tokens/s", "TTFT ms", "TPOT ms", "ITL ms", "E2E ms"),
    *("good", "lag ms"),
)


LEGEND = "Times are p50, p95, p99, from when a request was due. The lag is how late the generator was, p99."


def rows(report: LoadReport) -> list[list[str]]:
    """Return the rows of the table. A cell of times has p50, p95 and p99, that of the lag p99."""
    return [
        [
            short(each.rate),
            short(each.answered_rate),
            f"{each.failed}",
            short(each.tokens_rate),
            *map(_times, (each.ttft_ms, each.tpot_ms, each.itl_ms, each.e2e_ms)),
            "-" if each.good_share is None else f"{each.good_share:.1%}",
            f"{each.lag_p99_ms:.1f}",
        ]
        for each in report.rates
    ]


def _times(found: dict[str, float] | None) -> str:
    return "-" if found is None else " ".join(short(found[name]) for name in ("p50", "p95", "p99"))


def short(value: float) -> str:
    """Return a number with three digits, or more if it is 1,000 or larger."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def as_text(report: LoadReport) -> str:
    """Return the report for a terminal."""
    return "\n".join(
        [
            f"{report.server}: {report.load}",
            table(HEADS, rows(report)),
            LEGEND,
            *conclusions(report),
        ]
    )


def conclusions(report: LoadReport) -> list[str]:
    """Return what was found, a sentence each, and what to know before using it."""
    found = []
    if report.knee is not None:
        found.append(_sentence("knee", "the server keeps up with", report.knee))
    if report.within_limits is not None:
        what = f"{GOOD_SHARE:.0%} of the requests have {report.limits.described()} at"
        found.append(_sentence("within the limits", what, report.within_limits))
    failures: Counter[str] = Counter()
    for each in report.rates:
        failures.update(each.failures)
    found += [f"failed: {count} times: {reason}" for reason, count in failures.items()]
    if late := [each for each in report.rates if each.lag_p99_ms > MOST_LAG_SECONDS * 1e3]:
        rates = few([short(each.rate) for each in late])
        found.append(
            f"generator: more than {MOST_LAG_SECONDS * 1e3:.0f} ms late itself at {rates} requests a "
            "second: these rates look slower than they are; run it on another machine, or a quiet one"
        )
    return found


def _sentence(name: str, what: str, found: FoundRate) -> str:
    certain = "" if found.is_certain else " (uncertain: measure longer with --seconds)"
    if not found.rate:
        return f"{name}: none: not even at {short(found.above)} requests a second{certain}"
    return (
        f"{name}: {what} {short(found.rate)} requests a second, not {short(found.above)}{certain}"
    )


_WIDTH, _HEIGHT = 720, 260


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart: its name, its class in the style sheet, and its points as SVG has them."""

    name: str
    style: str
    points: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over the rate.

    Attributes:
        title: what it shows, with its unit.
        most, most_rate: the values at the ends of the axes, as text.
        curves: its lines.
        marks: x of the knee and of the highest rate within the limits, each with its name.
    """

    title: str
    most: str
    most_rate: str
    curves: tuple[Curve, ...]
    marks: tuple[tuple[float, str], ...]


def charts(report: LoadReport) -> list[Chart]:
    """Return the saturation curve, and one chart for each measure of time."""
    curves: dict[str, dict[str, list[float | None]]] = {
        "answered, requests a second": {"p50": [each.answered_rate for each in report.rates]}
    }
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        values = [getattr(each, name) for each in report.rates]
        if any(values):
            curves[f"{name.removesuffix('_ms').upper()}, ms"] = {
                share: [None if each is None else each[share] for each in values]
                for share in ("p50", "p95", "p99")
            }
    rates = [each.rate for each in report.rates]
    named = (("knee", report.knee), ("within the limits", report.within_limits))
    marks = tuple(
        (found.rate / rates[-1] * _WIDTH, name) for name, found in named if found and found.rate
    )
    return [_chart(title, rates, lines, marks) for title, lines in curves.items()]


def _chart(
    title: str,
    rates: Sequence[float],
    lines: dict[str, list[float | None]],
    marks: tuple[tuple[float, str], ...],
) -> Chart:
    values = [value for line in lines.values() for value in line if value is not None]
    most = max(values, default=0.0) or 1.0
    curves = []
    for name, line in lines.items():
        points = " ".join(
            f"{rate / rates[-1] * _WIDTH:.1f},{_HEIGHT - value / most * _HEIGHT:.1f}"
            for rate, value in zip(rates, line, strict=True)
            if value is not None
        )
        curves.append(Curve(name if len(lines) > 1 else "", name, points))
    return Chart(title, short(most), short(rates[-1]), tuple(curves), marks)


def as_page(report: LoadReport) -> str:
    """Return the report as an HTML page that needs nothing beside itself."""
    from jinja2 import Environment  # a table needs no template

    template = Path(__file__).with_name("load_page.html").read_text(encoding="utf-8")
    found = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return found.render(
        report=report,
        conclusions=conclusions(report),
        charts=charts(report),
        heads=HEADS,
        rows=rows(report),
        legend=LEGEND,
        width=_WIDTH,
        height=_HEIGHT,
    )
