"""Measures that make a start quick. `PREJIT_PLAIN_START=1` turns all of them off.

A start spends its time in imports, one after the other under the GIL. Work that needs no GIL runs in a thread
beside them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator

from prejit.runtime.base.joined_threads import start_thread
from prejit.runtime.base.process_facts import importing, is_alone, is_plain_start, thread_count
from prejit.runtime.device.library_pages import read_ahead

_OPENBLAS_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"
"""Variable with the time that OpenBLAS's threads spin before they sleep: 2 to this power of cycles, at least
4. The default of 26 keeps all cores but one busy for 0.1 s when NumPy is imported
(driver/others/blas_server.c)."""


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Run a load with these measures. Works as a context manager and as a decorator."""
    if is_plain_start():
        yield
        return
    read_library_ahead()
    with importing():
        # NumPy first: it opens libraries itself, and would wait while another thread opens one.
        import_numpy()
        _open_jaxlib()
    yield


@functools.cache
def read_library_ahead() -> None:
    """Ask the kernel for the pages of jaxlib's library that a start touches. Nothing waits for them here."""
    if is_plain_start() or "jaxlib._jax" in sys.modules:
        return
    if (library := jaxlib_library()) is not None:
        read_ahead(library)


def jaxlib_library() -> str | None:
    """Return the path of jaxlib's library; None: jaxlib is not installed."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return None
    return os.path.join(spec.submodule_search_locations[0], "libjax_common.so")


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


def _open_jaxlib() -> None:
    """Open jaxlib's library in a thread. That is 25 of the 30 ms of its import, which holds the GIL."""
    if "jaxlib._jax" in sys.modules:
        return
    if (path := jaxlib_library()) is None:
        return  # the import raises a better error
    set_log_level()
    import ctypes

    try:
        # A foreign function runs without the GIL; ctypes.CDLL(path) would hold it.
        dlopen = ctypes.CDLL(None).dlopen
    except (AttributeError, OSError):
        return
    dlopen.restype = ctypes.c_void_p
    flags = os.RTLD_NOW | os.RTLD_LOCAL  # as an import opens it

    def open_library() -> None:
        dlopen(os.fsencode(path), flags)  # an error comes again in the import, which reports it

    start_thread(open_library, "prejit-open-jaxlib")
