"""What the kernel says of this process (Linux, proc(5)), and how it shall start."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator

from prejit.runtime.errors import UsageError

THREADS = "PREJIT_THREADS"
"""The variable with the most threads that kernels may use."""


def is_plain_start() -> bool:
    """Whether `PREJIT_PLAIN_START` is set: a start then does what it must, one thing after the other.

    For whoever suspects that something done to start sooner gets in the way of the host program.
    """
    return bool(os.environ.get("PREJIT_PLAIN_START"))


def kernel_threads(root: str = "/") -> int:
    """How many threads native kernels use, the calling one among them: at least 1.

    The least of the CPUs that this process may run on, the CPUs whose time its control groups may take, and
    `PREJIT_THREADS`. Part of a CPU counts for none: a helper that is stopped in the middle of its share lets
    all others wait for it.

    Args:
        root: the directory that `proc` and `sys` are in.

    Raises:
        UsageError: PREJIT_THREADS is not an integer of at least 1.
    """
    most: int = len(os.sched_getaffinity(0))
    text = os.environ.get(THREADS, "")
    if text:
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text, re.ASCII):
            raise UsageError(
                f"{THREADS}: expected an integer of at least 1, found {text!r:.80}",
                hint="unset it for as many threads as this process has CPUs",
            )
        most = min(most, int(text))
    return max(1, min([most, *map(int, _cpu_quotas(root))]))


def _cpu_quotas(root: str) -> Iterator[float]:
    """The CPUs whose time each control group of this process may take, where it has a limit (cgroups(7))."""
    for directory, mounted_at, files in _cpu_groups(root):
        while True:
            words = " ".join(_text_of(os.path.join(directory, name)) for name in files).split()
            # `max 100000` and `-1 100000` are no limit.
            if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
                yield int(words[0]) / int(words[1])
            if len(directory) <= len(mounted_at):
                break
            directory = os.path.dirname(directory)


def _cpu_groups(root: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """This process's group in each hierarchy that limits CPUs.

    Yields:
        Its directory, the directory that the hierarchy is mounted at, and the files of a group that have
        microseconds and the period in which they may be taken.
    """
    groups = dict[str, str]()
    for line in _text_of(os.path.join(root, "proc/self/cgroup")).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        groups.update(dict.fromkeys(controllers.split(","), path))
    for line in _text_of(os.path.join(root, "proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        place, mount = before.split(" "), after.split(" ")
        if len(place) < 5 or len(mount) < 3:
            continue
        controller = ""
        files: tuple[str, ...] = ("cpu.max",)
        if mount[0] == "cgroup" and "cpu" in mount[2].split(","):
            controller, files = "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        elif mount[0] != "cgroup2":
            continue
        # A container sees a part of the hierarchy: that below `top`, which may be the group itself.
        top, at = place[3].rstrip("/"), place[4].strip("/")
        group, mounted_at = groups.get(controller, ""), os.path.join(root, at)
        inside = group[len(top) :] if f"{group}/".startswith(f"{top}/") else ""
        yield mounted_at + inside.rstrip("/"), mounted_at, files


def _text_of(path: str) -> str:
    """What a file of the kernel says; nothing where there is none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def is_alone() -> bool:
    """Whether the calling thread is this process's main thread, and no other one runs Python.

    What is set for the whole process is set only then: other threads belong to the host program.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and len(sys._current_frames()) == 1


def thread_count() -> int:
    """How many threads the kernel knows of in this process, those without Python among them."""
    return len(os.listdir("/proc/self/task"))


def seconds_since_exec() -> float:
    """Seconds since this process was started, as the kernel counts them (in steps of 10 ms)."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_memory_bytes() -> int:
    """The most memory that was ever resident, mapped files included.

    Not getrusage's: that one begins with what the parent had when it started this process.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))


def private_memory_bytes() -> int:
    """Resident memory that no other process shares."""
    with open("/proc/self/smaps_rollup", encoding="ascii", errors="replace") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))
