"""Facts about this process: from the Linux kernel (proc(5)), when it imported what, and how it starts."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prejit.runtime.errors import UsageError


class Span(NamedTuple):
    """A time that a thread spent on one part of a start, by `time.perf_counter`.

    `part`: `imports`, `reading`, `verification` or `loading`; `start_report` says what they mean.
    """

    part: str
    thread: int
    start: float
    end: float


def span(part: str, start: float) -> Span:
    """Return what the calling thread has done from `start` until now."""
    return Span(part, threading.get_ident(), start, time.perf_counter())


class LoadTimes(NamedTuple):
    """Times and sizes of `load`, from its call until it makes the Bundle.

    Attributes:
        started: when it was called, by time.perf_counter.
        is_first: whether it was the first call in this process.
        reads: when it read the index, manifests, configs and kernels.
        hashed_bytes: size of the files to be verified.
        receipt_bytes: size of the files with a receipt.
        verity_bytes: size of the files that the kernel verifies by fs-verity.
    """

    started: float
    is_first: bool
    reads: tuple[Span, ...]
    hashed_bytes: int
    receipt_bytes: int
    verity_bytes: int


_IMPORT_SECONDS = 1e-4
"""An import that takes less is not noted. One of a module that is there already takes a microsecond."""

imports: list[Span] = []
"""When threads imported what takes long. It belongs to the process, because modules do."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Add the time of this block to `imports`, unless its modules were imported before.

    Not for code that runs with every request: `imports` would grow.
    """
    started = time.perf_counter()
    try:
        yield
    finally:
        if time.perf_counter() - started > _IMPORT_SECONDS:
            imports.append(span("imports", started))


THREADS = "PREJIT_THREADS"
"""Environment variable with the maximum number of threads that native kernels may use."""


def is_plain_start() -> bool:
    """Return whether `PREJIT_PLAIN_START` is set. A start then takes no measures to be quick.

    The variable helps to find out whether such a measure disturbs the host program.
    """
    return bool(os.environ.get("PREJIT_PLAIN_START"))


def kernel_threads(root: str = "/") -> int:
    """Return how many threads native kernels use, including the calling one: at least 1.

    It is the smallest of three numbers: the CPUs that this process may run on, the CPU quota of its control
    groups, and `PREJIT_THREADS`. A quota is rounded down, because all threads wait for a helper that the
    quota stops in the middle of its share. `root` holds `proc` and `sys`.

    Raises:
        UsageError: PREJIT_THREADS is not an integer of at least 1.
    """
    most = cpus(root)
    text = os.environ.get(THREADS, "")
    if text:
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text, re.ASCII):
            raise UsageError(
                f"{THREADS}: expected an integer of at least 1, found {text!r:.80}",
                hint="unset it for as many threads as this process has CPUs",
            )
        most = min(most, int(text))
    return most


def cpus(root: str = "/") -> int:
    """Return how many CPUs this process may use at a time, by its affinity and its control groups' quotas.

    It is at least 1. `root` is the directory that holds `proc` and `sys`.
    """
    affinity: int = len(os.sched_getaffinity(0))
    return max(1, min([affinity, *map(int, _cpu_quotas(root))]))


def _cpu_quotas(root: str) -> Iterator[float]:
    """Yield the CPU quota of each control group of this process that has one (cgroups(7))."""
    for directory, is_second in control_groups(root, "cpu"):
        files = ("cpu.max",) if is_second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(text_of(os.path.join(directory, name)) for name in files).split()
        # `max 100000` and `-1 100000` mean that there is no limit.
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            yield int(words[0]) / int(words[1])


def control_groups(root: str, limited: str) -> Iterator[tuple[str, bool]]:
    """Yield the control groups of this process in each hierarchy that may limit something, inner ones first.

    `limited`: the controller: cpu or memory. Each comes as its directory, and whether its hierarchy is of
    version 2.
    """
    groups = dict[str, str]()
    for line in text_of(os.path.join(root, "proc/self/cgroup")).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        groups.update(dict.fromkeys(controllers.split(","), path))
    for line in text_of(os.path.join(root, "proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        place, mount = before.split(" "), after.split(" ")
        if len(place) < 5 or len(mount) < 3:
            continue
        is_second = mount[0] == "cgroup2"
        if not is_second and (mount[0] != "cgroup" or limited not in mount[2].split(",")):
            continue
        # A container sees only the hierarchy below `top`, which may be the group itself.
        top, at = place[3].rstrip("/"), place[4].strip("/")
        group, mounted_at = groups.get("" if is_second else limited, ""), os.path.join(root, at)
        inside = group[len(top) :] if f"{group}/".startswith(f"{top}/") else ""
        directory = mounted_at + inside.rstrip("/")
        while True:
            yield directory, is_second
            if len(directory) <= len(mounted_at):
                break
            directory = os.path.dirname(directory)


def text_of(path: str) -> str:
    """Return the content of a file of the kernel; empty if there is no such file."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def is_alone(ours: str = "") -> bool:
    """Return whether the calling thread is the main thread and no other thread runs Python, but `ours`.

    prejit changes settings of the whole process only then, because other threads belong to the host program.
    """
    current = threading.current_thread()
    known = {each.ident for each in threading.enumerate() if each is current or each.name == ours}
    return current is threading.main_thread() and sys._current_frames().keys() <= known


def thread_count() -> int:
    """Return the number of this process's threads, including those that do not run Python."""
    return len(os.listdir("/proc/self/task"))


SYSTEM_POLICY = Path("/etc/prejit/trust.toml")
"""The policy of the machine. It always applies: no argument and no variable can loosen it."""

TRUST_VARIABLE = "PREJIT_TRUST"
"""The environment variable with the policies of a process, separated by colons as in PATH."""


def policy_paths(trust: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Return the files of all policies that apply, `trust` last. Each can refuse what the others allow."""
    paths = [os.fspath(SYSTEM_POLICY)]
    try:
        os.lstat(SYSTEM_POLICY)
    except (FileNotFoundError, NotADirectoryError):
        paths = []
    except OSError:  # there may be one, so reading it must fail
        pass
    paths += filter(None, os.environ.get(TRUST_VARIABLE, "").split(os.pathsep))
    if trust is not None:
        paths.append(os.fspath(trust))
    return tuple(dict.fromkeys(paths))


def seconds_since_exec() -> float:
    """Return the seconds since this process was started; the kernel counts in steps of 10 ms."""
    return time.perf_counter() - exec_time()


def exec_time() -> float:
    """Return when this process was started, by `time.perf_counter`, or up to 10 ms before that."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    started = ticks / os.sysconf("SC_CLK_TCK")
    # One clock right after the other: on a busy machine, to read a file between them can take 20 ms.
    return time.perf_counter() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)
