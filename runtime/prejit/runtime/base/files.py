"""Files on disk, read and mapped, and the identity that changes with them."""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from typing import Self

from prejit.runtime.errors import RejectError, StoreError

Content = mmap.mmap | bytes
"""The bytes of a file: its map, or `b""`, because an empty file cannot be mapped."""

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
