"""The page of a fleet: which target each machine loads, and what stands in the way of the others."""

from __future__ import annotations

from prejit.compiler.fleet.fleet_report import FleetReport
from prejit.compiler.fleet.groups import few
from prejit.compiler.pages.render import render


def fleet_page(bundle: str, digest: str, fleet: str, report: FleetReport) -> str:
    """Return the page as HTML.

    Args:
        bundle: the name of the bundle.
        digest: the digest of the bundle.
        fleet: the directory of fingerprints.
        report: the report of the fleet.
    """
    # Columns in the order of `compare`; the target with the most axes gives the longest list first.
    axes: dict[str, None] = {}
    for _, verdict in sorted(report.verdicts, key=lambda item: -len(item[1].axes)):
        axes.update(dict.fromkeys(axis.name for axis in verdict.axes))
    return render(
        "fleet.html",
        bundle=bundle,
        digest=digest,
        fleet=fleet,
        report=report,
        total=len(report.verdicts),
        advice=report.advice() if report.additions else "",
        axes=tuple(axes),
        machines=[
            (machine, verdict, {axis.name: axis.matches for axis in verdict.axes})
            for machine, verdict in report.verdicts
        ],
        few=few,
    )
