"""`prejit gc`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prejit.compiler.cli.shared_options import CACHE
from prejit.runtime.base.wording import size, table
from prejit.runtime.cli.command_options import JSON, SIZE
from prejit.runtime.cli.output import print_json, print_text

if TYPE_CHECKING:
    from prejit.compiler.garbage import Found


@click.command(
    epilog="Examples:\n\n\b\n  prejit gc --dry-run\n  prejit gc --days 7\n"
    "  prejit gc --store s3://team/prejit --max-size 10GB\n\n"
    "Environments are in $PREJIT_ENVIRONMENTS, or in `environments` of the default build cache; what was "
    "made from GGUF files is in the runtime's cache. With --cache nothing outside of DIR is touched."
)
@click.option(
    "--days",
    type=click.IntRange(min=0),
    default=30,
    metavar="N",
    help="Remove what was not used for N days.",
)
@click.option(
    "--store",
    "shared",
    metavar="URL",
    help="Make room in this shared store instead, a directory or an object store. Needs --max-size.",
)
@click.option(
    "--max-size",
    **SIZE,
    help="Remove from a shared store what was not used for the longest time, until it has this size: 500MB, "
    "10GB, 2TiB.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing; only print what would be removed.")
@CACHE
@JSON
def gc(
    days: int,
    shared: str | None,
    max_size: int | None,
    dry_run: bool,
    cache: Path | None,
    as_json: bool,
) -> int:
    """Remove cache entries and environments that were not used for some days, and leftovers."""
    from prejit.compiler.garbage import collect

    if shared is not None or max_size is not None:
        _make_room(shared, max_size, dry_run, as_json)
        return 0
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
        print_json(summary)
        return 0
    _print_collection(result.found, dry_run)
    if result.builds_running:
        print_text("\na build is running: what was used in the last day stays")
    print_text(f"\n{'would free' if dry_run else 'freed'} {size(freed)}")
    return 0


def _make_room(shared: str | None, max_size: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove files of the shared stores that are written, and print how many."""
    from prejit.compiler.sharing.remote import evict
    from prejit.compiler.sharing.sharing_settings import read_stores
    from prejit.runtime.errors import UsageError

    if shared is None or max_size is None:
        raise UsageError("expected --store and --max-size together, found one of them")
    remotes = {each.remote.name: each.remote for each in read_stores(shared).tiers if each.writes}
    if not remotes:
        raise UsageError(f"{shared}: expected a store with write = true, found none")
    done = [evict(each, max_size, dry_run=dry_run) for each in remotes.values()]
    if as_json:
        print_json({"dry_run": dry_run, "stores": [asdict(each) for each in done]})
        return
    verb = "would remove" if dry_run else "removed"
    for each in done:
        print_text(
            f"{each.name}: {verb} {each.removed} files, {size(each.freed_bytes)}; kept {each.kept}, "
            f"{size(each.kept_bytes)}"
        )


def _print_collection(found: Sequence[Found], dry_run: bool) -> None:
    rows = []
    for kind in dict.fromkeys(("environments", "results", "contents", *(f.kind for f in found))):
        gone = [f.size for f in found if f.kind == kind and f.reason]
        kept = [f.size for f in found if f.kind == kind and not f.reason]
        counts = (str(len(gone)), size(sum(gone)), str(len(kept)), size(sum(kept)))
        rows.append((kind, *counts))
    verbs = ("to remove", "to free") if dry_run else ("removed", "freed")
    print_text(table(("", *verbs, "kept", "size"), rows))
    for each in found:
        if each.kind == "environments" and each.reason:
            print_text(f"  environment of {each.name}: {each.reason}, {size(each.size)}")
