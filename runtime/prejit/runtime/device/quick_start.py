"""Measures that make a start quick. `PREJIT_PLAIN_START=1` turns all of them off.

A start spends its time in imports, one after the other under the GIL. Work that needs no GIL runs in a thread
beside them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from mmap import PAGESIZE

from prejit.runtime.base.process_facts import is_alone, is_plain_start, thread_count
from prejit.runtime.base.threads_and_forks import start_thread

_LIBRARY = "libjax_common.so"
_OPENING = "prejit-open-jaxlib"  # the name of a thread that makes no objects of Python
_OPENBLAS_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"
"""Variable with the time that OpenBLAS's threads spin before they sleep: 2 to this power of cycles, at least
4. The default of 26 keeps all cores but one busy for 0.1 s when NumPy is imported
(driver/others/blas_server.c)."""


@functools.cache
def import_ahead() -> None:
    """Import and open what every load needs, once."""
    library = read_library_ahead()
    # NumPy first: it opens libraries itself, and would wait while another thread opens one.
    import_numpy()
    if library is not None:
        open_jaxlib(library)


@functools.cache
def read_library_ahead() -> str | None:
    """Ask the kernel for the pages of jaxlib's library that a start touches. Nothing waits for them here.

    Returns the library's path; None: it is open, or there is none, and its import raises a better error.
    """
    if is_plain_start() or "jaxlib._jax" in sys.modules:
        return None
    if (library := jaxlib_library()) is not None:
        read_ahead(library)
    return library


def jaxlib_library() -> str | None:
    """Return the path of jaxlib's library; None: jaxlib is not installed."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return None
    return os.path.join(spec.submodule_search_locations[0], _LIBRARY)


def import_numpy() -> None:
    """Import NumPy so that its OpenBLAS threads do not spin.

    This must happen no later than the import of `load`. If a thread of the host program imports a module
    that imports NumPy from C, as jax does, and this thread imports NumPy at the same time, one of them gets
    half of NumPy.
    """
    spins = is_plain_start() or "numpy" in sys.modules or _OPENBLAS_TIMEOUT in os.environ
    # Another thread could read the environment meanwhile, or start a process that inherits it.
    spins = spins or not is_alone() or thread_count() > 1
    if not spins:
        os.environ[_OPENBLAS_TIMEOUT] = "4"
    try:
        import numpy  # noqa: F401
    finally:
        if not spins:
            os.environ.pop(_OPENBLAS_TIMEOUT, None)


def set_log_level() -> None:
    """Keep INFO lines off stderr. XLA's library reads the variable when it is opened; jax sets it too."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def open_jaxlib(path: str) -> None:
    """Open jaxlib's library in a thread, beside our imports: 25 of the 30 ms of its import, under the GIL."""
    set_log_level()
    # The linker opens one library at a time. A start needs those of these modules (jaxlib: subprocess).
    for name in ("hashlib", "json", "mmap", "subprocess", "zstandard"):
        importlib.import_module(name)
    import ctypes

    dlopen = ctypes.CDLL(None).dlopen  # it runs without the GIL; ctypes.CDLL(path) would hold it
    dlopen.restype = ctypes.c_void_p
    flags = os.RTLD_NOW | os.RTLD_LOCAL  # as an import opens it

    def open_library() -> None:
        dlopen(os.fsencode(path), flags)  # an error comes again in the import, which reports it

    if (thread := start_thread(open_library, _OPENING)) is not None:
        os.register_at_fork(before=thread.join)  # no child gets half of a library


def unmap_library_pages() -> None:
    """Take the code of large libraries out of the page tables, in a thread: 72 of 103 MB run once.

    A call maps again what it needs, 64 KB at a time, from the page cache.
    """
    if not is_plain_start():
        start_thread(_unmap, "prejit-unmap-libraries")


def _unmap() -> None:
    from ctypes import CDLL, c_size_t, c_void_p

    import numpy as np

    libc, pinned = CDLL(None), os.RTLD_NOW | os.RTLD_NOLOAD | os.RTLD_NODELETE
    # Some sandboxes have no /proc, or not all of it.
    with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as pages:
        with open("/proc/self/maps", "rb") as maps:
            parts = [at.split(None, 5) for at in maps if at.rpartition(b"/")[2].startswith(_LARGE)]
        for addresses, access, *_, path in parts:
            # Open as a whole, and never closed any more: nothing else can get its addresses.
            if access not in (b"r-xp", b"r--p") or not libc.dlopen(path.rstrip(b"\n"), pinned):
                continue
            start, end = (int(each, 16) for each in addresses.split(b"-"))
            pages.seek(start // PAGESIZE * 8)
            flags = np.frombuffer(pages.read((end - start) // PAGESIZE * 8), np.uint8)[7::8]
            # A page that was written is of no file, and would be lost: relocations, breakpoints. Bits of the
            # flags: 0x80 present, 0x40 swapped, 0x20 of a file (Documentation/admin-guide/mm/pagemap.rst).
            own = (flags & 0xA0 == 0x80) | (flags & 0x40 != 0)
            if own.size * PAGESIZE == end - start and (flags & 0x80).any() and not own.any():
                libc.madvise(c_void_p(start), c_size_t(end - start), 4)  # MADV_DONTNEED


_LARGE = (
    *(_LIBRARY.encode(), b"_ml_dtypes_ext.", b"_multiarray_umath.", b"libscipy_openblas"),
    *(b"backend_c.", b"libpython3", b"libcrypto.so", b"libstdc++.so", b"libc.so", b"libm.so"),
)


PAGE_BYTES = 4096
_LISTED = os.path.join(os.path.dirname(__file__), "library_pages.txt")
"""For each recorded library a line `SIZE FIRST+COUNT ...  # name` (`scripts/record_library_pages.py`): the
size of the file in bytes, which tells the builds of jaxlib apart, and the pages of 4 KiB that a start
touches. They are 60 to 80 of 350 MB, in no order that the kernel could guess: each page fault on a cold disk
would wait for a small read. Wrong pages only cost time."""
_PROBED_PAGE = 256
"""A page of the library's relocations, which every start touches."""
_CACHESTAT = 451
"""The number of the system call on all architectures."""
_AT_ONCE_PAGES = 256
"""The kernel reads no more ahead for one call than the disk's setting, which is seldom smaller."""


def read_ahead(path: str) -> int:
    """Ask the kernel to read the listed pages of a library, unless it has them. It does not wait for them.

    One that cannot be read is ignored, because its import raises a better error.

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


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Run imports or a load without the garbage collector: they make many objects and no garbage.

    A collector that is only turned off looks through all these objects as soon as it is on again, which takes
    5 to 15 ms before the first token. So they count as old afterwards, and the next full collection is the
    first one that looks at them. Works as a context manager and as a decorator.

    If other threads run, or the host program turned the collector off, nothing is changed.
    """
    if is_plain_start() or not is_alone(_OPENING) or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what the host program froze must stay frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()
