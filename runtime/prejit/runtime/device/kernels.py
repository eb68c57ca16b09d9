"""Native kernels and libraries of the user: shared libraries of verified bytes, loaded and never unloaded.

The dynamic linker opens a sealed copy in memory, which nobody can change any more, instead of a file by its
name. A process loads each library once, however many bundles have it. Libraries with other digests are
loaded beside it. All libraries of kernels share one set of helper threads, as many as
`base.process_facts.kernel_threads` allows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from prejit.runtime.base.files import digest_of
from prejit.runtime.base.process_facts import kernel_threads
from prejit.runtime.errors import KernelError
from prejit.runtime.format.checks.elf import find_note, read_shared_library
from prejit.runtime.format.names import KERNEL_PREFIX, handler_target, kernel_target

_MFD_NOEXEC_SEAL = 8
"""MFD_NOEXEC_SEAL of linux/memfd.h, since Linux 6.3. If vm.memfd_noexec is 2, Linux makes no memory file
without it. It forbids execve, not the dynamic linker."""

_NOT_PERMITTED = "the system does not permit it (SELinux, seccomp or vm.memfd_noexec)"
_REASONS = {
    errno.EACCES: _NOT_PERMITTED,
    errno.EPERM: _NOT_PERMITTED,
    errno.ENOSYS: "the system has no memfd_create (Linux has since 3.17)",
}

_KERNELS_HINT = (
    "for older systems build with CXX=zig (`pip install 'prejit[kernels]'`); a build without "
    "a C++ compiler has no kernels"
)

_LIBRARY_HINT = (
    "install the libraries that it needs on this machine, or link them into it statically "
    "(-static-libstdc++ -static-libgcc) on a system as old as this one, and build again"
)

_NOTE = struct.Struct("<Ii")
"""The layout of a library's ELF note `prejit`: the version of the shared helper threads, and the distance
from this number to the function that takes them (kernels/threads.cc)."""
_RTLD_DI_LINKMAP = 2
"""RTLD_DI_LINKMAP of dlfcn.h: dlinfo gives the link_map of a library."""

Handlers = Mapping[str, Any]
"""FFI handlers of a library as PyCapsules, by the names under which executables call them."""

_loading = threading.Lock()
_loaded: dict[str, Handlers] = {}
_opened: dict[str, ctypes.CDLL] = {}
"""The libraries of users that this process has opened, by digest."""
_helpers: dict[int, int] = {}
"""Address of the helper threads of this process, for each version in which libraries share them."""
_attempts = 0


def load(content: bytes) -> Handlers:
    """Load a library of kernels, and return its handlers. A process loads the same bytes once.

    Its content is verified, and exports FFI handlers `prejit_*`.

    Raises:
        KernelError: this machine does not load it: its glibc is older, or code may not be mapped.
        UsageError: PREJIT_THREADS is not an integer of at least 1.
    """
    digest = digest_of(content)
    with _loading:
        if digest not in _loaded:
            names, threads = kernels_of(content), kernel_threads()
            library = _open_sealed(content, digest, "native kernels", _KERNELS_HINT)
            _share_helpers(library, content, threads)
            _loaded[digest] = {
                kernel_target(name, digest): _capsule_of(getattr(library, KERNEL_PREFIX + name))
                for name in names
            }
        return _loaded[digest]


def load_library(content: bytes, symbols: Iterable[str], name: str) -> Handlers:
    """Load a library of the user, and return its handlers. A process opens the same bytes once.

    Its content is verified, and exports `symbols`, the FFI handlers that programs call. `name` is for errors.

    Raises:
        KernelError: this machine does not load it: a library or a symbol that it needs is missing, or code
            may not be mapped.
    """
    digest = digest_of(content)
    with _loading:
        if digest not in _opened:
            _opened[digest] = _open_sealed(content, digest, f"the library {name}", _LIBRARY_HINT)
        opened = _opened[digest]
    return {
        handler_target(symbol, digest): _capsule_of(getattr(opened, symbol)) for symbol in symbols
    }


def register(handlers: Handlers) -> None:
    """Register handlers with XLA, for programs that are loaded or compiled afterwards.

    Raises:
        KernelError: this jaxlib does not take a handler.
    """
    # Imports NumPy, which loading a library does not need.
    from prejit.runtime.device import _jaxlib

    _jaxlib.register_handlers(handlers)


def kernels_of(content: bytes) -> tuple[str, ...]:
    """Return the names of the kernels that a library exports, without `prejit_`. Nothing is loaded.

    Raises:
        KernelError: the content is not a shared library.
    """
    try:
        exported = read_shared_library(content).exported
    except ValueError as error:
        raise KernelError(f"expected a shared library with kernels: {error}") from error
    own = (name for name in exported if name.startswith(KERNEL_PREFIX))
    return tuple(name.removeprefix(KERNEL_PREFIX) for name in own)


def _share_helpers(library: ctypes.CDLL, content: bytes, threads: int) -> None:
    """Pass the helper threads of earlier libraries to a library, and the maximum number of threads.

    Its kernels were not called yet. `threads` counts the calling one too.
    """
    if (note := find_note(content, b"prejit")) is None or len(note[1]) != _NOTE.size:
        return
    address, (version, distance) = note[0], _NOTE.unpack(note[1])
    link_map = ctypes.c_void_p()
    ctypes.CDLL(None).dlinfo(
        ctypes.c_void_p(library._handle), _RTLD_DI_LINKMAP, ctypes.byref(link_map)
    )
    assert link_map.value is not None
    # The first member of a link_map is the distance by which the library was moved (dlinfo(3)).
    moved = ctypes.c_size_t.from_address(link_map.value).value
    share = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)(
        moved + address + 4 + distance
    )
    _helpers[version] = share(_helpers.get(version), threads)


def _open_sealed(content: bytes, digest: str, what: str, hint: str) -> ctypes.CDLL:
    """Return a library, opened from a sealed copy of its bytes in memory."""
    global _attempts
    descriptor = -1
    try:
        descriptor = _memory_file(content, f"prejit-kernels-{digest[7:23]}")
        # The dynamic linker returns the old library for a name that it knows, and descriptor numbers are
        # used again, so each attempt has a name of its own.
        _attempts += 1
        return ctypes.CDLL(f"/proc/self/fd/{'./' * _attempts}{descriptor}", os.RTLD_NOW)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or str(error)
        raise KernelError(f"cannot load {what}: {reason}", hint=hint) from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _memory_file(content: bytes, name: str) -> int:
    """Return a descriptor of a sealed file in memory with this content."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older Linux does not know the flag
            raise
        descriptor = os.memfd_create(name, flags)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        with contextlib.suppress(OSError):  # without seals, only this process can write to the file
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _capsule_of(function: Any) -> Any:
    """Return a PyCapsule of a C function, as jaxlib takes it (jax/_src/ffi.py, `pycapsule`)."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.cast(function, ctypes.c_void_p), None, None)
