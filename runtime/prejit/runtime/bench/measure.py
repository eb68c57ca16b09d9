"""Measures bundles: fresh processes for start-up and memory, then everything else in turns in this one.

What is measured in one process goes in rounds: every probe gets its share of the time in each of them, in
an order of the round's own, so that a drift of the machine falls on all rows alike. A probe that takes
longer than its share pauses for some rounds. Two bundles take turns within a probe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata

from prejit.runtime.bench.probes import probes_of
from prejit.runtime.bench.processes import Setup, fresh_heads, measure_fresh_processes
from prejit.runtime.bench.report import (
    GROUPS,
    REPORT_VERSION,
    YARDSTICK,
    Comparison,
    Ratio,
    Report,
    Row,
    better_of,
    compare,
    summarize,
)
from prejit.runtime.bench.rounds import Head, Rounds, Say, ratio_in_turns, run_in_rounds
from prejit.runtime.bundle import Bundle
from prejit.runtime.machine.fingerprint import Fingerprint


def judge(
    setups: Sequence[Setup],
    bundles: Sequence[Bundle],
    baseline: Report | None,
    *,
    runs: int,
    seconds: float,
    tolerance: float,
    say: Say,
    other: str = "",
) -> tuple[Report, Comparison | None]:
    """Measures a bundle and compares it: with a second one in turns, or with a baseline.

    Rows that look worse are measured once more, and the better of both times counts: a regression is
    there again, a neighbour on the machine mostly is not.

    Args:
        setups: how fresh processes load the bundles.
        bundles: the same, loaded here; the first is judged by the second, where there is one.
        baseline: where there is no second.
        runs: as `measure`.
        seconds: as `measure`.
        tolerance: as Comparison.
        say: is told what goes on.
        other: what to call the other side.

    Raises:
        UsageError: a fresh process failed.
    """
    reports, in_turns = measure(setups, bundles, runs=runs, seconds=seconds, say=say)

    def compared() -> Comparison | None:
        before = baseline if len(bundles) == 1 else reports[1]
        if before is None:
            return None
        turns = in_turns if len(bundles) > 1 else None
        return compare(before, reports[0], other=other, tolerance=tolerance, in_turns=turns)

    comparison = compared()
    if comparison is not None and (worse := {delta.name for delta in comparison.regressions}):
        say(f"{len(worse)} rows look worse and are measured again")
        again, turns_again = measure(
            setups, bundles, runs=runs, seconds=seconds / 2, say=say, only={*worse, YARDSTICK}
        )
        reports = [better_of(*pair) for pair in zip(reports, again, strict=True)]
        for name, ratio in turns_again.items():
            in_turns[name] = min(in_turns[name], ratio, key=lambda one: one.middle)
        comparison = compared()
    return reports[0], comparison


def measure(
    setups: Sequence[Setup],
    bundles: Sequence[Bundle],
    *,
    runs: int,
    seconds: float,
    say: Say,
    only: Collection[str] | None = None,
) -> tuple[list[Report], dict[str, Ratio]]:
    """Measures one bundle, or two in turns.

    Args:
        setups: how fresh processes load them.
        bundles: the same, loaded here.
        runs: fresh processes of each bundle, after one that warms caches.
        seconds: of each bundle, for all that is measured in this process.
        say: is told what goes on.
        only: names of rows to measure, with those that come with them; None: all.

    Returns:
        The reports; and of two bundles the ratios of the first to the second within each turn, by row.

    Raises:
        UsageError: a fresh process failed.
    """

    def wanted(heads: Iterable[Head]) -> bool:
        return only is None or any(head.name in only for head in heads)

    fresh: list[Rounds] = [{} for _ in bundles]
    if wanted(fresh_heads("").values()):
        fresh = measure_fresh_processes(setups, bundles, runs, say)
    say("preparing")
    probes = [[probe for probe in probes_of(bundle) if wanted(probe.heads)] for bundle in bundles]
    warm = run_in_rounds(probes, seconds * len(bundles), say)
    sides = [{**one, **other} for one, other in zip(fresh, warm, strict=True)]
    reports = []
    for bundle, side in zip(bundles, sides, strict=True):
        rows = [_row(head, rounds) for head, rounds in side.items()]
        rows.sort(key=lambda row: list(GROUPS).index(row.group))
        reports.append(_report(bundle, tuple(rows), runs, seconds))
    if len(bundles) == 1:
        return reports, {}
    before = {head.name: rounds for head, rounds in sides[1].items()}
    return reports, {
        head.name: ratio_in_turns(rounds, before[head.name])
        for head, rounds in sides[0].items()
        if head.name in before
    }


def _row(head: Head, rounds: Iterable[Sequence[float]]) -> Row:
    samples = [sample for samples in rounds for sample in samples]
    return summarize(
        head.group,
        head.name,
        head.work,
        samples,
        unit=head.unit,
        items=head.items,
        item=head.item,
    )


def _report(bundle: Bundle, rows: tuple[Row, ...], runs: int, seconds: float) -> Report:
    packages = ("prejit", "jax", "jaxlib", "numpy")
    machine = {name: value for name, value in asdict(Fingerprint.current()).items() if value}
    return Report(
        report_version=REPORT_VERSION,
        bundle=bundle.name,
        digest=bundle.digest,
        target=bundle.target,
        matched=bundle.matched,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=json.loads(json.dumps(machine)),  # tuples are lists in a file
        versions={
            "python": ".".join(map(str, sys.version_info[:3])),
            **{name: metadata.version(name) for name in packages},
        },
        runs=runs,
        seconds=seconds,
        programs=bundle.report(),
        rows=rows,
    )
