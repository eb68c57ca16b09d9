"""Measure a bundle, or two in alternation, and judge the result.

Start-up and memory are measured in fresh processes, everything else in this one, in rounds: every probe
gets a share of the time in each round, in a random order, so that a drift of the machine falls on all rows
alike. A probe that takes longer than its share pauses for some rounds. Two bundles alternate within each
probe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from typing import Any, Literal

from prejit.compiler.bench.bench_report import (
    GROUPS,
    REPORT_VERSION,
    YARDSTICK,
    BenchReport,
    BenchRow,
    Comparison,
    Head,
    Ratio,
    better_of,
    compare_reports,
    summarize,
)
from prejit.compiler.bench.probes import (
    NEW_TOKENS,
    PROMPTS,
    Rounds,
    Say,
    probes_of,
    random_prompt,
    ratio_in_turns,
    run_in_rounds,
)
from prejit.runtime.base.child_process import run_child
from prejit.runtime.bundle import Bundle
from prejit.runtime.errors import ProcessError, UsageError
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.programs.usage_hint import smallest_call


@dataclass(frozen=True, slots=True)
class Setup:
    """How to load a bundle in a fresh process."""

    path: str
    on_mismatch: Literal["jit", "error"] = "jit"
    fingerprint: str | None = None


def measure_fresh_processes(
    setups: Sequence[Setup], bundles: Sequence[Bundle], runs: int, say: Say
) -> list[Rounds]:
    """Return start-up times and memory of `runs` processes, after one process that warms the caches."""
    uses = [_use_once(bundle) for bundle in bundles]
    found: list[Rounds] = [{} for _ in setups]
    for number in range(runs + 1):
        say(f"start-up: fresh process {number + 1} of {runs + 1}")
        sides = list(range(len(setups)))
        for side in sides if number % 2 else sides[::-1]:
            what, use = uses[side]
            facts = _fresh_process(setups[side], use)
            for fact, head in fresh_heads(what).items():
                if number and facts[fact] is not None:
                    found[side].setdefault(head, []).append([facts[fact]])
    return found


def fresh_heads(what: str) -> dict[str, Head]:
    """Return the row of each value that a fresh process reports."""
    return {
        "first_seconds": Head("start-up", "exec to first result", what),
        "load_seconds": Head("start-up", "load", what),
        "peak_bytes": Head("memory", "peak RSS", what, "bytes"),
        "private_bytes": Head("memory", "private", what, "bytes"),
        "device_bytes": Head("memory", "device", what, "bytes"),
    }


def _use_once(bundle: Bundle) -> tuple[str, dict[str, Any]]:
    """Return what a fresh process does: as text, and as arguments of `bench_child.use_once`."""
    if bundle.config.decoder is not None:
        decoder = bundle.decoder
        if decoder.source is not None:
            raise UsageError(
                f"{bundle.name}: expected a model that continues prompts, found one that reads a source",
                hint="`prejit profile` measures it; `prejit generate --stats` has the times of one request",
            )
        length = max(1, min(PROMPTS[0], decoder.contexts[-1] // 2))
        new_tokens = min(NEW_TOKENS, decoder.contexts[-1] - length)
        prompt = random_prompt(length, decoder.decoder.vocab_size, 0)
        what = f"a prompt of {length} tokens; {new_tokens} new ones"
        return what, {"program": None, "prompt": prompt, "new_tokens": new_tokens}
    if bundle.config.encoder is not None:
        length = min(PROMPTS[0], bundle.encoder.max_tokens)
        if bundle.config.encoder.scores is not None:
            return "a pair of short texts", {"program": None, "prompt": [], "new_tokens": 0}
        sentence = random_prompt(length, bundle.encoder.encoder.vocab_size, 0)
        what = f"a sentence of {length} tokens"
        return what, {"program": None, "prompt": sentence, "new_tokens": 0}
    smallest = smallest_call(bundle.config.programs)
    what = f"{smallest.name} on zeros"
    return what, {"program": smallest.name, "prompt": [], "new_tokens": 0}


def _fresh_process(setup: Setup, use: Mapping[str, Any]) -> dict[str, Any]:
    given = json.dumps({**asdict(setup), **use})
    command = [sys.executable, "-m", "prejit.compiler.bench.bench_child", given]
    code, output, errors = run_child(command)
    if code:
        raise ProcessError(
            f"{setup.path}: a fresh process ended with {code}: {errors[-500:].strip()}",
            code,
            hint="`prejit generate` or `prejit call` on this bundle may say more",
        )
    return json.loads(output.splitlines()[-1])


def judge(
    setups: Sequence[Setup],
    bundles: Sequence[Bundle],
    baseline: BenchReport | None,
    *,
    runs: int,
    seconds: float,
    tolerance: float,
    say: Say,
    other: str = "",
) -> tuple[BenchReport, Comparison | None]:
    """Measure a bundle and compare it with a second bundle or with a baseline.

    Rows that look worse are measured a second time and the better result counts: a real regression shows
    again, while other work on the machine mostly does not.
    """
    reports, in_turns = measure(setups, bundles, runs=runs, seconds=seconds, say=say)

    def compared() -> Comparison | None:
        before = baseline if len(bundles) == 1 else reports[1]
        if before is None:
            return None
        turns = in_turns if len(bundles) > 1 else None
        return compare_reports(before, reports[0], other=other, tolerance=tolerance, in_turns=turns)

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
) -> tuple[list[BenchReport], dict[str, Ratio]]:
    """Measure one bundle, or two in alternation.

    `only` has the names of rows to measure, with those of the same probes; None: all.

    Returns:
        The reports; for two bundles also the ratio of the first to the second, by the name of the row.

    Raises:
        UsageError: a model reads a source, which is not measured.
        ProcessError: a fresh process failed.
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
        rows = [summarize(head, [*chain(*rounds)]) for head, rounds in side.items()]
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


def _report(bundle: Bundle, rows: tuple[BenchRow, ...], runs: int, seconds: float) -> BenchReport:
    packages = ("prejit", "jax", "jaxlib", "numpy")
    machine = {name: value for name, value in asdict(Fingerprint.current()).items() if value}
    return BenchReport(
        report_version=REPORT_VERSION,
        bundle=bundle.name,
        digest=bundle.digest,
        target=bundle.target,
        matched=bundle.matched,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=json.loads(json.dumps(machine)),  # a JSON file has lists for tuples
        versions={
            "python": ".".join(map(str, sys.version_info[:3])),
            **{name: metadata.version(name) for name in packages},
        },
        runs=runs,
        seconds=seconds,
        programs=bundle.report(),
        rows=rows,
    )
