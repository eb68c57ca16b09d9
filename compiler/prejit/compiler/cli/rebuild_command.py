"""`prejit rebuild`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prejit.compiler.cli.build_options import FILE, JOBS, PATH, TIMEOUT
from prejit.runtime.cli.command_options import JSON, VERBOSE
from prejit.runtime.cli.output import print_json

if TYPE_CHECKING:
    from prejit.compiler.rebuilding.compared_parts import ComparedPart
    from prejit.compiler.rebuilding.verifying import Rebuilt

REBUILD_DIFFERS = 8


@click.command(
    epilog="Examples:\n\n\b\n  prejit rebuild --verify artifacts/demo --manifest manifests/demo.toml\n"
    "  prejit rebuild --verify artifacts/demo --json\n\n"
    "Everything is compiled again, in a temporary directory (TMPDIR): results of the build cache or of a "
    "shared store would prove nothing. Each target is compiled by the version of jax that it was built "
    "with, in an environment that is made where it is missing.\n\n"
    f"Exit status: 0 all parts are equal or their differences explained, {REBUILD_DIFFERS} some are not, "
    "1 a source is no longer what the bundle was built from, or a program does not compile."
)
@click.argument("bundle", type=PATH, metavar="BUNDLE", help="Directory of a bundle.")
@click.option(
    "--verify",
    is_flag=True,
    required=True,
    help="Compare the rebuild with BUNDLE, and keep neither.",
)
@click.option(
    "--manifest",
    **FILE,
    help="The bundle's manifest, beside its sources (default: its recorded name, here).",
)
@JOBS
@TIMEOUT
@VERBOSE
@JSON
def rebuild(
    bundle: Path,
    verify: bool,
    manifest: Path | None,
    jobs: int | None,
    timeout: int,
    as_json: bool,
) -> int:
    """Build BUNDLE again from its recorded inputs, and compare the two part by part."""
    from prejit.compiler.progress import open_progress
    from prejit.compiler.rebuilding.verifying import rebuild as build_again
    from prejit.runtime.errors import UsageError

    if not verify:
        raise UsageError(
            "expected --verify, found none", hint="`prejit build` builds; `prejit rebuild` compares"
        )
    with open_progress() as progress:
        found = build_again(
            bundle, manifest, progress=progress, workers=jobs, timeout_seconds=timeout
        )
    if as_json:
        print_json(
            {
                "path": str(found.path),
                "digest": found.digest,
                "rebuilt": found.rebuilt,
                "parts": [asdict(each) for each in found.parts],
            }
        )
    else:
        _print(found)
    return REBUILD_DIFFERS if found.findings else 0


def _print(found: Rebuilt) -> None:
    """Print a row for each kind of part and target, then a line for each part that differs."""
    from prejit.runtime.base.text_table import table
    from prejit.runtime.errors import printable

    groups: dict[tuple[str, str], list[ComparedPart]] = {}
    for each in found.parts:
        groups.setdefault((each.kind, each.target), []).append(each)
    rows = []
    for (kind, target), parts in groups.items():
        counts = [
            f"{count} {verdict}" if len(parts) > 1 else verdict
            for verdict in ("equal", "explained", "differs")
            if (count := sum(each.verdict == verdict for each in parts))
        ]
        rows.append((kind, target or "all", ", ".join(counts).replace("differs", "DIFFERS")))
    click.echo(table(("part", "target", "rebuilt"), rows))
    for each in found.parts:
        if each.verdict != "equal":
            name = " ".join(filter(None, (each.kind, each.name, each.target)))
            verdict = each.verdict.replace("differs", "DIFFERS")
            why = f" ({each.reason})" if each.reason and each.reason != each.detail else ""
            click.echo(printable(f"{verdict} {name}: {each.detail}{why}"))
    same = found.digest == found.rebuilt
    click.echo(
        f"\n{found.path}: {found.digest[:19]}, rebuilt "
        + ("to the same bytes" if same else f"as {found.rebuilt[:19]}")
        + f": {len(found.findings)} findings"
    )
