"""Control groups that limit the processes of a row: their memory, or the speed of their disk.

RLIMIT_AS and RLIMIT_DATA are no substitute for a limit of memory: they do not count the pages of mapped
files, which are most of a start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class NoControlGroupError(Exception):
    """This machine has no control group that the benchmark may use; the text says why."""


@dataclass(frozen=True)
class Resource:
    """A resource that a control group limits, and the files that set the limit.

    Attributes:
        name: name of the controller in version 2, and in messages.
        setting: name of the file of a group in version 2 that holds the limit.
        old_name: name of the hierarchy in version 1.
        old_setting: name of the file of a group in version 1.
    """

    name: str
    setting: str
    old_name: str
    old_setting: str


MEMORY = Resource("memory", "memory.max", "memory", "memory.limit_in_bytes")
DISK_READS = Resource("io", "io.max", "blkio", "blkio.throttle.read_bps_device")


@dataclass(frozen=True)
class Controller:
    """A hierarchy of control groups.

    Attributes:
        name: its name in reports.
        root: directory in which groups are made.
        setting: name of the file of a group that holds the limit.
    """

    name: str
    root: Path
    setting: str


def controllers(resource: Resource) -> list[Controller]:
    """Return the controllers of a resource on a machine, version 2 first."""
    found = []
    for root in (CGROUPS, CGROUPS / "unified"):
        enabled = root / "cgroup.subtree_control"
        if enabled.is_file() and resource.name in enabled.read_text().split():
            found.append(Controller("cgroup v2", root, resource.setting))
    old = CGROUPS / resource.old_name
    if (old / resource.old_setting).is_file():
        found.append(Controller("cgroup v1", old, resource.old_setting))
    return found


@dataclass(frozen=True)
class Group:
    """A control group of this benchmark."""

    controller: Controller
    path: Path

    def limit_memory(self, size: int) -> None:
        """Set the limit of memory in bytes, and forget pages that earlier processes left.

        Raises:
            OSError: the kernel refuses the limit.
        """
        for name in ("memory.force_empty", "memory.reclaim"):  # version 1, version 2
            if (self.path / name).exists():
                with contextlib.suppress(OSError):  # EAGAIN: less was there to reclaim
                    (self.path / name).write_text("0" if name.endswith("empty") else str(1 << 40))
        (self.path / self.controller.setting).write_text(str(size))

    def limit_reads(self, device: str, bytes_per_second: int) -> None:
        """Limit how fast processes of the group read a disk.

        Args:
            device: number of the whole disk, such as `254:0`.
            bytes_per_second: the limit.

        Raises:
            OSError: the kernel refuses the limit.
        """
        key = "rbps=" if self.controller.setting == DISK_READS.setting else ""
        line = f"{device} {key}{bytes_per_second}"
        (self.path / self.controller.setting).write_text(line)

    def command(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return a command line that enters this group, then becomes `command`."""
        enter = f'echo $$ > {self.path}/cgroup.procs && exec "$@"'
        return ("/bin/sh", "-c", enter, "sh", *command)


@contextlib.contextmanager
def group(resource: Resource) -> Iterator[Group]:
    """Make a control group for a resource, and remove it at the end.

    Raises:
        NoControlGroupError: none can be made.
    """
    reasons = []
    for controller in controllers(resource):
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
    why = "; ".join(reasons) or f"no controller in {CGROUPS}"
    raise NoControlGroupError(f"no control group for {resource.name}: {why}")
