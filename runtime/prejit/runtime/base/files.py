"""Files on disk, read and mapped, and the identity that changes with them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from prejit.runtime.errors import RejectError, StoreError

Content = mmap.mmap | bytes
"""The bytes of a file: its map, or `b""`, because an empty file cannot be mapped."""


STORE_ERRORS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO)
"""Error numbers that do not mean that a bundle is damaged, only that it cannot be read now."""


class Identity(NamedTuple):
    """Properties of a file, as the kernel keeps them, that change whenever the file changes.

    A program cannot set ctime_ns. Any write to the file or to its times changes it.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the identity in a result of stat."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


@contextlib.contextmanager
def store_errors(where: object, what: str, *, hint: str | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError: `WHERE: cannot WHAT: the reason`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(f"{where}: cannot {what}: {reason}", hint=hint) from error


def read_all(descriptor: int, size: int, path: str) -> bytes:
    """Return `size` bytes of an open file.

    Raises:
        RejectError: the file ends before.
        StoreError: it cannot be read.
    """
    content = bytearray()
    while len(content) < size:
        with store_errors(path, "read"):
            piece = os.read(descriptor, size - len(content))
        if not piece:
            raise RejectError(path, f"expected {size} bytes, found {len(content)}")
        content += piece
    return bytes(content)


def map_file(descriptor: int, size: int, path: str) -> Content:
    """Map an open file into memory. Its pages are shared with other processes until they are written.

    Raises:
        RejectError: the file has become shorter since its size was read.
        StoreError: it cannot be mapped, because there is too little memory for example.
    """
    if size == 0:
        return b""
    try:
        # DLPack needs writable memory, so this is ACCESS_COPY; nobody writes to it.
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    except ValueError as error:
        raise RejectError(path, f"expected {size} bytes, found fewer: {error}") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot map it into memory: {error.strerror}") from error


def digest_of(content: bytes | bytearray | memoryview) -> str:
    """Return the OCI digest of bytes: `sha256:` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def is_digest(text: str) -> bool:
    """Return whether text has the form of an OCI sha256 digest."""
    head, _, digits = text.partition(":")
    return head == "sha256" and len(digits) == 64 and not set(digits) - set("0123456789abcdef")


_MEASURE_VERITY = 0xC0046686
"""FS_IOC_MEASURE_VERITY of linux/fsverity.h. It takes and returns algorithm, size and digest."""
_SHA256 = 1
_HEAD = struct.Struct("=HH")
_MAX_DIGEST_BYTES = 64


def measure(descriptor: int) -> str | None:
    """Return the fs-verity digest of an open file, as `fsverity measure` prints it, without reading the file.

    None: the kernel or the file system has no fs-verity, it is not enabled for this file, or its hash
    function is not SHA-256.
    """
    import fcntl  # a shared library, which bundles without such digests need not open

    answer = bytearray(_HEAD.pack(0, _MAX_DIGEST_BYTES) + bytes(_MAX_DIGEST_BYTES))
    try:
        fcntl.ioctl(descriptor, _MEASURE_VERITY, answer)
    except OSError:
        return None
    algorithm, size = _HEAD.unpack_from(answer)
    if algorithm != _SHA256:
        return None
    return f"sha256:{answer[_HEAD.size : _HEAD.size + size].hex()}"


def user_directory(variable: str, otherwise: str) -> Path:
    """Return prejit's directory below what an XDG variable names, else below `otherwise`, such as "~/.cache".

    Without a home it is below /nonexistent, not below a directory `~` of wherever the process runs.
    """
    base = os.environ.get(variable) or os.path.expanduser(otherwise)
    return Path("/nonexistent" if base[0] == "~" else base, "prejit")
