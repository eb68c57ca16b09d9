"""`prejit fleet`: which target each machine of a fleet loads."""

from __future__ import annotations

import sys

import click

from prejit.compiler.fleet.fleet_page import fleet_page
from prejit.compiler.fleet.fleet_report import FleetReport, explain_fleet
from prejit.compiler.fleet.groups import few
from prejit.compiler.fleet.machines import read_fleet, unread
from prejit.runtime.base.text_table import table
from prejit.runtime.cli.command_options import BUNDLE, DIR, JSON, on_mismatch, page
from prejit.runtime.cli.output import print_json, print_text, write_text
from prejit.runtime.format.checks.oci import target_of
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import BUNDLE_NAME
from prejit.runtime.format.root import read_root


@click.command(
    epilog="Examples:\n\n\b\n  prejit fleet artifacts/demo machines\n"
    "  prejit fleet artifacts/demo machines --page fleet.html --on-mismatch error\n\n"
    "Exit status: 3 with --on-mismatch error, where a machine falls back to compiling."
)
@BUNDLE
@click.argument("directory", **DIR, help="Directory of fingerprints; those below it count too.")
@page("Write the report as an HTML page.")
@on_mismatch("With error: exit 3 where a machine falls back to compiling.")
@JSON
def fleet(path: str, directory: str, page: str | None, on_mismatch: str, as_json: bool) -> int:
    """Print which target each machine of a fleet loads, and the fewest targets to add for the rest."""
    with Layout(path) as layout:
        root = read_root(layout)
        targets = [target_of(descriptor, root.path) for descriptor in root.bundle.manifests]
    found = read_fleet(directory)
    report = explain_fleet(targets, found.machines, found.unreadable)
    if page is not None:
        write_text(
            page,
            fleet_page(root.bundle.annotations[BUNDLE_NAME], root.digest, directory, report),
        )
    if as_json:
        print_json(report.described())
    else:
        print_text(_text(report))
    if found.unreadable:
        sys.stdout.flush()  # the report comes before the error
        raise unread(found.unreadable, len(found.machines) + len(found.unreadable))
    return 3 if on_mismatch == "error" and report.fallen_back else 0


def _text(report: FleetReport) -> str:
    """Return the report of a fleet as text for a terminal."""
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
