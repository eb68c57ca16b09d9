"""Lock files: held by one process at a time, and released by the kernel when it ends, even by SIGKILL."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def lock_file(path: Path, *, shared: bool = False, wait: bool = True, mode: int = 0o600) -> int:
    """Create a lock file where there is none, lock it, and return its descriptor.

    Closing the descriptor releases the lock. A holder may remove the file before it does so.

    Args:
        path: the lock file, in a directory that exists.
        shared: whether other processes may hold a shared lock at the same time.
        wait: whether to wait while another process holds the lock.
        mode: permissions of a new file.

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


def remove_and_unlock(path: Path, descriptor: int) -> None:
    """Remove a lock file that this process holds, and release its lock."""
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(descriptor)


@contextlib.contextmanager
def locking(descriptor: int, *, shared: bool = False) -> Iterator[None]:
    """Lock an open file or directory for a block, then close it.

    Where the file system has no locks, such as some NFS, the block runs without one.

    Args:
        descriptor: the open file or directory.
        shared: whether other processes may hold a shared lock at the same time.
    """
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
