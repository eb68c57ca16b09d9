"""A start in parts: where the time went from the start of the process to the first result.

The stages of a start note spans, each with its thread. `split` gives every moment to one part only.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from prejit.runtime.base import process_facts
from prejit.runtime.base.process_facts import (
    LoadTimes,
    Span,
    cpus,
    is_plain_start,
    seconds_since_exec,
    text_of,
)
from prejit.runtime.machine.kept_files import cache_root
from prejit.runtime.programs.ready_programs import ProgramReport


@dataclass(frozen=True, slots=True)
class StartReport:
    """The time of a start in parts, from the start of the process to the first result.

    The first seven parts add up to `total_seconds`, which is time on a wall clock. They follow the thread
    that loads, and then the thread that gets the first result. What other threads do meanwhile counts only
    while this thread waits for it. If a part is inside another, such as an import while loading, the inner
    one has the time.

    A later `load` of the same process starts when it is called: it has no `process_seconds`.

    Attributes:
        process_seconds: from the start of the process to the first line of prejit: Python itself, and what
            the program did before it imported prejit. Up to 10 ms too long, because the kernel counts in
            steps of 10 ms.
        imports_seconds: importing prejit, NumPy, jaxlib and, if text is needed, the tokenizers package.
        reading_seconds: opening the bundle, reading its index, manifests and program table, and the part of
            the waiting for verification that was reading.
        verifying_seconds: the rest of the waiting for verification. It is divided as the work of all its
            threads was. Verification that nobody waits for costs nothing here.
        loading_seconds: the rest of `load`; making programs ready; placing weights; the tokenizer.
        first_run_seconds: from the beginning of the first request to its first token or result, without the
            parts above. If files with receipts or fs-verity are not in memory, programs read them here.
            It is 0 before the first result.
        other_seconds: what the program did itself before `load` and between `load` and the first request.
        total_seconds: from the start of the process to the first result.
        hashed_bytes: size of the files that this start verified, or still verifies.
        receipt_bytes: size of the files whose receipt made that unnecessary.
        verity_bytes: size of the files that the kernel verifies by fs-verity, when programs read them.
        hints: why a part was slow, for reasons that can be changed, and what to do.
    """

    process_seconds: float
    imports_seconds: float
    reading_seconds: float
    verifying_seconds: float
    loading_seconds: float
    first_run_seconds: float
    other_seconds: float
    total_seconds: float
    hashed_bytes: int
    receipt_bytes: int
    verity_bytes: int
    hints: tuple[str, ...] = ()


def split(
    times: LoadTimes,
    loaded: Span,
    asked: tuple[float, int] | None,
    answered: tuple[float, int] | None,
    spans: Sequence[Span],
    read_share: float,
) -> StartReport:
    """Return the parts of a start, without hints.

    Args:
        times: of the call of `load`.
        loaded: the same call.
        asked: when the first request began, and in which thread; None: there was none.
        answered: the same of its first result.
        spans: of all threads, without imports.
        read_share: the part of verification that was reading, 0 to 1.
    """
    began, spans = loaded.start, [loaded, *times.reads, *spans, *process_facts.imports]
    threads, ended = {loaded.thread}, loaded.end
    if times.is_first:
        began = process_facts.exec_time()
        package = import_module("prejit.runtime")  # by name, because it imports every room
        spans.append(Span("process", loaded.thread, began, package.first_line))
    if asked is not None and answered is not None:
        threads |= {asked[1], answered[1]}
        ended = answered[0]
        spans.append(Span("first_run", answered[1], asked[0], ended))
    mine = [one for one in spans if one.thread in threads or one.end <= loaded.start]
    ended = max(began, ended)  # a process that is forked after `load` began later
    seconds = dict.fromkeys(
        ("process", "imports", "reading", "verification", "loading", "first_run", "other"), 0.0
    )
    for part, start, end in _exclusive(mine, began, ended):
        seconds[part] += end - start
    reading = seconds["verification"] * read_share
    return StartReport(
        process_seconds=seconds["process"],
        imports_seconds=seconds["imports"],
        reading_seconds=seconds["reading"] + reading,
        verifying_seconds=seconds["verification"] - reading,
        loading_seconds=seconds["loading"],
        first_run_seconds=seconds["first_run"],
        other_seconds=seconds["other"],
        total_seconds=ended - began,
        hashed_bytes=times.hashed_bytes,
        receipt_bytes=times.receipt_bytes,
        verity_bytes=times.verity_bytes,
    )


def _exclusive(spans: Sequence[Span], began: float, ended: float) -> list[tuple[str, float, float]]:
    """Return every moment with its part: of the spans that hold it, the one that began last."""
    inside = [one for one in spans if one.start < ended and one.end > began and one.start < one.end]
    edges = {began, ended, *(edge for one in inside for edge in (one.start, one.end))}
    found = []
    for start, end in itertools.pairwise(sorted(edge for edge in edges if began <= edge <= ended)):
        holding = [one for one in inside if one.start <= start and one.end >= end]
        part = max(holding, key=lambda one: one.start).part if holding else "other"
        found.append((part, start, end))
    return found


_SLOW_SECONDS = 0.1
_SLOW_SHARE = 0.2
"""A part is slow if it takes more than these seconds and more than this share of the start."""

_NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs"),
    *("nfs", "nfs4", "orangefs", "smb2", "smb3", "smbfs", "virtiofs", "vboxsf", "wekafs"),
}
"""Types of file systems whose files come over a network, or from the host of a virtual machine."""

_COLD_BYTES = 20 << 20
"""Imports read more than this from a disk only if most of Python and its packages are not in memory."""

_MODULES = ("dataclasses", "numpy", "jaxlib", "prejit.runtime.bundle")
"""Modules that every start imports, one of each directory that may lack bytecode."""


def hints(
    report: StartReport, blob: str, programs: Sequence[ProgramReport], root: str = "/"
) -> tuple[str, ...]:
    """Return what made the slow parts of a start slow, and what to do, one sentence or two each.

    `blob` is the path of a file of the bundle; `root` holds `proc` and `sys`.
    """
    whole = report.total_seconds - report.other_seconds
    seconds = {
        "the process and its imports": report.process_seconds + report.imports_seconds,
        "reading": report.reading_seconds,
        "verifying": report.verifying_seconds,
        "loading": report.loading_seconds,
        "first run": report.first_run_seconds,
    }
    slow = {
        name: f"{name} took {took:.2f} s"
        for name, took in seconds.items()
        if took > _SLOW_SECONDS and took > _SLOW_SHARE * whole
    }
    imports = slow.get("the process and its imports")
    found = [
        *(() if imports is None else _imports(imports, root)),
        *_plain(imports or slow.get("loading")),
        *_files(slow, report, blob, root),
        *_receipts(slow, report),
        *_programs(slow, programs),
    ]
    if slow:
        found += _cpus(whole, root)
    return tuple(found)


def _imports(took: str, root: str) -> Iterator[str]:
    """Yield why Python and its imports were slow."""
    files = {name: file for name in _MODULES if (file := _source(name)) is not None}
    began = time.time() - seconds_since_exec()
    if lacking := {name: file for name, file in files.items() if _lacks_bytecode(file, began)}:
        directories = " ".join(dict.fromkeys(map(os.path.dirname, lacking.values())))
        yield (
            f"{took}: Python had no bytecode of {', '.join(lacking)} and compiled the source. "
            f"{_why(lacking)} Run `python -m compileall -q {directories}` where you install packages, "
            "such as in the build of a container image"
        )
    mounts = {name: mount for name, file in files.items() if (mount := _network(file, root))}
    for mount in dict.fromkeys(mounts.values()):
        names = ", ".join(name for name, its in mounts.items() if its == mount)
        yield (
            f"{took}: {names} came from {mount.described}. Install Python and its packages on a local disk"
        )
    if (from_disk := _read_bytes(root)) > _COLD_BYTES and not mounts:
        yield (
            f"{took}: {from_disk / 1e6:,.0f} MB have come from a disk so far, because they were not in "
            "memory. Install Python and its packages on a faster disk"
        )


def _plain(took: str | None) -> Iterator[str]:
    """Yield that a variable forbids to be quick."""
    if took is not None and is_plain_start():
        yield f"{took}: PREJIT_PLAIN_START is set, so nothing was done to be quick. Unset it"


def _source(name: str) -> str | None:
    """Return the source file of a module that is imported; None: it has none."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file if file is not None and file.endswith(".py") and os.path.exists(file) else None


