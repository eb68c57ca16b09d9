"""Files on disk: read, map, digest, and write so that a crash leaves the old file or the new one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import time
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter
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


def write_file(path: Path, content: bytes | Path, *, mode: int = 0o666) -> None:
    """Write a file whole or not at all: temporary file beside it, fsync, rename, fsync of the directory.

    The temporary files of the same file that killed writers left are removed.

    Args:
        path: the file; its directory exists.
        content: the bytes, or a file whose bytes are copied.
        mode: its permissions, less the umask. It has them as soon as it has its name, so that a kill leaves
            no file that others may write to.

    Raises:
        StoreError: the disk is full, or writing is not permitted.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        _remove_abandoned(path)
        with _open_new(temporary, mode) as out:
            if isinstance(content, Path):
                with open(content, "rb") as source:
                    while piece := source.read(_COPY_BYTES):
                        out.write(piece)
            else:
                out.write(content)
            out.flush()
            os.fsync(out.fileno())
            os.replace(temporary, path)  # with its lock
        sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a disk that cannot be written may also refuse this
            temporary.unlink()
        if isinstance(error, OSError):
            raise StoreError(
                f"{path}: cannot write: {error.strerror}", hint=_write_hint(error)
            ) from error
        raise


def _open_new(path: Path, mode: int) -> BufferedWriter:
    """Open a new file. Its lock lasts until it is closed, so that `_remove_abandoned` spares it."""
    while True:
        file = open(path, "xb", opener=partial(os.open, mode=mode))  # noqa: SIM115 (the caller closes it)
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is removed
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # another process may have removed it before it was locked
            return file
        file.close()


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files of a file whose writers are dead."""
    for name in os.listdir(path.parent):
        if name.startswith(f".{path.name}.") and name.endswith(".tmp"):
            with contextlib.suppress(OSError), open(path.with_name(name), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(file.name)


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
