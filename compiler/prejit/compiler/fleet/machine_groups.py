"""Group the machines of a fleet that are alike, or that load the same target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from textwrap import shorten
from typing import Any

from prejit.runtime.machine.compare import compare, preference
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.machine.fleet_machines import Machine
from prejit.runtime.verdict import Axis, Verdict

_INFORMATION = ("cpu_model", "cpu_count", "memory_bytes")


def merge(machines: Iterable[Machine]) -> list[tuple[Machine, ...]]:
    """Group machines whose fingerprints differ only in information that no rule compares."""
    axes = [f.name for f in fields(Fingerprint) if f.name not in _INFORMATION]
    found: dict[tuple[Any, ...], list[Machine]] = defaultdict(list)
    for machine in machines:
        found[tuple(getattr(machine.fingerprint, axis) for axis in axes)].append(machine)
    return [tuple(merged) for merged in found.values()]


def closest(targets: Iterable[tuple[str, Requirement]], machine: Fingerprint) -> Verdict:
    """Return the verdict of the target that `load` would choose on a machine, or of the closest one.

    Each target has its name and what it needs; there is one at least.
    """
    ranked = sorted(targets, key=lambda target: preference(target[1], machine))
    verdicts = [compare(name, needs, machine) for name, needs in ranked]
    return min(verdicts, key=lambda verdict: verdict.distance)


@dataclass(frozen=True, slots=True)
class Group:
    """Machines with the same verdict.

    Attributes:
        target: the target that they load, or else the closest one.
        mismatches: the axes that keep them from loading it; empty: they load it.
        machines: their names.
    """

    target: str
    mismatches: tuple[Axis, ...]
    machines: tuple[str, ...]

    def reason(self) -> str:
        """Return why the machines do not load the target, with long values cut; empty: they load it."""
        return "; ".join(
            f"{a.name}: needs {shorten(a.needed, _WIDTH, placeholder=' ...')}, "
            f"found {shorten(a.found, _WIDTH, placeholder=' ...')}"
            for a in self.mismatches
        )


def group_machines(found: dict[tuple[str, tuple[Axis, ...]], list[str]]) -> tuple[Group, ...]:
    """Return machines grouped by target and mismatches, the largest groups first."""
    groups = [Group(target, why, tuple(sorted(names))) for (target, why), names in found.items()]
    return tuple(sorted(groups, key=lambda g: (bool(g.mismatches), -len(g.machines), g.machines)))


_WIDTH = 60
"""Maximum characters of each value in a reason."""
