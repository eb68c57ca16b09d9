"""A control group that limits the memory of processes, the page cache of what they read included.

RLIMIT_AS and RLIMIT_DATA are no substitute: they do not count the pages of mapped files, which are most of a
start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class NoMemoryLimitError(Exception):
    """This machine lets the benchmark limit no memory; the text says why."""


@dataclass(frozen=True)
class Controller:
    """A hierarchy of control groups that counts memory.

    Attributes:
        name: its name in reports.
        root: directory in which groups are made.
        limit: name of the file of a group's limit.
    """

    name: str
    root: Path
    limit: str


def controllers(cgroups: Path = CGROUPS) -> list[Controller]:
    """Return the memory controllers of a machine, version 2 first."""
    found = []
    for root in (cgroups, cgroups / "unified"):
        enabled = root / "cgroup.subtree_control"
        if enabled.is_file() and "memory" in enabled.read_text().split():
            found.append(Controller("cgroup v2", root, "memory.max"))
    if (cgroups / "memory" / "memory.limit_in_bytes").is_file():
        found.append(Controller("cgroup v1", cgroups / "memory", "memory.limit_in_bytes"))
    return found


@dataclass(frozen=True)
class Group:
    """A control group of this benchmark."""

    controller: Controller
    path: Path

    def limit(self, size: int) -> None:
        """Set the limit in bytes, and forget pages that earlier processes left."""
        for name in ("memory.force_empty", "memory.reclaim"):  # version 1, version 2
            if (self.path / name).exists():
                with contextlib.suppress(OSError):  # EAGAIN: less was there to reclaim
                    (self.path / name).write_text("0" if name.endswith("empty") else str(1 << 40))
        (self.path / self.controller.limit).write_text(str(size))

    def command(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return a command line that enters this group, then becomes `command`."""
        enter = f'echo $$ > {self.path}/cgroup.procs && exec "$@"'
        return ("/bin/sh", "-c", enter, "sh", *command)


@contextlib.contextmanager
def group() -> Iterator[Group]:
    """Make a control group for memory, and remove it at the end.

    Raises:
        NoMemoryLimitError: none can be made.
    """
    reasons = []
    for controller in controllers():
        path = controller.root / f"prejit-bench-{os.getpid()}"
        try:
            path.mkdir()
        except OSError as error:
            reasons.append(f"{path}: {error.strerror}")
            continue
        try:
            yield Group(controller, path)
        finally:
            with contextlib.suppress(OSError):  # a process that is still ending keeps it
                path.rmdir()
        return
    raise NoMemoryLimitError(
        "no control group for memory: " + ("; ".join(reasons) or f"no controller in {CGROUPS}")
    )
