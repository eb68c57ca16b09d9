"""`prejit plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prejit.compiler.cli.build_options import CACHE, FORMS, PATH, SHARED, TARGETS
from prejit.runtime.cli.command_options import JSON, VERBOSE
from prejit.runtime.cli.output import print_json

if TYPE_CHECKING:
    from prejit.compiler.pipeline.reuse import PlannedExecutable

PLAN_HAS_CHANGES = 8


@click.command(
    epilog="Examples:\n\n\b\n  prejit plan manifests/demo.toml\n"
    "  prejit plan manifests/demo.toml --target cpu-x86-64-v3 --json\n\n"
    "A plan compiles and traces nothing. It imports the function of a [[program]] that changed. Only tracing "
    "at build shows whether a store has its executable; else it compiles.\n\n"
    f"Exit status: 0 everything is cached, {PLAN_HAS_CHANGES} something compiles or is traced at build."
)
@click.argument("manifest", type=PATH, metavar="MANIFEST", help="A TOML file.")
@TARGETS
@FORMS
@CACHE
@SHARED
@VERBOSE
@JSON
def plan(
    manifest: Path,
    targets: tuple[str, ...],
    forms: Path | None,
    cache: Path | None,
    shared: str | None,
    as_json: bool,
) -> int:
    """Show programs x targets of MANIFEST: what is cached, what will compile and why."""
    from prejit.compiler.api import plan as plan_manifest
    from prejit.compiler.base.suggestions import counted
    from prejit.compiler.pipeline.reuse import CACHED, COMPILE, TRACED

    executables = plan_manifest(manifest, targets=targets, cache=cache, shared=shared, forms=forms)
    counts = {
        state: sum(each.state == state for each in executables)
        for state in (CACHED, COMPILE, TRACED)
    }
    if as_json:
        rows = [
            {
                "program": each.spec.name,
                "kind": each.spec.kind,
                "bucket": each.spec.bucket,
                "target": each.target.name,
                "state": each.state,
                "cached": each.cached,
                "where": each.where,
                "why": each.why,
            }
            for each in executables
        ]
        summary = {"to_compile": counts[COMPILE], "traced_at_build": counts[TRACED]}
        print_json({"programs": rows, **summary})
    else:
        _print_plan(executables)
        traced = counts[TRACED]
        left = counts[COMPILE] + traced
        # What is lowered anew may become a program that the store has, and equal programs compile once.
        most = "at most " if left else ""
        rest = f" ({traced} {TRACED}, which shows whether a store has them)" if traced else ""
        click.echo(
            f"\n{counted(len(executables), 'program')}: {counts[CACHED]} cached, "
            f"{most}{left} to compile{rest}"
        )
    return 0 if counts[CACHED] == len(executables) else PLAN_HAS_CHANGES


def _print_plan(executables: Sequence[PlannedExecutable]) -> None:
    """Print one row for each program, one column for each target; reasons below, once each."""
    from prejit.compiler.pipeline.reuse import reasons
    from prejit.compiler.store.directory_store import LOCAL

    targets = list(dict.fromkeys(each.target.name for each in executables))
    states: dict[str, dict[str, str]] = {}
    for each in executables:
        is_shared = each.cached and each.where != LOCAL
        states.setdefault(each.spec.name, {})[each.target.name] = (
            "shared" if is_shared else each.state
        )
    rows = [["program", *targets]] + [
        [name, *(cells[target] for target in targets)] for name, cells in states.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    if found := reasons(executables):
        click.echo("\nwhy:")
    for reason, count in found.items():
        click.echo(f"  {count:>4} x  {reason}")
