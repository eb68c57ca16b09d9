"""The verdict on a machine: which axes match a requirement, and which do not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One line of a verdict.

    Attributes:
        name: of the axis, as `compare` lists them.
        rule: `equal`, `subset`, `at least`, `information`.
        needed, found: in words.
        matches: whether what was found satisfies what is needed.
    """

    name: str
    rule: str
    needed: str
    found: str
    matches: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a requirement with a fingerprint.

    Attributes:
        target: name of the target that has the requirement.
        axes: every axis, whether it matches or not.
    """

    target: str
    axes: tuple[Axis, ...]

    @property
    def matches(self) -> bool:
        """Whether the target's executables run on the machine."""
        return all(axis.matches for axis in self.axes)

    @property
    def mismatches(self) -> tuple[Axis, ...]:
        """The axes that do not match."""
        return tuple(axis for axis in self.axes if not axis.matches)

    @property
    def distance(self) -> tuple[bool, int]:
        """How far the target is from fitting: one of the machine's own platform is nearer than any other."""
        wrong = self.mismatches
        return any(axis.name == "platform" for axis in wrong), len(wrong)

    def reason(self) -> str:
        """Why the target does not fit, in one phrase: each axis, what was needed and what was found."""
        return "; ".join(f"{a.name}: needs {a.needed}, found {a.found}" for a in self.mismatches)
