"""Machines of a fleet grouped by what they load and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

from prejit.runtime.verdict import Axis


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
            f"{a.name}: needs {shorten(a.needed, WIDTH, placeholder=' ...')}, "
            f"found {shorten(a.found, WIDTH, placeholder=' ...')}"
            for a in self.mismatches
        )


def group_machines(found: dict[tuple[str, tuple[Axis, ...]], list[str]]) -> tuple[Group, ...]:
    """Return machines grouped by target and mismatches, the largest groups first."""
    groups = [Group(target, why, tuple(sorted(names))) for (target, why), names in found.items()]
    return tuple(sorted(groups, key=lambda g: (bool(g.mismatches), -len(g.machines), g.machines)))


WIDTH = 60
"""Maximum characters of each value in a reason."""


def few(names: Sequence[str], most: int = 3) -> str:
    """Return the first names and the number of further ones."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
