"""Explain which target of a bundle each machine of a fleet loads, as data and as a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prejit.compiler.fleet.machine_groups import Group, closest, group_machines, merge
from prejit.compiler.fleet.missing_targets import Addition, Build, cover_machines
from prejit.compiler.pages import render
from prejit.compiler.targets.target_classes import GpuTable
from prejit.runtime.base.wording import few
from prejit.runtime.machine.fingerprint import Requirement
from prejit.runtime.machine.fleet_machines import Machine, Unreadable
from prejit.runtime.verdict import Axis, Verdict


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Which target each machine of a fleet loads, and which targets to add.

    Attributes:
        verdicts: each machine with the verdict of the target that it loads, or else of the closest one.
        serves: the number of machines that load each target, in the order of the bundle.
        groups: machines by verdict; groups that load a target come first, large ones before small ones.
        additions: the targets to add so that no machine falls back, except those in `beyond_help`.
        is_fewest: whether no smaller number of targets would do.
        beyond_help: machines that no added target serves, by the axes that do not match.
        unreadable: files of the fleet that could not be read.
    """

    verdicts: tuple[tuple[Machine, Verdict], ...]
    serves: dict[str, int]
    groups: tuple[Group, ...]
    additions: tuple[Addition, ...]
    is_fewest: bool
    beyond_help: tuple[Group, ...]
    unreadable: tuple[Unreadable, ...] = ()

    @property
    def fallen_back(self) -> int:
        """The number of machines that load no target."""
        return len(self.verdicts) - sum(self.serves.values())

    def advice(self) -> str:
        """Return what to do with the additions, in one sentence."""
        count = f"{len(self.additions)} target{'s' * (len(self.additions) > 1)}"
        rest = " except those at the end" if self.beyond_help else ""
        how = "the fewest there can be" if self.is_fewest else "found greedily, fewer may do"
        others = sorted({a.requirement.architecture for a in self.additions if a.is_elsewhere})
        where = (
            f", those for {' and '.join(others)} on a build host of that architecture"
            if others
            else ""
        )
        return f"add {count} ({how}){where}; then no machine{rest} falls back"

    def described(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return {
            "machines": len(self.verdicts),
            "fallen_back": self.fallen_back,
            "serves": self.serves,
            "groups": [asdict(group) for group in self.groups],
            "add": [
                {
                    "table": {
                        k: asdict(v) if isinstance(v, GpuTable) else v for k, v in a.table.items()
                    },
                    "toml": a.toml(),
                    "needs": a.needs(),
                    "machines": a.machines,
                }
                for a in self.additions
            ],
            "is_fewest": self.is_fewest,
            "beyond_help": [asdict(group) for group in self.beyond_help],
            "unreadable": [asdict(file) for file in self.unreadable],
        }


def explain_fleet(
    targets: Sequence[tuple[str, Requirement]],
    machines: Sequence[Machine],
    unreadable: Sequence[Unreadable] = (),
) -> FleetReport:
    """Return which target each machine loads, and which targets to add so that none falls back."""
    classes = merge(machines)
    verdicts: dict[str, Verdict] = {}
    groups: dict[tuple[str, tuple[Axis, ...]], list[str]] = defaultdict(list)
    serves = {name: 0 for name, _ in targets}
    helpless = []
    for merged in classes:
        verdict = closest(targets, merged[0].fingerprint)
        verdicts.update((machine.name, verdict) for machine in merged)
        groups[verdict.target, verdict.mismatches].extend(machine.name for machine in merged)
        if verdict.matches:
            serves[verdict.target] += len(merged)
        else:
            helpless.append(merged)
    additions, is_fewest, beyond_help = cover_machines(helpless, Build.of(targets))
    return FleetReport(
        verdicts=tuple((machine, verdicts[machine.name]) for machine in machines),
        serves=serves,
        groups=group_machines(groups),
        additions=additions,
        is_fewest=is_fewest,
        beyond_help=beyond_help,
        unreadable=tuple(unreadable),
    )


def fleet_page(bundle: str, digest: str, fleet: str, report: FleetReport) -> str:
    """Return the page as HTML."""
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
