"""The memory of this process and its age, from the Linux kernel (proc(5))."""

from __future__ import annotations

import os
import sys
import time

from prejit.runtime.base.process_facts import control_groups, text_of


def free_memory_bytes(root: str = "/") -> int:
    """Return how much memory this process can still take, by the kernel and by its control groups' limits.

    `root` is the directory that holds `proc` and `sys`. Pages of files that nobody has used for long count as
    free, because the kernel drops them before it fails (proc_meminfo(5), cgroups(7)).
    """
    left = [sys.maxsize]  # a kernel that does not say
    for line in text_of(os.path.join(root, "proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            left.append(int(line.split()[1]) << 10)
    for directory, is_second in control_groups(root, "memory"):
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if is_second
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, used = (text_of(os.path.join(directory, name)).strip() for name in names[:2])
        words = text_of(os.path.join(directory, "memory.stat")).split()
        unused = words[words.index(names[2]) + 1] if names[2] in words else "0"
        if limit.isdecimal() and used.isdecimal() and unused.isdecimal():  # else there is no limit
            left.append(max(0, int(limit) - int(used) + int(unused)))
    return min(left)


def seconds_since_exec() -> float:
    """Return the seconds since this process was started; the kernel counts in steps of 10 ms."""
    started = _started()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def exec_time() -> float:
    """Return when this process was started, by `time.perf_counter`, or up to 10 ms before that."""
    started = _started()
    # One clock right after the other: on a busy machine, to read a file between them can take 20 ms.
    return time.perf_counter() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def _started() -> float:
    """Return when this process was started, in seconds since the boot."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_memory_bytes() -> int:
    """Return the peak resident memory, mapped files included.

    The peak of getrusage would begin with the memory of the parent when it started this process.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))


def private_memory_bytes() -> int:
    """Return the resident memory that no other process shares."""
    with open("/proc/self/smaps_rollup", encoding="ascii", errors="replace") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))


def host_memory_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def host_memory_limit_bytes(root: str = "/") -> int:
    """Return how much memory this process may use: the limit of its container, or the machine's memory.

    Args:
        root: the directory that holds `sys`. A container sees its own limit there.
    """
    limit: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups 2 and 1
        text = text_of(os.path.join(root, "sys/fs/cgroup", path)).strip()
        if text.isdecimal():  # and not `max`
            limit = min(limit, int(text))
    return limit
