"""Files on disk: read, map, digest, and write so that a crash leaves the old file or the new one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from prejit.runtime.errors import RejectError, StoreError

Content = mmap.mmap | bytes
"""The bytes of a file: its map, or `b""`, because an empty file cannot be mapped."""

_COPY_BYTES = 1 << 20
STORE_ERRORS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO)
"""Error numbers that do not mean that a bundle is damaged, only that it cannot be read now."""


@dataclass(frozen=True, slots=True)
class Identity:
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


def read_all(descriptor: int, size: int, path: str) -> bytes:
    """Return `size` bytes of an open file.

    Raises:
        RejectError: the file ends before.
        StoreError: it cannot be read.
    """
    content = bytearray()
    while len(content) < size:
        try:
            piece = os.read(descriptor, size - len(content))
        except OSError as error:
            raise StoreError(f"{path}: cannot read: {error.strerror}") from error
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


def digest_file(descriptor: int) -> str:
    """Return the digest of an open file, read from its start."""
    return timed_digest_file(descriptor)[0]


def timed_digest_file(descriptor: int) -> tuple[str, float]:
    """Return the digest of an open file, and the seconds that reading it took."""
    hasher = hashlib.sha256()
    buffer = bytearray(_COPY_BYTES)
    offset, seconds = 0, 0.0
    while True:
        started = time.perf_counter()
        count = os.preadv(descriptor, [buffer], offset)
        seconds += time.perf_counter() - started
        if not count:
            return f"sha256:{hasher.hexdigest()}", seconds
        hasher.update(memoryview(buffer)[:count])
        offset += count


def write_file(path: Path, content: bytes | Path) -> None:
    """Write a file whole or not at all: temporary file beside it, fsync, rename, fsync of the directory.

    Args:
        path: the file; its directory exists.
        content: the bytes, or a file whose bytes are copied.

    Raises:
        StoreError: the disk is full, or writing is not permitted.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "xb") as out:
            if isinstance(content, Path):
                with open(content, "rb") as source:
                    while piece := source.read(_COPY_BYTES):
                        out.write(piece)
            else:
                out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a disk that cannot be written may also refuse this
            temporary.unlink()
        if isinstance(error, OSError):
            raise StoreError(
                f"{path}: cannot write: {error.strerror}", hint=_write_hint(error)
            ) from error
        raise


def _write_hint(error: OSError) -> str | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on that disk, or write to another; nothing was lost"
    return None


def sync_directory(path: Path) -> None:
    """Make sure that renames in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
