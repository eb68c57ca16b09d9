"""Write files so that a crash leaves the old file or the new one, and lock files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from functools import partial
from io import BufferedWriter
from pathlib import Path

from prejit.runtime.errors import StoreError

_COPY_BYTES = 1 << 20


def write_file(
    path: Path, content: bytes | Path, *, mode: int = 0o666, is_synced: bool = True
) -> None:
    """Write a file whole or not at all: temporary file beside it, fsync, rename, fsync of the directory.

    The temporary files of the same file that killed writers left are removed.

    Args:
        path: the file.
        content: its bytes, or a file that has them.
        mode: its mode, less the umask. It holds as soon as the file has its name, so that a kill leaves no
            file that others may write to.
        is_synced: whether it survives a power cut. One that does not may be empty after it. To sync a file
            takes 0.1 s while the disk writes 500 MB.

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
            if is_synced:
                os.fsync(out.fileno())
            os.replace(temporary, path)  # with its lock
        if is_synced:
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
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "give a directory that this user may write to; nothing was lost"
    return None


def sync_directory(path: Path) -> None:
    """Make sure that renames in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: Path, *, shared: bool = False, wait: bool = True, mode: int = 0o600) -> int:
    """Create a lock file where there is none, lock it, and return its descriptor, which closing releases.

    A holder may remove the file before it does so. `shared`: other processes may hold a shared lock at the
    same time.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
        OSError: the file cannot be opened, or its file system has no locks.
    """
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            fcntl.flock(descriptor, operation)
            # The last holder may have removed the file, and another process may hold a new one by now.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def unlock(descriptor: int) -> None:
    """Release a lock. Closing alone leaves it to a forked process that has the same descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def remove_and_unlock(path: Path, descriptor: int) -> None:
    """Remove a lock file that this process holds, and release its lock."""
    with contextlib.suppress(OSError):
        path.unlink()
    unlock(descriptor)


@contextlib.contextmanager
def locking(descriptor: int, *, shared: bool = False) -> Iterator[None]:
    """Lock an open file or directory for a block, then close it.

    Where the file system has no locks, such as some NFS, the block runs without one.
    """
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
