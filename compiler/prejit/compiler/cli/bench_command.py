"""`prejit bench`: measure a bundle and compare it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from prejit.runtime.cli.bundle_loading import load_bundle
from prejit.runtime.cli.command_options import (
    BUNDLE,
    COUNT,
    JSON,
    PATH,
    SECONDS,
    Number,
    check_one,
    loads,
    output,
    page,
)
from prejit.runtime.cli.output import print_json, print_text, progress, write_text


@click.command(
    epilog="Examples:\n\n\b\n  prejit bench artifacts/demo --page demo.html\n"
    "  prejit bench artifacts/demo -o baseline.json\n"
    "  prejit bench artifacts/demo --baseline baseline.json --tolerance 15\n"
    "  prejit bench artifacts/demo --against artifacts/demo-before"
)
@BUNDLE
@click.option("--runs", **COUNT, default=5, help="Number of fresh processes that measure start-up.")
@click.option(
    "--seconds", **SECONDS, default=20.0, help="Time for all measurements in one process."
)
@click.option(
    "--baseline",
    type=PATH,
    metavar="FILE.json",
    help="Compare with the report that an earlier run wrote with -o.",
)
@click.option(
    "--against",
    type=PATH,
    metavar="BUNDLE",
    help="Compare with another bundle, measured in alternation.",
)
@click.option(
    "--tolerance",
    type=Number(0, 1e9),
    default=25.0,
    metavar="PERCENT",
    help="Exit 9 where a median is worse by more than this and by more than the spread.",
)
@output("FILE.json", "Write the report as JSON.")
@page("Write the report as an HTML page.")
@loads
@JSON
def bench(
    path: str,
    runs: int,
    seconds: float,
    baseline: str | None,
    against: str | None,
    tolerance: float,
    output: str | None,
    page: str | None,
    as_json: bool,
    **loading: Any,
) -> int:
    """Measure a bundle: start-up, latency, tokens a second, memory.

    Compare it with another bundle or with a saved baseline.
    """
    from prejit.compiler.bench.bench_page import bench_page
    from prejit.compiler.bench.bench_processes import Setup
    from prejit.compiler.bench.bench_report import read
    from prejit.compiler.bench.bench_wording import notes, regression, text
    from prejit.compiler.bench.measure import judge

    check_one({"--baseline": baseline, "--against": against})
    earlier = read(baseline) if baseline is not None else None
    paths = [path, *([] if against is None else [against])]
    with progress() as show:
        report, comparison = judge(
            [Setup(each, **loading) for each in paths],
            [load_bundle(each, **loading) for each in paths],
            earlier,
            other=against or baseline or "",
            runs=runs,
            seconds=seconds,
            tolerance=tolerance / 100,
            say=show,
        )
    described = {**report.described(), "comparison": asdict(comparison) if comparison else None}
    if output is not None:
        write_text(output, json.dumps(described, indent=1) + "\n")
    if page is not None:
        write_text(page, bench_page(report, comparison))
    if as_json:
        print_json(described)
        for note in notes(comparison) if comparison is not None else ():
            print_text(f"note: {note}", file=sys.stderr)
    else:
        print_text(text(report, comparison))
    if comparison is not None and comparison.regressions:
        raise regression(comparison)
    return 0
