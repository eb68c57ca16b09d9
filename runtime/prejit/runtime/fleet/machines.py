"""Read the fingerprints of many machines."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from prejit.runtime.errors import PrejitError, StoreError, UsageError
from prejit.runtime.machine.fingerprint import Fingerprint

MAX_STEPS = 5_000
"""Of the search for the fewest targets of one jaxlib and plugin: some tenths of a second."""
MAX_DEPTH = 200
"""Of the same search: Python's stack is finite."""
WIDTH = 60
"""Of one side of a reason."""
_INFORMATION = ("cpu_model", "cpu_count", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine of a fleet.

    Attributes:
        name: of its file, below the fleet's directory and without `.json`.
        path: of its file.
        fingerprint: what it is.
    """

    name: str
    path: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file of a fleet, or a directory in it, that gives no fingerprint.

    Attributes:
        path: of it.
        why: what is wrong with it, in one sentence that names it.
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


def few(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def read_fleet(directory: str | os.PathLike[str]) -> Fleet:
    """Return the machines of every *.json in a directory and below it, and what could not be read.

    Raises:
        StoreError: the directory cannot be read, or none of its files.
        UsageError: it holds no such file.
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
    """Return the error for files that could not be read; it names all of them.

    Args:
        unreadable: those, at least one.
        total: how many files the fleet has.
    """
    reasons = "".join(f"\n  {file.why}" for file in unreadable)
    return StoreError(
        f"expected {total} fingerprints, found {len(unreadable)} that cannot be read:{reasons}",
        hint="write them again with `prejit fingerprint > FILE`, or move them elsewhere",
    )


def merge(machines: Iterable[Machine]) -> list[tuple[Machine, ...]]:
    """Machines that no rule tells apart, together."""
    axes = [f.name for f in fields(Fingerprint) if f.name not in _INFORMATION]
    found: dict[tuple[Any, ...], list[Machine]] = defaultdict(list)
    for machine in machines:
        found[tuple(getattr(machine.fingerprint, axis) for axis in axes)].append(machine)
    return [tuple(merged) for merged in found.values()]


def is_release(version: str) -> bool:
    """Whether a manifest takes it for `jax`."""
    return re.fullmatch(r"\d+(\.\d+){1,3}", version) is not None
