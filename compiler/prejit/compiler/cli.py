"""The commands of the build side: `prejit plan`, `build`, `targets` and `gc`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from prejit.compiler.build.garbage import Found
    from prejit.compiler.build.plan import Inputs, PlannedProgram
    from prejit.compiler.targets.listing import Listed

PLAN_HAS_CHANGES = 8

_manifest = click.Path(path_type=Path)
_targets = click.option(
    "--target", "targets", multiple=True, metavar="NAME", help="Only this target; may be repeated."
)
_cache = click.option(
    "--cache",
    type=_manifest,
    metavar="DIR",
    help="Build cache (default: $PREJIT_CACHE or ~/.cache/prejit/build).",
)
_forms = click.option(
    "--forms",
    type=_manifest,
    metavar="FILE",
    help="A table of measured forms of products, as builds keep it in the build cache (forms.json).",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


@click.group()
def commands() -> None:
    """Compile JAX models ahead of time and package them."""


@commands.command(
    epilog="Examples:\n\n\b\n  prejit plan manifests/demo.toml\n"
    "  prejit plan manifests/demo.toml --target cpu-x86-64-v3 --json\n\n"
    f"Exit status: 0 everything is cached, {PLAN_HAS_CHANGES} something will compile."
)
@click.argument("manifest", type=_manifest)
@_targets
@_forms
@_cache
@_json
def plan(
    manifest: Path,
    targets: tuple[str, ...],
    forms: Path | None,
    cache: Path | None,
    as_json: bool,
) -> int:
    """Show programs x targets of MANIFEST: what is cached, what will compile and why."""
    from prejit.compiler.build.plan import make_plan

    programs = make_plan(_inputs(manifest, targets, cache, forms))
    changes = [program for program in programs if not program.cached]
    if as_json:
        rows = [
            {
                "program": p.spec.name,
                "kind": p.spec.kind,
                "bucket": p.spec.bucket,
                "target": p.target.name,
                "cached": p.cached,
                "why": p.why,
            }
            for p in programs
        ]
        click.echo(json.dumps({"programs": rows, "to_compile": len(changes)}, indent=2))
    else:
        _print_plan(programs)
        click.echo(
            f"\n{len(programs)} programs: {len(programs) - len(changes)} cached, "
            f"{len(changes)} to compile"
        )
    return PLAN_HAS_CHANGES if changes else 0


def _print_plan(programs: Sequence[PlannedProgram]) -> None:
    """One row a program, one column a target; reasons below, once each."""
    targets = list(dict.fromkeys(program.target.name for program in programs))
    state: dict[str, dict[str, str]] = {}
    for p in programs:
        state.setdefault(p.spec.name, {})[p.target.name] = "cached" if p.cached else "compile"
    rows = [["program", *targets]] + [
        [name, *(cells[t] for t in targets)] for name, cells in state.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    reasons: dict[str, int] = {}
    for p in programs:
        if not p.cached:
            reasons[p.why] = reasons.get(p.why, 0) + 1
    if reasons:
        click.echo("\nwhy:")
    for reason, count in reasons.items():
        click.echo(f"  {count:>4} x  {reason}")


@commands.command(
    epilog="Examples:\n\n\b\n  prejit build manifests/demo.toml\n"
    "  prejit build manifests/*.toml -o /srv/bundles --jobs 8\n"
    "  prejit build manifests/demo.toml --target cpu-x86-64-v3"
)
@click.argument("manifests", nargs=-1, required=True, type=_manifest, metavar="MANIFEST...")
@click.option(
    "-o",
    "--output",
    type=_manifest,
    default=Path("artifacts"),
    show_default=True,
    metavar="DIR",
    help="Directory of bundles; each is written to DIR/NAME.",
)
@_targets
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compile processes side by side (default: cores).",
)
@click.option(
    "--timeout",
    type=click.IntRange(min=1),
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help="Give up on a program that takes longer to compile, or to measure.",
)
@click.option(
    "--skip-unbuildable",
    is_flag=True,
    help="Leave out targets that this machine cannot compile for, and say so.",
)
@_forms
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Measure how products are computed fastest: all of them, or none (default: large ones that no "
    "table has).",
)
@_cache
@_json
def build(
    manifests: tuple[Path, ...],
    output: Path,
    targets: tuple[str, ...],
    jobs: int | None,
    timeout: int,
    skip_unbuildable: bool,
    forms: Path | None,
    measure: bool | None,
    cache: Path | None,
    as_json: bool,
) -> int:
    """Compile each MANIFEST and write its bundle. What did not change is not compiled again."""
    from prejit.compiler.build.build import build as build_bundle
    from prejit.compiler.compile.pool import default_workers
    from prejit.compiler.progress import open_progress, tell
    from prejit.runtime.cli.tables import accuracy_table

    built = []
    for manifest in manifests:
        started = time.perf_counter()
        chosen = _buildable(manifest, targets) if skip_unbuildable else targets
        if skip_unbuildable and not chosen:
            continue
        with open_progress() as progress:
            result = build_bundle(
                _inputs(manifest, chosen, cache, forms),
                output,
                workers=jobs or default_workers(),
                progress=progress,
                measure=measure,
                timeout_seconds=timeout,
            )
        seconds = time.perf_counter() - started
        built.append({**asdict(result), "path": str(result.path), "seconds": round(seconds, 3)})
        if not as_json:
            wrote = "wrote" if result.written else "up to date:"
            tell(
                f"{wrote} {result.path}: compiled {result.compiled}, cached {result.cached}, "
                f"{seconds:.1f} s, {result.digest[:19]}"
            )
            if result.accuracy is not None:
                tell(accuracy_table(result.accuracy), sys.stdout)  # others are still to be built
    if as_json:
        click.echo(json.dumps(built, indent=2))
    return 0


def _buildable(manifest: Path, only: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a manifest's targets that this machine can compile for; the others are told."""
    from prejit.compiler.build.plan import why_not
    from prejit.compiler.manifest.manifest import read_manifest
    from prejit.compiler.progress import tell
    from prejit.compiler.targets.target_table import chosen

    buildable = []
    for target in chosen(read_manifest(manifest).targets, only, str(manifest)):
        if reason := why_not(target):
            tell(f"{manifest}: left out {target.name}: {reason}")
        else:
            buildable.append(target.name)
    return tuple(buildable)


