"""What a start does to be quick, beside what it must do. `PREJIT_PLAIN_START=1` turns all of it off.

A start is imports, one after the other under the GIL. What needs no GIL goes into a thread beside them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator

from prejit.runtime.base.process import is_alone, is_plain_start, thread_count

_OPENBLAS_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"
"""OpenBLAS's threads look for work in a loop of 2 to this power of cycles before they sleep, from 4 on; its
default of 26 keeps every core but one busy for 0.1 s when NumPy is imported (driver/others/blas_server.c)."""


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """For a load. Also a decorator."""
    if is_plain_start():
        yield
        return
    with _without_collecting():
        # NumPy first: it opens libraries of its own, for which it would wait while another is being opened.
        import_numpy()
        _open_jaxlib()
        yield


def import_numpy() -> None:
    """Imports NumPy, whose OpenBLAS does not spin then.

    When `load` is imported, if not before: while a thread of the host program imports what imports NumPy
    from its C side, as jax does, it must not be imported from here. Python ends that with a half of NumPy.
    """
    spins = is_plain_start() or "numpy" in sys.modules or _OPENBLAS_TIMEOUT in os.environ
    # Another thread might read the environment meanwhile, or start a process that inherits it.
    spins = spins or not is_alone() or thread_count() > 1
    if not spins:
        os.environ[_OPENBLAS_TIMEOUT] = "4"
    try:
        with contextlib.nullcontext() if is_plain_start() else _without_collecting():
            import numpy  # noqa: F401
    finally:
        if not spins:
            os.environ.pop(_OPENBLAS_TIMEOUT, None)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Imports and a load make much and no garbage. What other threads make is collected as ever."""
    if not is_alone():
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def set_log_level() -> None:
    """No INFO lines on stderr: XLA's library reads it when it is opened. `import jax` sets the same."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def _open_jaxlib() -> None:
    """Begins to open jaxlib's library in a thread: 25 of the 30 ms of its import, which holds the GIL."""
    if "jaxlib._jax" in sys.modules:
        return
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return  # its import says it better
    path = os.path.join(spec.submodule_search_locations[0], "libjax_common.so")
    set_log_level()
    import ctypes

    try:
        # As a foreign function, which runs without the GIL. ctypes.CDLL(path) would hold it.
        dlopen = ctypes.CDLL(None).dlopen
    except (AttributeError, OSError):
        return
    dlopen.restype = ctypes.c_void_p
    flags = os.RTLD_NOW | os.RTLD_LOCAL  # those of an import

    def open_library() -> None:
        dlopen(
            os.fsencode(path), flags
        )  # what fails here fails again in the import, which says why

    with contextlib.suppress(RuntimeError):  # no more threads
        threading.Thread(target=open_library, name="prejit-open-jaxlib").start()
