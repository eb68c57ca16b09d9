"""`prejit targets`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from prejit.runtime.cli.command_options import JSON
from prejit.runtime.cli.output import print_json

if TYPE_CHECKING:
    from prejit.compiler.targets.listing import Listed


@click.command(epilog="Examples:\n\n\b\n  prejit targets\n  prejit targets --json")
@JSON
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
        print_json({"targets": rows})
    else:
        _print_targets(listed)
    return 0


def _print_targets(listed: Sequence[Listed]) -> None:
    """Print a table for each platform; notes below, once each."""
    from prejit.runtime.base.text_table import size, table
    from prejit.runtime.machine.requirement import PLATFORMS

    heads = {
        "cpu": ("cpu", "architecture", "extensions", "loops for"),
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
                    f"{found.cpus} CPUs",
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
