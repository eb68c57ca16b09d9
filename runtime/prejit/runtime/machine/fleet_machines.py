"""The machines of a fleet: read their fingerprints, and group those that load the same target."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from textwrap import shorten
from typing import Any

from prejit.runtime.errors import PrejitError, StoreError, UsageError
from prejit.runtime.machine.compare import compare, preference
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.verdict import Axis, Verdict

_INFORMATION = ("cpu_model", "cpu_count", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine of a fleet.

    Attributes:
        name: the path of its file below the fleet's directory, without `.json`.
        path: the path of its file.
        fingerprint: what the machine is.
    """

    name: str
    path: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file or directory of a fleet that could not be read.

    Attributes:
        path: its path.
        why: what is wrong with it, in one sentence that names the path.
    """

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a fleet's directory holds.

    Attributes:
        machines: sorted by name.
        unreadable: sorted by path.
    """

    machines: tuple[Machine, ...]
    unreadable: tuple[Unreadable, ...] = ()


def read_fleet(directory: str | os.PathLike[str]) -> Fleet:
    """Read every *.json in a directory and below it.

    Raises:
        StoreError: the directory, or every file in it, cannot be read.
        UsageError: it holds no *.json file.
    """
    root = os.fspath(directory)
    unreadable: list[Unreadable] = []

    def note(error: OSError) -> None:
        failed = StoreError(
            f"{error.filename}: cannot read a fleet: {error.strerror}",
            hint="give a directory of files that `prejit fingerprint > FILE` wrote",
        )
        if error.filename == root:
            raise failed from error
        unreadable.append(Unreadable(str(error.filename), str(failed)))

    paths = [
        os.path.join(at, file)
        for at, _, files in os.walk(root, onerror=note)
        for file in files
        if file.endswith(".json")
    ]
    machines: list[Machine] = []
    for path in sorted(paths):
        try:
            found = Fingerprint.read(path)
        except PrejitError as error:
            unreadable.append(Unreadable(path, str(error)))
        else:
            name = os.path.relpath(path, root).removesuffix(".json")
            machines.append(Machine(name, path, found))
    unreadable.sort(key=lambda file: file.path)
    if not paths and not unreadable:
        raise UsageError(
            f"{root}: expected fingerprints (*.json), found none",
            hint="run `prejit fingerprint > NAME.json` on each machine",
        )
    if not machines:
        raise unread(unreadable, len(unreadable))
    return Fleet(tuple(machines), tuple(unreadable))


def unread(unreadable: Sequence[Unreadable], total: int) -> StoreError:
    """Return the error that names all files that could not be read."""
    reasons = "".join(f"\n  {file.why}" for file in unreadable)
    return StoreError(
        f"expected {total} fingerprints, found {len(unreadable)} that cannot be read:{reasons}",
        hint="write them again with `prejit fingerprint > FILE`, or move them elsewhere",
    )


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


def is_release(version: str) -> bool:
    """Whether a version is a release, which is what a manifest accepts for `jax`."""
    return re.fullmatch(r"\d+(\.\d+){1,3}", version) is not None


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
