"""Views of programs that `prejit inspect` adds with the build side: their texts, costs and roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from prejit.compiler.bench.bench_page import spelled
from prejit.compiler.comparing import inspected_programs
from prejit.compiler.comparing.difference import read_bundle
from prejit.compiler.comparing.inspected_programs import (
    MachineLimits,
    ProgramCost,
    RooflineRow,
    costs,
    find_program,
    find_target,
    measure_limits,
    run_times,
)
from prejit.runtime.base.wording import size, table
from prejit.runtime.cli.command_options import load_bundle
from prejit.runtime.cli.output import print_json, print_text, progress
from prejit.runtime.errors import UsageError

_TEXTS = {
    "stablehlo": inspected_programs.stablehlo,
    "hlo": inspected_programs.optimized_hlo,
    "asm": inspected_programs.assembly,
}


def show_text(path: str, form: str, program: str, target: str | None, *, as_json: bool) -> None:
    """Print a program as text: `stablehlo`, `hlo` or `asm`.

    Raises:
        UsageError: there is no such program or target, or it has no such form.
        RejectError: the bundle is damaged.
    """
    bundle = read_bundle(Path(path))
    found = find_target(bundle, target)
    text = _TEXTS[form](bundle, found, find_program(bundle, found, program))
    if as_json:
        print_json({"program": program, "target": found.name, form: text})
    else:
        print_text(text.rstrip())


def show_costs(path: str, target: str | None, *, as_json: bool) -> None:
    """Print what one run of each program of a target costs. Raises as `show_text`."""
    bundle = read_bundle(Path(path))
    found = find_target(bundle, target)
    each = costs(bundle, found)
    if as_json:
        print_json({"target": found.name, "programs": [asdict(cost) for cost in each]})
        return
    heads = ["program", "MFLOP", "moves", "FLOP/byte", "temporary memory"]
    print_text(table(heads, [_cost_row(cost) for cost in each]))
    print_text("one run each; a loop counts as one turn")


def show_roofline(path: str, target: str | None, *, as_json: bool) -> None:
    """Run each program that this machine loads, and print how near it comes to the machine's limits.

    Raises:
        MismatchError: this machine is none of the targets.
        UsageError: the target is not the one that this machine loads.
        RejectError: the bundle is damaged.
    """
    bundle = read_bundle(Path(path))
    found = find_target(bundle, target)
    with load_bundle(path, on_mismatch="error", fingerprint=None) as loaded, progress() as show:
        if loaded.target != found.contents.config.target:
            raise UsageError(
                f"{path}: expected the target that this machine loads, {loaded.target}, found {target}",
                hint="leave --for-target out, or give --costs in place of --roofline, which runs nothing",
            )
        programs = found.contents.config.programs
        if (platform := found.requirement.platform) != "cpu":
            raise UsageError(
                f"{path}: expected a target for CPUs, found {found.name} for {platform}",
                hint="--costs counts without running; `prejit bench` measures on every platform",
            )
        show("measuring the limits of this machine")
        limits = measure_limits()
        times = run_times(loaded, [each.name for each in programs], show)
        show("measuring the limits of this machine again")
        limits = limits.best_of(measure_limits())  # other work may have disturbed the first
    rows = [RooflineRow.of(cost, times[cost.program], limits) for cost in costs(bundle, found)]
    if as_json:
        described = {"limits": asdict(limits), "programs": [asdict(row) for row in rows]}
        print_json({"target": found.name, **described})
    else:
        print_text(_roofline_text(limits, rows))


def _cost_row(cost: ProgramCost) -> tuple[str, ...]:
    numbers = (f"{cost.flops / 1e6:,.1f}", size(cost.moved_bytes), f"{cost.flops_per_byte:.2f}")
    return cost.program, *numbers, size(cost.temp_bytes)


def _roofline_text(limits: MachineLimits, rows: Sequence[RooflineRow]) -> str:
    reads, flops = limits.read_bytes_per_second / 1e9, limits.flops_per_second / 1e9
    heads = ["program", "MFLOP", "moves", "FLOP/byte", "temporary memory", "took"]
    heads += ["GFLOP/s", "GB/s", "bound by", "of the limit"]
    lines = [
        (
            *_cost_row(row.cost),
            spelled(row.seconds, "s"),
            f"{row.cost.flops / row.seconds / 1e9:.1f}",
            f"{row.cost.moved_bytes / row.seconds / 1e9:.1f}",
            row.bound,
            f"{row.share:.0%}",
        )
        for row in rows
    ]
    return (
        f"this machine reads {reads:.1f} GB/s of memory and multiplies float32 at {flops:.0f} GFLOP/s, "
        f"so programs of fewer than {flops / reads:.1f} FLOP/byte are bound by memory\n"
        f"{table(heads, lines)}\n"
        "more than 100%: caches held what a program read, it read a part of an argument, or it multiplied "
        "numbers narrower than float32\n"
        "MFLOP has one turn of a loop and `took` all of them: the share of a program with a loop is too low"
    )