def _lacks_bytecode(file: str, began: float) -> bool:
    """Return whether a module had no bytecode when the process began, in seconds since 1970."""
    try:
        return os.stat(importlib.util.cache_from_source(file)).st_mtime >= began
    except OSError:
        return True


def _why(lacking: dict[str, str]) -> str:
    """Return why modules had no bytecode, in a sentence."""
    if sys.dont_write_bytecode:
        return "PYTHONDONTWRITEBYTECODE or -B forbids to keep it."
    for file in lacking.values():
        directory = Path(importlib.util.cache_from_source(file)).parent
        if not _is_writable(directory):
            return f"{directory} cannot be written."
    return "It is kept for the next start, if that has the same directory."


def _files(slow: dict[str, str], report: StartReport, blob: str, root: str) -> Iterator[str]:
    """Yield why reading the bundle was slow. Programs read files with a receipt when they first run."""
    took = slow.get("reading") or slow.get("first run")
    from_disk = _read_bytes(root)
    is_cold = from_disk > (report.hashed_bytes + report.receipt_bytes + report.verity_bytes) / 4
    directory = os.path.dirname(os.path.dirname(os.path.dirname(blob)))
    if took is None or not (is_cold or "reading" in slow):
        return
    if mount := _network(blob, root):
        yield f"{took}: {directory} is on {mount.described}. Copy the bundle to a local disk first"
    elif is_cold:
        yield (
            f"{took}: {from_disk / 1e6:,.0f} MB have come from a disk so far, because they were not in "
            f"memory. Put {directory} on a faster disk, or read its files before the start: `cat` is enough"
        )


