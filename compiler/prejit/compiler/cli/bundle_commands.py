"""`prejit bench`, `diff`, `fleet`, `wheel` and `rollout`: a bundle on machines, beside others, in a wheel."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prejit.runtime.base.wording import few, shortened, size, table
from prejit.runtime.cli.command_options import (
    BUNDLE,
    COUNT,
    DIR,
    JSON,
    LOCAL_BUNDLE,
    PATH,
    SECONDS,
    VERBOSE,
    WHOLE_BUNDLE,
    Number,
    check_one,
    loads,
    on_mismatch_option,
    output,
    page,
    with_all_targets,
)
from prejit.runtime.cli.output import print_json, print_text, progress, write_text

if TYPE_CHECKING:
    from prejit.compiler.comparing.difference import BundleDifference, ProgramDifference
    from prejit.compiler.comparing.speed import Speed
    from prejit.compiler.fleet.channel_rollout import MachineChange, RolloutPlan
    from prejit.compiler.fleet.fleet_report import FleetReport


@click.command(
    epilog="Examples:\n\n\b\n  prejit bench artifacts/demo --page demo.html\n"
    "  prejit bench artifacts/demo -o baseline.json\n"
    "  prejit bench artifacts/demo --baseline baseline.json --tolerance 15\n"
    "  prejit bench artifacts/demo --against artifacts/demo-before"
)
@LOCAL_BUNDLE
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
    from prejit.compiler.bench.bench_page import bench_page, notes, regression, text
    from prejit.compiler.bench.bench_report import read
    from prejit.compiler.bench.measure import Setup, judge
    from prejit.runtime.cli.command_options import load_bundle

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
    if as_json:
        print_json(described)
        for note in notes(comparison) if comparison is not None else ():
            print_text(f"note: {note}", file=sys.stderr)
    else:
        print_text(text(report, comparison))
    if output is not None:
        write_text(output, json.dumps(described, indent=1) + "\n")
    if page is not None:
        write_text(page, bench_page(report, comparison))
    if comparison is not None and comparison.regressions:
        raise regression(comparison)
    return 0


_COMPARED = "Directory of a bundle, or a reference to one."
_SHOWN = 4
"""Operations, kinds of instructions and fields of a program that are shown; --json has all."""


@click.command(
    epilog="Examples:\n\n\b\n  prejit diff artifacts/demo releases/demo\n"
    "  prejit diff before/demo after/demo --speed\n\n"
    "Exit status: 0 if the bundles are equal, 1 if they differ."
)
@click.argument("before", type=PATH, metavar="A", callback=with_all_targets, help=_COMPARED)
@click.argument("after", type=PATH, metavar="B", callback=with_all_targets, help=_COMPARED)
@click.option(
    "--speed",
    "measures",
    is_flag=True,
    help="Run the programs of both in turns, each with its own jaxlib, and name those that became slower.",
)
@JSON
def diff(before: str, after: str, measures: bool, as_json: bool) -> int:
    """Say what differs between bundles A and B: programs, instructions, weights, requirements, versions."""
    from prejit.compiler.comparing.difference import compare_bundles, read_bundle

    first, second = read_bundle(Path(before)), read_bundle(Path(after))
    found = compare_bundles(first, second)
    speed: Speed | None = None
    if measures:
        from prejit.compiler.comparing.speed import compare_speed

        with progress() as show:
            speed = compare_speed(first, second, show)
    if as_json:
        described = {"equal": found.is_equal, **asdict(found)}
        print_json(described | {"speed": None if speed is None else asdict(speed)})
    else:
        _print_difference(found)
        if speed is not None:
            _print_speed(speed)
    return 0 if found.is_equal else 1


def _print_difference(found: BundleDifference) -> None:
    if found.is_equal:
        print_text(f"equal: {found.before}")
        return
    print_text(f"{found.before[:19]} -> {found.after[:19]}")
    for target, versions in found.versions.items():
        changes = (f"{name} {was} -> {now}" for name, (was, now) in versions.items())
        print_text(f"{target}: built with {', '.join(changes)}")
    for target, axes in found.requirements.items():
        for name, (was, now) in axes.items():
            print_text(f"{target}: needs {name} {shortened(now, 60)}, needed {shortened(was, 60)}")
    for target, layers in found.layers.items():
        for name, sizes in layers.items():
            layer = name.removeprefix("application/vnd.prejit.")
            print_text(f"{target}: layer {layer} differs: {_sizes(sizes)}")
    new = sum(each.has_new_program for each in found.changed)
    print_text(
        f"programs: {len(found.added)} added, {len(found.removed)} removed, {new} changed, "
        f"{len(found.changed) - new} compiled differently, {found.same} the same"
    )
    for sign, names in (("+", found.added), ("-", found.removed)):
        for name in names:
            print_text(f"{sign} {name}")
    for each in found.changed:
        print_text(f"~ {each.program} for {each.target}")
        for line in _lines(each):
            print_text(f"    {line}")


def _lines(each: ProgramDifference) -> list[str]:
    lines = []
    for name, (was, now) in [*each.fields.items()][:_SHOWN]:
        lines.append(f"{name}: {shortened(was, 60)} -> {shortened(now, 60)}")
    if each.has_new_program:
        lines.append(
            f"StableHLO: {_most_changed(each.operations)}"
            if each.operations
            else "StableHLO: the same operations with other constants, attributes or order"
        )
    if each.has_new_executable:
        lines.append(f"executable: {_sizes(each.executable_bytes)}")
    if each.temp_bytes[0] != each.temp_bytes[1]:
        lines.append(f"temporary memory: {_sizes(each.temp_bytes)}")
    if each.code is not None:
        before, after = each.code
        if before.digest == after.digest:
            lines.append("machine code: the same; what XLA calls, or stores beside it, differs")
        else:
            kinds = {
                name: (before.instructions.get(name, 0), after.instructions.get(name, 0))
                for name in sorted({*before.instructions, *after.instructions})
            }
            kinds["functions"] = before.functions, after.functions
            found = _most_changed({k: sides for k, sides in kinds.items() if sides[0] != sides[1]})
            sizes = _sizes((before.code_bytes, after.code_bytes))
            lines.append(f"machine code: {sizes}{f'; {found}' if found else ''}")
        if before.kernels != after.kernels:
            called = [", ".join(each.kernels) or "none" for each in (before, after)]
            lines.append(f"native kernels: {called[0]} -> {called[1]}")
    return lines


def _most_changed(counts: dict[str, tuple[int, int]]) -> str:
    most = sorted(counts.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    shown = [f"{name} {was} -> {now}" for name, (was, now) in most[:_SHOWN]]
    more = [f"{len(most) - _SHOWN} more"] if len(most) > _SHOWN else []
    return ", ".join([*shown, *more])


def _sizes(sides: tuple[int, int]) -> str:
    was, now = sides
    return f"{size(was)}, as before" if was == now else f"{size(was)} -> {size(now)}"


def _print_speed(speed: Speed) -> None:
    from prejit.compiler.bench.bench_page import spelled, spelled_ratio

    if speed.why_not:
        print_text(f"\nspeed was not measured: {speed.why_not}")
        return
    rows: list[Sequence[str]] = [
        (
            row.name,
            spelled(row.before, "s"),
            spelled(row.after, "s"),
            *spelled_ratio(row.ratio),
            row.verdict,
        )
        for row in speed.rows
    ]
    slower = sum(row.verdict == "slower" for row in speed.rows)
    faster = sum(row.verdict == "faster" for row in speed.rows)
    print_text(f"\nspeed: {slower} slower, {faster} faster, {len(rows) - slower - faster} the same")
    print_text(table(("program", "before", "after", "ratio", "spread", ""), rows))


@click.command(
    epilog="Examples:\n\n\b\n  prejit fleet artifacts/demo machines\n"
    "  prejit fleet artifacts/demo machines --page fleet.html --on-mismatch error\n\n"
    "Exit status: 3 with --on-mismatch error, where a machine falls back to compiling."
)
@BUNDLE
@click.argument("directory", **DIR, help="Directory of fingerprints; those below it count too.")
@page("Write the report as an HTML page.")
@on_mismatch_option("With error: exit 3 where a machine falls back to compiling.")
@JSON
def fleet(path: str, directory: str, page: str | None, on_mismatch: str, as_json: bool) -> int:
    """Print which target each machine of a fleet loads, and the fewest targets to add for the rest."""
    from prejit.compiler.fleet.fleet_report import explain_fleet, fleet_page
    from prejit.runtime.cli.command_options import bundle_files
    from prejit.runtime.format.checks.oci import target_of
    from prejit.runtime.format.names import BUNDLE_NAME
    from prejit.runtime.format.root import read_root
    from prejit.runtime.machine.fleet_machines import read_fleet, unread

    with bundle_files(path) as files:
        root = read_root(files)
        targets = [target_of(descriptor, root.path) for descriptor in root.bundle.manifests]
    found = read_fleet(directory)
    report = explain_fleet(targets, found.machines, found.unreadable)
    if page is not None:
        write_text(
            page, fleet_page(root.bundle.annotations[BUNDLE_NAME], root.digest, directory, report)
        )
    if as_json:
        print_json(report.described())
    else:
        print_text(_fleet_text(report))
    if found.unreadable:
        sys.stdout.flush()  # the report comes before the error
        raise unread(found.unreadable, len(found.machines) + len(found.unreadable))
    return 3 if on_mismatch == "error" and report.fallen_back else 0


def _fleet_text(report: FleetReport) -> str:

    parts = [
        table(
            ["machines", "loads", "which", "closest", "why not"],
            [
                (
                    str(len(group.machines)),
                    "nothing: compiles" if group.mismatches else group.target,
                    few(group.machines),
                    group.target if group.mismatches else "",
                    group.reason(),
                )
                for group in report.groups
            ],
        ),
        table(["target", "machines"], [(name, str(n)) for name, n in report.serves.items()]),
    ]
    total = len(report.verdicts)
    if not report.fallen_back:
        return "\n\n".join(
            [*parts, f"{total} of {total} machines load a target: nothing is compiled"]
        )
    parts.append(
        f"{report.fallen_back} of {total} machines are none of the targets: every program would be "
        "compiled there"
    )
    if report.additions:
        parts.append(f"{report.advice()} (the path of a file is relative to the manifest):")
        parts += [
            f"# serves {len(addition.machines)}: {few(addition.machines)}\n{addition.toml()}"
            for addition in report.additions
        ]
    if report.beyond_help:
        parts.append("no target that can be added serves:")
        parts.append(
            table(
                ["machines", "which", "what stands in the way"],
                [
                    (str(len(group.machines)), few(group.machines), group.reason())
                    for group in report.beyond_help
                ],
            )
        )
    return "\n\n".join(parts)


@click.command(
    epilog="Examples:\n\n\b\n  prejit wheel artifacts/demo -o dist\n"
    "  prejit wheel artifacts/demo --version 1.2.0"
)
@WHOLE_BUNDLE
@click.option("-o", "--output", **DIR, default="dist", help="Directory of wheels.")
@click.option(
    "--version",
    metavar="VERSION",
    help="Version of the wheel (default: 0 and the first digits of the bundle's digest).",
)
@JSON
def wheel(path: str, output: str, version: str | None, as_json: bool) -> int:
    """Write a wheel with a bundle in it, which `load("wheel:NAME-bundle")` finds once it is installed."""
    from prejit.compiler.pipeline.bundle_wheel import write_wheel

    written = write_wheel(path, Path(output), version)
    if as_json:
        print_json({"path": str(written), "bytes": written.stat().st_size})
    else:
        print_text(str(written))
    return 0


@click.command(
    epilog="Examples:\n\n\b\n"
    "  prejit rollout oci://registry.example/demo:prod oci://registry.example/demo:v2 --fleet saved/\n"
    "  prejit rollout oci://registry.example/demo:prod artifacts/demo --dry-run\n"
    "  prejit rollout oci://registry.example/demo:prod --back\n\n"
    "Exit status: 1 where --fleet has a machine that loads a target now and would compile then; nothing "
    "moves then."
)
@click.argument("channel", metavar="CHANNEL", help="The tag that servers follow.")
@click.argument(
    "new",
    metavar="[NEW]",
    required=False,
    help="A reference, a directory, a .tar, or a digest in the channel's repository.",
)
@click.option("--fleet", "directory", **DIR, help="Say what changes for these fingerprints.")
@click.option("--back", is_flag=True, help="Move to the bundle before the last rollout.")
@click.option("--dry-run", is_flag=True, help="Move nothing; only print the plan.")
@click.option("--allow-compile", is_flag=True, help="Move it even where a machine would compile.")
@VERBOSE
@JSON
def rollout(
    channel: str,
    new: str | None,
    directory: str | None,
    back: bool,
    dry_run: bool,
    allow_compile: bool,
    as_json: bool,
) -> int:
    """Move a channel to another bundle, after a look at who is served then and what each machine fetches.

    Its repository gets what it lacks first. CHANNEL-previous leads to the bundle before.
    """
    from prejit.compiler.fleet.channel_rollout import Rollout
    from prejit.runtime.cli.command_options import reporting
    from prejit.runtime.machine.fleet_machines import Fleet, read_fleet, unread

    check_one({"NEW": new, "--back": back or None}, required=True)
    fleet = Fleet(()) if directory is None else read_fleet(directory)
    if fleet.unreadable:  # one of them may be the machine that would compile
        raise unread(fleet.unreadable, len(fleet.machines) + len(fleet.unreadable))
    found = Rollout(channel, new or "", fleet.machines)
    plan = found.plan
    is_refused = bool(plan.losing) and not allow_compile
    moves = not (dry_run or is_refused or plan.before == plan.after)
    if not as_json:
        print_text(_plan_text(plan))
    if moves:
        with progress() as show:
            found.move(reporting(show))
    if as_json:
        print_json(plan.described() | {"is_moved": moves})
    else:
        print_text(_outcome(plan, moves, is_refused))
    return int(is_refused)


def _plan_text(plan: RolloutPlan) -> str:

    rows = [
        (
            str(len(each.machines)),
            _loads(each.before, each.was_served),
            _loads(each.after, each.is_served),
            size(each.fetched_bytes),
            few(each.machines),
            _why(each),
        )
        for each in plan.changes
    ]
    parts = [
        f"{plan.channel}: {plan.before or 'new'} -> {plan.after}",
        f"its repository lacks {size(plan.copied_bytes)}",
    ]
    if rows:
        parts.append(table(("machines", "now", "then", "each fetches", "which", "why not"), rows))
    return "\n".join(parts)


def _loads(target: str, is_served: bool) -> str:
    return target if is_served else "compiles" if target else "-"


def _why(change: MachineChange) -> str:
    if change.is_served:
        return ""
    return f"closest is {change.after}: {change.why}"


def _outcome(plan: RolloutPlan, is_moved: bool, is_refused: bool) -> str:
    if is_refused:
        return (
            f"not moved: {len(plan.losing)} machines load a target now and would compile; "
            "--allow-compile moves it nevertheless"
        )
    if is_moved and not plan.before:
        return "moved"  # the first rollout of a channel leaves no way back
    if is_moved:
        return f"moved; `prejit rollout {plan.channel} --back` moves it back"
    return "not moved" + (": it leads there already" if plan.before == plan.after else "")
