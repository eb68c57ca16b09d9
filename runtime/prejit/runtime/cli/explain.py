"""`prejit explain`: which target a machine loads, or each machine of a fleet."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from prejit.runtime.base.tables import table
from prejit.runtime.cli.options import BUNDLE, DIR, FINGERPRINT, JSON, check_one, on_mismatch, page
from prejit.runtime.cli.output import print_json, print_text, write_text
from prejit.runtime.errors import UsageError
from prejit.runtime.format.checks.oci import target_of
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import BUNDLE_NAME
from prejit.runtime.format.opening import match
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.verdict import Axis, Verdict

if TYPE_CHECKING:
    from prejit.runtime.fleet.report import FleetReport


@click.command(
    epilog="Examples:\n\n\b\n  prejit explain artifacts/demo\n"
    "  prejit explain artifacts/demo --fingerprint web-3.json\n"
    "  prejit explain artifacts/demo --fleet fleet --page fleet.html --on-mismatch error\n\n"
    "Exit status: 3 no target fits."
)
@BUNDLE
@FINGERPRINT
@click.option(
    "--fleet",
    **DIR,
    help="Compare with every fingerprint in DIR and below: which target serves which machine, and the fewest "
    "targets to add so that none falls back.",
)
@page("With --fleet: write the report as an HTML page.")
@on_mismatch("With --fleet, error: exit 3 where a machine falls back to compiling.")
@JSON
def explain(
    path: str,
    fingerprint: str | None,
    fleet: str | None,
    page: str | None,
    on_mismatch: str,
    as_json: bool,
) -> int:
    """Compare each target with this machine, axis by axis."""
    check_one({"--fingerprint": fingerprint, "--fleet": fleet})
    if fleet is not None:
        return _explain_fleet(path, fleet, page, on_mismatch == "error", as_json)
    if page is not None:
        raise UsageError("--page: expected --fleet DIR as well, found none")
    machine = Fingerprint.current() if fingerprint is None else Fingerprint.read(fingerprint)
    with Layout(path) as layout:
        targets = match(read_root(layout), machine)
    chosen = next((target.name for target in targets if target.verdict.matches), None)
    if as_json:
        print_json(
            {
                "target": chosen,
                "verdicts": [{"matches": t.verdict.matches, **asdict(t.verdict)} for t in targets],
            }
        )
        return 0 if chosen else 3
    rows = [
        (target.name, a.name, a.rule, "yes" if a.matches else "NO", a.needed, a.found)
        for target in targets
        for a in _telling_axes(target.verdict)
    ]
    print_text(table(["target", "axis", "rule", "fits", "needed", "found"], rows))
    where = "this machine" if fingerprint is None else f"the machine of {fingerprint}"
    if chosen:
        print_text(f"\n{where} loads {chosen}: nothing is compiled")
        return 0
    print_text(f"\n{where} is none of the targets: every program would be compiled there")
    return 3


def _telling_axes(verdict: Verdict) -> tuple[Axis, ...]:
    """Return the axes to show: only `platform` where that differs, since the others follow from it."""
    return tuple(a for a in verdict.axes if a.name == "platform" and not a.matches) or verdict.axes


def _explain_fleet(
    path: str, directory: str, page: str | None, must_match: bool, as_json: bool
) -> int:
    """Print which target each machine of a fleet loads, and the fewest targets to add for the rest."""
    from prejit.runtime.fleet.machines import read_fleet, unread
    from prejit.runtime.fleet.report import explain_fleet

    with Layout(path) as layout:
        root = read_root(layout)
        targets = [target_of(descriptor, root.path) for descriptor in root.bundle.manifests]
    fleet = read_fleet(directory)
    report = explain_fleet(targets, fleet.machines, fleet.unreadable)
    if page is not None:
        from prejit.runtime.pages.fleet import fleet_page

        write_text(
            page,
            fleet_page(root.bundle.annotations[BUNDLE_NAME], root.digest, directory, report),
        )
    if as_json:
        print_json(report.described())
    else:
        print_text(_fleet_text(report))
    if fleet.unreadable:
        sys.stdout.flush()  # the report comes before the error
        raise unread(fleet.unreadable, len(fleet.machines) + len(fleet.unreadable))
    return 3 if must_match and report.fallen_back else 0


def _fleet_text(report: FleetReport) -> str:
    """Return the report of a fleet as text for a terminal."""
    from prejit.runtime.fleet.groups import few

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
        return "\n\n".join([*parts, f"all {total} machines load a target: nothing is compiled"])
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