def _receipts(slow: dict[str, str], report: StartReport) -> Iterator[str]:
    """Yield why files had to be verified."""
    took = slow.get("verifying") or slow.get("reading")
    if took is None or not report.hashed_bytes:
        return
    size, kept = f"{report.hashed_bytes / 1e6:,.0f} MB", cache_root()
    if not _is_writable(kept / "receipts" / "v1"):
        yield (
            f"{took}: {size} were verified, and {kept} cannot be written, so no receipt is kept. Set "
            "PREJIT_RUNTIME_CACHE to a directory that can be written and that the next start has too"
        )
    else:
        yield (
            f"{took}: {size} had no receipt, as in every first start. The next start does not verify them if "
            f"it has {kept}: in a container, put it on a volume"
        )


def _programs(slow: dict[str, str], programs: Sequence[ProgramReport]) -> Iterator[str]:
    """Yield that programs were compiled here."""
    took = slow.get("loading") or slow.get("first run")
    compiled = [one for one in programs if one.source == "compiled"]
    if took is not None and compiled:
        were = "was" if len(compiled) == 1 else "were"
        yield (
            f"{took}: {len(compiled)} of the programs {were} compiled here, because this machine matches no "
            "target of the bundle. See `prejit explain`, and build for a target that fits"
        )


def _cpus(whole: float, root: str) -> Iterator[str]:
    """Yield that there are too few CPUs, which makes every part slow."""
    took = f"the start took {whole:.2f} s"
    if cpus(root) == 1:
        yield (
            f"{took}: this process may use one CPU, by its affinity or its container's quota, so nothing ran "
            "beside anything else. Give it two or more"
        )
    waited = _waited_seconds(root)
    if waited > _SLOW_SECONDS and waited > _SLOW_SHARE * whole:
        yield (
            f"{took}: the main thread has waited {waited:.2f} s for a CPU so far, because other threads or "
            "processes used it. Give it more CPUs, or start fewer processes at a time"
        )


class _Mount(NamedTuple):
    point: str
    kind: str

    @property
    def described(self) -> str:
        """Its mount point and its type, as words of a hint."""
        what = "FUSE" if self.kind.startswith("fuse") else "a network or shared file system"
        return f"{self.point} ({self.kind}: {what})"


def _network(path: str, root: str) -> _Mount | None:
    """Return the file system of a file if it is slow: of a network, of a host, or in user space (FUSE)."""
    file, best = os.path.realpath(path), _Mount("", "")
    for line in text_of(os.path.join(root, "proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        places, kind = before.split(" "), after.partition(" ")[0]
        if len(places) < 5:
            continue
        point = places[4].encode().decode("unicode_escape")  # a space is \040
        inside = file == point or file.startswith(f"{point.rstrip('/')}/")
        if inside and len(point) >= len(best.point):  # of two at one point, the later one is on top
            best = _Mount(point, kind)
    return best if best.kind in _NETWORK or best.kind.startswith("fuse.") else None


def _is_writable(path: Path) -> bool:
    """Return whether a directory can be written, or made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _read_bytes(root: str) -> int:
    """Return how many bytes this process has read from disks so far; 0 if the kernel does not say."""
    for line in text_of(os.path.join(root, "proc/self/io")).splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes" and value.isdecimal():
            return int(value)
    return 0


def _waited_seconds(root: str) -> float:
    """Return how long the main thread was ready to run and had no CPU; 0 if the kernel does not say."""
    words = text_of(os.path.join(root, "proc/self/schedstat")).split()
    return int(words[1]) / 1e9 if len(words) == 3 and words[1].isdecimal() else 0.0
