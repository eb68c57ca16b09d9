"""Put files out of the kernel's page cache, and count what it holds of them. Standard library only."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
DROPPED = "the kernel dropped all caches (/proc/sys/vm/drop_caches)"
EVICTED = "the files' pages were evicted one by one (posix_fadvise DONTNEED)"

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Range:
    """Bytes of a file: `length` of them from `start`."""

    path: Path
    start: int
    length: int


def files_below(paths: Iterable[Path]) -> list[Path]:
    """Return the regular files among paths and below directories, each real file once, sorted.

    A `site-packages` below a directory is left out: a virtual environment imports nothing from that of the
    interpreter that it was made with.
    """
    found: set[Path] = set()
    for path in paths:
        inside = _below(path) if path.is_dir() else (path,)
        found |= {each.resolve() for each in inside if each.is_file()}
    return sorted(found)


def _below(directory: Path) -> Iterator[Path]:
    for root, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if name != "site-packages"]
        yield from (Path(root, name) for name in names)


def make_cold(files: Iterable[Path]) -> str:
    """Put files out of the page cache, and return in words how.

    The kernel drops all caches where this process may ask for it, and with them file names and inodes. Else
    the pages of each file are evicted. Pages that another process maps stay.
    """
    os.sync()  # pages that are not written yet cannot be dropped
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        for path in files:
            evict(path)
        return EVICTED
    time.sleep(0.2)  # the kernel frees inodes and slabs a moment longer
    return DROPPED


def evict(path: Path) -> None:
    """Put one file out of the page cache, except pages that a process maps or has yet to write."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident_ranges(path: Path) -> list[Range]:
    """Return the parts of a file that the page cache holds, in the file's order.

    Raises:
        OSError: the file cannot be read or mapped.
    """
    size = path.stat().st_size
    if not size:
        return []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        at = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    if at == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map {path}")
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    try:
        if _LIBC.mincore(at, size, pages):
            raise OSError(ctypes.get_errno(), f"mincore failed for {path}")
    finally:
        _LIBC.munmap(at, size)
    return ranges_of(path, size, bytes(pages))


def ranges_of(path: Path, size: int, pages: bytes) -> list[Range]:
    """Return the runs of pages that are present as ranges, the last one cut to the file's size.

    Args:
        path: the file.
        size: its bytes.
        pages: one byte a page, whose lowest bit says whether the page is present (mincore's answer).
    """
    found: list[Range] = []
    for present, group in groupby(enumerate(pages), key=lambda page: page[1] & 1):
        numbers = [number for number, _ in group]
        if present:
            start = numbers[0] * mmap.PAGESIZE
            end = min(size, (numbers[-1] + 1) * mmap.PAGESIZE)
            found.append(Range(path, start, end - start))
    return found
