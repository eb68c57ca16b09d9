"""Libraries of the user: shared libraries of verified bytes with FFI handlers, opened once in a process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from prejit.runtime.base.files import digest_of
from prejit.runtime.device.kernels import OpenLibrary, capsule_of, loading, open_sealed
from prejit.runtime.format.names import handler_target

_LIBRARY_HINT = (
    "install the libraries that it needs on this machine, or link them into it statically "
    "(-static-libstdc++ -static-libgcc) on a system as old as this one, and build again"
)


_opened: dict[str, ctypes.CDLL] = {}
"""The libraries of users that this process has opened, by digest."""


def load_library(content: bytes, symbols: Iterable[str], name: str) -> OpenLibrary:
    """Load a library of the user. A process opens the same bytes once, however many bundles have them.

    Args:
        content: a shared library that exports FFI handlers, verified.
        symbols: the handlers that programs call.
        name: name of its file, for errors.

    Raises:
        KernelError: this machine does not load it: a library or a symbol that it needs is missing, or code
            may not be mapped.
    """
    digest = digest_of(content)
    with loading:
        if digest not in _opened:
            _opened[digest] = open_sealed(content, digest, f"the library {name}", _LIBRARY_HINT)
        opened = _opened[digest]
    handlers = {
        handler_target(symbol, digest): capsule_of(getattr(opened, symbol)) for symbol in symbols
    }
    return OpenLibrary(digest, handlers)
