"""What the kernel says of this process (Linux, proc(5)), and how it shall start."""

from __future__ import annotations

import os
import sys
import threading
import time


def is_plain_start() -> bool:
    """Whether `PREJIT_PLAIN_START` is set: a start then does what it must, one thing after the other.

    For whoever suspects that something done to start sooner gets in the way of the host program.
    """
    return bool(os.environ.get("PREJIT_PLAIN_START"))


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