def _inputs(
    manifest: Path, targets: tuple[str, ...], cache: Path | None, forms: Path | None
) -> Inputs:
    from prejit.compiler.build.plan import Inputs
    from prejit.compiler.manifest.manifest import read_manifest
    from prejit.compiler.store.directory import DirectoryStore

    return Inputs(read_manifest(manifest), DirectoryStore.open(cache), targets, forms=forms)


@commands.command(epilog="Examples:\n\n\b\n  prejit targets\n  prejit targets --json")
@_json
def targets(as_json: bool) -> int:
    """List the targets that a manifest may name, and which of them this machine compiles for."""
    from importlib.metadata import version

    from prejit.compiler.targets.listing import NO, list_targets

    listed = list_targets(version("jax"))
    if as_json:
        rows = [
            {**asdict(each.target), "builds": each.builds != NO, "packages": each.packages}
            | {"how": each.builds, "note": each.note}
            for each in listed
        ]
        click.echo(json.dumps({"targets": rows}, indent=2))
    else:
        _print_targets(listed)
    return 0


def _print_targets(listed: Sequence[Listed]) -> None:
    """A table for each platform; below it what there is to know, once each."""
    from prejit.runtime.base.tables import size, table
    from prejit.runtime.machine.catalogue import PLATFORMS

    heads = {
        "cpu": ("cpu", "architecture", "extensions"),
        "cuda": ("device", "capability", "memory", "lowest driver"),
        "tpu": ("device", "chips", "memory of each"),
    }
    for platform in PLATFORMS:
        rows, notes = [], dict[str, list[str]]()
        for each in listed:
            found = each.target
            if found.platform != platform:
                continue
            memory = size(found.memory_bytes) if found.memory_bytes else ""
            features = found.cpu_features
            cells = {
                "cpu": (
                    found.cpu or "this machine",
                    found.architecture,
                    "all of this machine" if features is None else f"{len(features)}",
                ),
                "cuda": (
                    found.device_kind or "",
                    found.compute_capability or "",
                    memory,
                    found.driver or "",
                ),
                "tpu": (found.device_kind or "", found.topology or "", memory),
            }
            rows.append((found.name, *cells[platform], each.builds))
            if each.packages:
                note = f"the first download: {', '.join(each.packages)}"
                notes.setdefault(note, [])
            if each.note:
                notes.setdefault(each.note, []).append(found.name)
        click.echo(table((platform, *heads[platform], "builds here"), rows))
        for note, names in notes.items():
            click.echo(f"  {', '.join(names)}: {note}" if names else f"  {note}")
        click.echo("")


@commands.command(
    epilog="Examples:\n\n\b\n  prejit gc --dry-run\n  prejit gc --days 7\n\n"
    "Environments are in $PREJIT_ENVIRONMENTS, or in `environments` of the default build cache. With --cache "
    "nothing outside of DIR is touched."
)
@click.option(
    "--days",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    metavar="N",
    help="Remove what was not used for N days.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, only say what would go.")
@_cache
@_json
def gc(days: int, dry_run: bool, cache: Path | None, as_json: bool) -> int:
    """Remove cache entries and environments that were not used for some days, and leftovers."""
    from prejit.compiler.build.garbage import collect

    result = collect(cache, days=days, dry_run=dry_run)
    gone = [found for found in result.found if found.reason]
    freed = sum(found.size for found in gone)
    if as_json:
        summary = {
            "dry_run": dry_run,
            "days": days,
            "builds_running": result.builds_running,
            "freed_bytes": freed,
            "kept_bytes": sum(found.size for found in result.found) - freed,
            "removed": [asdict(found) for found in gone],
        }
        click.echo(json.dumps(summary, indent=2))
        return 0
    from prejit.runtime.base.tables import size

    _print_collection(result.found, dry_run)
    if result.builds_running:
        click.echo("\na build is running: what was used in the last day stays")
    click.echo(f"\n{'would free' if dry_run else 'freed'} {size(freed)}")
    return 0


def _print_collection(found: Sequence[Found], dry_run: bool) -> None:
    """One row a kind, then each environment that goes."""
    from prejit.runtime.base.tables import size, table

    rows = []
    for kind in dict.fromkeys(("environments", "results", "contents", *(f.kind for f in found))):
        gone = [f.size for f in found if f.kind == kind and f.reason]
        kept = [f.size for f in found if f.kind == kind and not f.reason]
        counts = (str(len(gone)), size(sum(gone)), str(len(kept)), size(sum(kept)))
        rows.append((kind, *counts))
    verbs = ("to remove", "to free") if dry_run else ("removed", "freed")
    click.echo(table(("", *verbs, "kept", "size"), rows))
    for each in found:
        if each.kind == "environments" and each.reason:
            click.echo(f"  environment of {each.name}: {each.reason}, {size(each.size)}")


def run(arguments: Sequence[str]) -> int:
    """Runs a command; errors of prejit are the caller's to print.

    Returns:
        The exit status.
    """
    _open_closed_streams()
    try:
        return commands.main(list(arguments), prog_name="prejit", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130


def _open_closed_streams() -> None:
    """Opens stdin, stdout and stderr where they were closed: else a file of ours would get their number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
