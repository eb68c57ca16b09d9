"""Read ahead the pages of jaxlib's library that a start touches.

A start touches 60 to 80 of its 350 MB, in no order that the kernel could guess. On a cold disk each page
fault waits for one small read, or for many MB that nobody needs. This module asks the kernel for all of these
pages at once, before the imports, and the disk reads them beside the imports.

`library_pages.txt` has a line for each recorded library (`scripts/record_library_pages.py`):

    SIZE FIRST+COUNT FIRST+COUNT ...  # name

SIZE is that of the file in bytes, which tells the builds of jaxlib apart. FIRST and COUNT are pages of
4 KiB. A library that is not listed is read by page faults alone. Wrong pages would only cost time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

PAGE_BYTES = 4096
_LISTED = os.path.join(os.path.dirname(__file__), "library_pages.txt")
_PROBED_PAGE = 256
"""A page of the library's relocations, which every start touches."""
_CACHESTAT = 451
"""The number of the system call on all architectures."""
_AT_ONCE_PAGES = 256
"""The kernel reads no more ahead for one call than the disk's setting, which is seldom smaller."""


def read_ahead(path: str) -> int:
    """Ask the kernel to read the listed pages of a library, unless it has them. It does not wait for them.

    Args:
        path: the library; one that cannot be read is ignored, because its import raises a better error.

    Returns:
        The number of pages.
    """
    asked = 0
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        if _is_cached(descriptor):
            return 0
        for first, count in _listed(os.fstat(descriptor).st_size):
            for start in range(first, first + count, _AT_ONCE_PAGES):
                pages = min(_AT_ONCE_PAGES, first + count - start)
                at, size = start * PAGE_BYTES, pages * PAGE_BYTES
                os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_WILLNEED)
                asked += pages
    return asked


def _is_cached(descriptor: int) -> bool:
    """Return whether the page cache has the library. A file system that cannot tell counts as cold."""
    from ctypes import CDLL, c_long, c_uint64  # NumPy imports it too

    at = (c_uint64 * 2)(_PROBED_PAGE * PAGE_BYTES, PAGE_BYTES)
    found = (c_uint64 * 5)()  # the first one is the number of pages
    if CDLL(None).syscall(c_long(_CACHESTAT), c_long(descriptor), at, found, c_long(0)) == 0:
        return bool(found[0])
    # Linux before 6.5, or one that does not let this user ask. Linux 6 may read the page for this question,
    # so that a cold library can look cached: then page faults read it.
    try:
        os.preadv(descriptor, [bytearray(1)], _PROBED_PAGE * PAGE_BYTES, os.RWF_NOWAIT)
    except OSError:
        return False
    return True


def _listed(size: int) -> Iterator[tuple[int, int]]:
    """Yield the first page and the number of pages of each run that is listed for a library of this size."""
    with open(_LISTED, encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{size} "):
                for run in line.partition("#")[0].split()[1:]:
                    first, _, count = run.partition("+")
                    yield int(first), int(count)
                return
