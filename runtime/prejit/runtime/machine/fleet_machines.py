"""The machines of a fleet: read their fingerprints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from prejit.runtime.errors import PrejitError, StoreError, UsageError
from prejit.runtime.machine.fingerprint import Fingerprint


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
    """The contents of a fleet's directory.

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
