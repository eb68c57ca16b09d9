"""Native kernels: a shared library of verified bytes, loaded into this process and never unloaded.

What is loaded is a copy in memory that nobody can change any more, not a file by its name. A library is
loaded once a process, however many bundles have it; libraries of other digests live beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prejit.runtime.bundle import KERNEL_PREFIX, digest_of, kernel_target
from prejit.runtime.elf import read_shared_library
from prejit.runtime.errors import KernelError

_MFD_NOEXEC_SEAL = 8
"""From linux/memfd.h, since Linux 6.3. Where vm.memfd_noexec is 2, files in memory are made so or not at
all; it concerns execve, not the dynamic linker."""

_NOT_PERMITTED = "the system does not permit it (SELinux, seccomp or vm.memfd_noexec)"
_REASONS = {
    errno.EACCES: _NOT_PERMITTED,
    errno.EPERM: _NOT_PERMITTED,
    errno.ENOSYS: "the system has no memfd_create (Linux has since 3.17)",
}

_lock = threading.Lock()
_loaded: dict[str, Library] = {}
_attempts = 0


@dataclass(frozen=True, slots=True)
class Library:
    """A library of kernels that this process has loaded.

    Attributes:
        digest: of its content.
        handlers: its FFI handlers as PyCapsules, by the name that programs call them by.
    """

    digest: str
    handlers: Mapping[str, Any]


def load(content: bytes) -> Library:
    """Loads a library, or gives the one that this process has loaded from the same bytes.

    Args:
        content: a shared library that exports FFI handlers `prejit_*`, verified.

    Raises:
        KernelError: this machine does not load it: its glibc is older, or code may not be mapped.
    """
    digest = digest_of(content)
    with _lock:
        if digest not in _loaded:
            names = kernels_of(content)
            library = _dlopen(content, digest)
            handlers = {
                kernel_target(name, digest): _capsule(getattr(library, KERNEL_PREFIX + name))
                for name in names
            }
            _loaded[digest] = Library(digest, handlers)
        return _loaded[digest]


def kernels_of(content: bytes) -> tuple[str, ...]:
    """The names of the kernels that a library exports, without `prejit_`; nothing is loaded.

    Raises:
        KernelError: it is no shared library.
    """
    try:
        exported = read_shared_library(content).exported
    except ValueError as error:
        raise KernelError(f"expected a shared library with kernels: {error}") from error
    own = (name for name in exported if name.startswith(KERNEL_PREFIX))
    return tuple(name.removeprefix(KERNEL_PREFIX) for name in own)


def _dlopen(content: bytes, digest: str) -> ctypes.CDLL:
    global _attempts
    descriptor = -1
    try:
        descriptor = _memory_file(content, f"prejit-kernels-{digest[7:23]}")
        # The dynamic linker takes a name that it knows for the library that it loaded under it, and numbers
        # of descriptors come again.
        _attempts += 1
        return ctypes.CDLL(f"/proc/self/fd/{'./' * _attempts}{descriptor}", os.RTLD_NOW)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or str(error)
        raise KernelError(
            f"cannot load native kernels: {reason}",
            hint="for older systems build with CXX=zig (`pip install 'prejit[kernels]'`); a build without "
            "a C++ compiler has no kernels",
        ) from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _memory_file(content: bytes, name: str) -> int:
    """A file in memory with this content, which nobody can change any more."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a kernel that does not know the flag
            raise
        descriptor = os.memfd_create(name, flags)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        with contextlib.suppress(
            OSError
        ):  # not everywhere; then only this process could write to it
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _capsule(function: Any) -> Any:
    """A PyCapsule of a C function, as jaxlib takes it (jax/_src/ffi.py, `pycapsule`)."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.cast(function, ctypes.c_void_p), None, None)
