"""`prejit diff`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prejit.compiler.cli.build_options import PATH
from prejit.runtime.cli.command_options import JSON
from prejit.runtime.cli.output import print_json

if TYPE_CHECKING:
    from prejit.compiler.comparing.difference import BundleDifference, ProgramDifference
    from prejit.compiler.comparing.speed import Speed

_SHOWN = 4
"""Operations, kinds of instructions and fields of a program that are shown; --json has all."""


@click.command(
    epilog="Examples:\n\n\b\n  prejit diff artifacts/demo releases/demo\n"
    "  prejit diff before/demo after/demo --speed\n\n"
    "Exit status: 0 if the bundles are equal, 1 if they differ."
)
@click.argument("before", type=PATH, metavar="A", help="Directory of a bundle.")
@click.argument("after", type=PATH, metavar="B", help="Directory of a bundle.")
@click.option(
    "--speed",
    "measures",
    is_flag=True,
    help="Run the programs of both in turns, each with its own jaxlib, and name those that became slower.",
)
@JSON
def diff(before: Path, after: Path, measures: bool, as_json: bool) -> int:
    """Say what differs between bundles A and B: programs, instructions, weights, requirements, versions."""
    from prejit.compiler.comparing.difference import compare_bundles, read_bundle

    first, second = read_bundle(before), read_bundle(after)
    found = compare_bundles(first, second)
    speed: Speed | None = None
    if measures:
        from prejit.compiler.comparing.speed import compare_speed
        from prejit.runtime.cli.output import progress

        with progress() as show:
            speed = compare_speed(first, second, show)
    if as_json:
        described = {"equal": found.is_equal, **asdict(found)}
        print_json(described | {"speed": None if speed is None else asdict(speed)})
    else:
        _print(found)
        if speed is not None:
            _print_speed(speed)
    return 0 if found.is_equal else 1


def _print(found: BundleDifference) -> None:
    if found.is_equal:
        click.echo(f"equal: {found.before}")
        return
    click.echo(f"{found.before[:19]} -> {found.after[:19]}")
    for target, versions in found.versions.items():
        changes = (f"{name} {was} -> {now}" for name, (was, now) in versions.items())
        click.echo(f"{target}: built with {', '.join(changes)}")
    for target, axes in found.requirements.items():
        for name, (was, now) in axes.items():
            click.echo(f"{target}: needs {name} {_short(now)}, needed {_short(was)}")
    for target, layers in found.layers.items():
        for name, sizes in layers.items():
            click.echo(f"{target}: layer {_layer(name)} differs: {_sizes(sizes)}")
    new = sum(each.has_new_program for each in found.changed)
    click.echo(
        f"programs: {len(found.added)} added, {len(found.removed)} removed, {new} changed, "
        f"{len(found.changed) - new} compiled differently, {found.same} the same"
    )
    for sign, names in (("+", found.added), ("-", found.removed)):
        for name in names:
            click.echo(f"{sign} {name}")
    for each in found.changed:
        click.echo(f"~ {each.program} for {each.target}")
        for line in _lines(each):
            click.echo(f"    {line}")


def _lines(each: ProgramDifference) -> list[str]:
    """Return what differs in a program, a line for each kind."""
    lines = []
    for name, (was, now) in [*each.fields.items()][:_SHOWN]:
        lines.append(f"{name}: {_short(was)} -> {_short(now)}")
    if each.has_new_program:
        lines.append(
            f"StableHLO: {_changes(each.operations)}"
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
            found = _changes({k: sides for k, sides in kinds.items() if sides[0] != sides[1]})
            sizes = _sizes((before.code_bytes, after.code_bytes))
            lines.append(f"machine code: {sizes}{f'; {found}' if found else ''}")
        if before.kernels != after.kernels:
            called = [", ".join(each.kernels) or "none" for each in (before, after)]
            lines.append(f"native kernels: {called[0]} -> {called[1]}")
    return lines


def _changes(counts: dict[str, tuple[int, int]]) -> str:
    """Return the counts that changed most, as text."""
    most = sorted(counts.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    shown = [f"{name} {was} -> {now}" for name, (was, now) in most[:_SHOWN]]
    more = [f"{len(most) - _SHOWN} more"] if len(most) > _SHOWN else []
    return ", ".join([*shown, *more])


def _sizes(sides: tuple[int, int]) -> str:
    from prejit.runtime.base.text_table import size

    was, now = sides
    return f"{size(was)}, as before" if was == now else f"{size(was)} -> {size(now)}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _layer(media_type: str) -> str:
    return media_type.removeprefix("application/vnd.prejit.")


def _print_speed(speed: Speed) -> None:
    from prejit.compiler.bench.bench_wording import spelled, spelled_ratio
    from prejit.runtime.base.text_table import table

    if speed.why_not:
        click.echo(f"\nspeed was not measured: {speed.why_not}")
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
    click.echo(f"\nspeed: {slower} slower, {faster} faster, {len(rows) - slower - faster} the same")
    click.echo(table(("program", "before", "after", "ratio", "spread", ""), rows))
