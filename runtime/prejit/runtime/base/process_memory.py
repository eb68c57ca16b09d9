"""The memory that this process takes and can still take, from the Linux kernel (proc(5), cgroups(7))."""

from __future__ import annotations

import ctypes
import os
import sys

from prejit.runtime.base.process_facts import control_groups, text_of


def free_memory_bytes(root: str = "/", *, with_files: bool = False) -> int:
    """Return how much memory this process can still take, by the kernel and by its control groups' limits.

    `root` is the directory that holds `proc` and `sys`. Pages of files that nobody has used for long count as
    free, because the kernel drops them before it fails (proc_meminfo(5), cgroups(7)); `with_files`: so do
    those that were used lately.
    """
    left = [sys.maxsize]  # a kernel that does not say
    for line in text_of(os.path.join(root, "proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            left.append(int(line.split()[1]) << 10)
    for directory, is_second in control_groups(root, "memory"):
        names, total = (
            (("memory.max", "memory.current"), "")
            if is_second
            else (("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_")
        )
        limit, used = (text_of(os.path.join(directory, name)).strip() for name in names)
        if limit.isdecimal() and used.isdecimal():  # else there is no limit
            words = text_of(os.path.join(directory, "memory.stat")).split()
            pages = dict(zip(words[::2], words[1::2], strict=False))
            kinds = ("inactive_file", "active_file")[: 1 + with_files]
            files = sum(int(pages.get(f"{total}{kind}", 0)) for kind in kinds)
            left.append(max(0, int(limit) - int(used) + files))
    return min(left)


def peak_memory_bytes() -> int:
    """Return the peak resident memory, mapped files included.

    The peak of getrusage would begin with the memory of the parent when it started this process.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))


_LIBRARY = ctypes.CDLL(None)
_MADV_DONTNEED = 4


def zero(address: int, size: int) -> None:
    """Overwrite memory with zeros. Its whole pages are free until they are written (madvise(2))."""
    page = os.sysconf("SC_PAGE_SIZE")
    end = address + size
    first, last = -(-address // page) * page, end // page * page
    if first < last and sys.platform.startswith("linux"):
        mark = ctypes.c_uint8.from_address(first)
        mark.value = 1
        pages = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
        failed = _LIBRARY.madvise(*pages, _MADV_DONTNEED)  # it stops at pages that are locked
        if not failed and not mark.value:  # pages that processes share keep what they hold
            ctypes.memset(address, 0, first - address)
            ctypes.memset(last, 0, end - last)
            return
    ctypes.memset(address, 0, size)


def give_back() -> None:
    """Give free memory back to the system (malloc_trim(3)).

    glibc keeps what threads have freed, up to hundreds of MB. Other C libraries have no such function.
    """
    if (trim := getattr(_LIBRARY, "malloc_trim", None)) is not None:
        trim(0)
