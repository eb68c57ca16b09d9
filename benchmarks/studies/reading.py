"""Ways to bring a file's bytes into memory, and the time that each takes.

A way is a function that handles one block. Threads claim blocks from one counter, in the order of the file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.harness.page_cache import evict

Bytes = npt.NDArray[np.uint8]
Use = Callable[[Bytes], object]
"""A function that uses the bytes of a block, for example hashes them."""

MADV_HUGEPAGE, MADV_POPULATE_READ = 14, 22
_LIBC = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL; those of mmap.madvise do not
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.readahead.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_size_t)


@dataclass(frozen=True)
class Took:
    """The cost of reading a file: seconds on the clock, and CPU seconds of this process."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Source:
    """A file that is open for one reading.

    Attributes:
        descriptor: its descriptor.
        mapped: its bytes, mapped; none of the pages is touched yet.
        memory: anonymous memory of the same size, aligned to pages; none of it is touched yet.
    """

    descriptor: int
    mapped: Bytes
    memory: Bytes


Way = Callable[[Source, slice], Bytes]
"""A function that brings one block into memory and returns its bytes."""


def _advise(block: Bytes, advice: int) -> None:
    if _LIBC.madvise(block.ctypes.data, block.nbytes, advice):
        raise OSError(ctypes.get_errno(), f"madvise {advice} failed")


def faults(source: Source, at: slice) -> Bytes:
    """Return mapped bytes; each page is mapped when something touches it."""
    return source.mapped[at]


def populate(source: Source, at: slice) -> Bytes:
    """Map all pages of the block by one system call."""
    _advise(source.mapped[at], MADV_POPULATE_READ)
    return source.mapped[at]


def will_need(source: Source, at: slice) -> Bytes:
    """Ask the kernel for the block after this one (posix_fadvise), then return mapped bytes."""
    size = at.stop - at.start
    os.posix_fadvise(source.descriptor, at.stop, size, os.POSIX_FADV_WILLNEED)
    return source.mapped[at]


def read_ahead(source: Source, at: slice) -> Bytes:
    """Ask the kernel for the block after this one (readahead), then return mapped bytes."""
    _LIBC.readahead(source.descriptor, at.stop, at.stop - at.start)
    return source.mapped[at]


def read_new(source: Source, at: slice) -> Bytes:
    """Read into memory that was not used before."""
    block = source.memory[at]
    if os.preadv(source.descriptor, [block.data], at.start) != block.nbytes:
        raise OSError("the file is shorter than expected")
    return block


def read_again(source: Source, at: slice) -> Bytes:
    """Read into a buffer that each thread uses again for every block."""
    size = at.stop - at.start
    held: Bytes | None = getattr(_LOCAL, "buffer", None)
    if held is None or held.nbytes < size:
        held = _LOCAL.buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    os.preadv(source.descriptor, [held[:size].data], at.start)
    return held[:size]


_LOCAL = threading.local()


def only_new(source: Source, at: slice) -> Bytes:
    """Return memory that was not used before, and read nothing: what the memory itself costs."""
    return source.memory[at]


WAYS: dict[str, Way] = {
    "mapped, page faults": faults,
    "mapped, MADV_POPULATE_READ": populate,
    "mapped, posix_fadvise WILLNEED of the next block": will_need,
    "mapped, readahead(2) of the next block": read_ahead,
    "preadv into new memory": read_new,
    "preadv into new memory of 2 MB pages": read_new,
    "preadv into new memory, O_DIRECT": read_new,
    "new memory alone, nothing read": only_new,
    "preadv into one buffer": read_again,
    "preadv into one buffer, O_DIRECT": read_again,
}


def touch(block: Bytes) -> object:
    """Use one byte of each page."""
    return block[:: mmap.PAGESIZE].max()


def read(path: Path, way: str, block: int, threads: int, cold: bool, use: Use = touch) -> Took:
    """Bring a file into memory and use every block.

    Args:
        path: file, whose size is a multiple of the block's.
        way: name of one of WAYS.
        block: bytes of a block.
        threads: number of threads.
        cold: put the file out of the page cache first.
        use: function that gets each block; it must release the GIL, or threads do not help.
    """
    if cold:
        evict(path)
    size = path.stat().st_size
    flags = os.O_RDONLY | (os.O_DIRECT if "O_DIRECT" in way else 0)
    descriptor = os.open(path, flags)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    memory = mmap.mmap(-1, size)
    source = Source(descriptor, np.frombuffer(mapped, np.uint8), np.frombuffer(memory, np.uint8))
    if "2 MB pages" in way:
        _advise(source.memory, MADV_HUGEPAGE)
    numbers = count()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while (start := next(numbers) * block) < size:
                use(WAYS[way](source, slice(start, start + block)))
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    cpu, began = time.process_time(), time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = Took(time.perf_counter() - began, time.process_time() - cpu)
    os.close(descriptor)
    if failures:
        raise failures[0]
    return took
