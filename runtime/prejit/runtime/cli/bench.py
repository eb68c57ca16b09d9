"""`prejit bench`: measure a bundle and compare it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict

from prejit.runtime.cli.loading import load_bundle
from prejit.runtime.cli.output import print_json, print_text, progress, write_text
from prejit.runtime.errors import UsageError


def bench(options: Namespace) -> int:
    """Measure a bundle; compare it with another bundle or with a saved baseline."""
    from prejit.runtime.bench.measure import judge
    from prejit.runtime.bench.processes import Setup
    from prejit.runtime.bench.report import read
    from prejit.runtime.bench.wording import notes, regression, text
    from prejit.runtime.pages.bench import bench_page

    for name, least in (("runs", 1), ("seconds", 0), ("tolerance", 0)):
        value = getattr(options, name)
        if not least <= value < float("inf"):
            raise UsageError(f"--{name}: expected {least} or more, found {value}")
    baseline = read(options.baseline) if options.baseline is not None else None
    paths = [options.bundle, *([] if options.against is None else [options.against])]
    with progress() as show:
        report, comparison = judge(
            [Setup(path, options.on_mismatch, options.fingerprint) for path in paths],
            [load_bundle(options, path) for path in paths],
            baseline,
            other=options.baseline if options.against is None else options.against,
            runs=options.runs,
            seconds=options.seconds,
            tolerance=options.tolerance / 100,
            say=show,
        )
    described = {**report.described(), "comparison": asdict(comparison) if comparison else None}
    if options.output is not None:
        write_text(options.output, json.dumps(described, indent=1) + "\n")
    if options.page is not None:
        write_text(options.page, bench_page(report, comparison))
    if options.json:
        print_json(described)
        for note in notes(comparison) if comparison is not None else ():
            print_text(f"note: {note}", file=sys.stderr)
    else:
        print_text(text(report, comparison))
    if comparison is not None and comparison.regressions:
        raise regression(comparison)
    return 0
