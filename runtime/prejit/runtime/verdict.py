"""The verdict on a machine: which axes match a requirement, and which do not."""

from __future__ import annotations

from prejit.runtime.records import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """The comparison of one property of a machine with a requirement.

    Attributes:
        name: the name of the property, as `machine.compare` lists them.
        rule: `equal`, `subset`, `at least`, `information`.
        needed, found: the two values as text.
        matches: whether the found value meets the requirement.
    """

    name: str
    rule: str
    needed: str
    found: str
    matches: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a requirement with a machine.

    Attributes:
        target: the name of the target that has the requirement.
        axes: every axis that the requirement has a value for.
    """

    target: str
    axes: tuple[Axis, ...]

    @property
    def matches(self) -> bool:
        """Return whether the target's executables run on the machine."""
        return all(axis.matches for axis in self.axes)

    @property
    def mismatches(self) -> tuple[Axis, ...]:
        """Return the axes that do not match."""
        return tuple(axis for axis in self.axes if not axis.matches)

    @property
    def distance(self) -> tuple[bool, int]:
        """Return a sort key: targets of the machine's own platform come first, then fewer mismatches."""
        wrong = self.mismatches
        return any(axis.name == "platform" for axis in wrong), len(wrong)

    def reason(self) -> str:
        """Return why the target does not fit, in one line: each mismatch with both values."""
        return "; ".join(f"{a.name}: needs {a.needed}, found {a.found}" for a in self.mismatches)
