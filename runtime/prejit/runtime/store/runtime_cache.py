"""The directory in which this machine keeps results between starts."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from prejit.runtime.base.files import write_file
from prejit.runtime.errors import StoreError


def cache_root() -> Path:
    """Return the directory of the runtime's cache: `$PREJIT_RUNTIME_CACHE`, else one of the user's cache."""
    if root := os.environ.get("PREJIT_RUNTIME_CACHE"):
        return Path(root)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "prejit" / "runtime"


def read_own(path: Path, max_bytes: int) -> bytes | None:
    """Return the content of a cache file that only this process's user can have written; None: there is none.

    Another user who may write to the file could forge it. One who may write to the directory could put a
    link to another file of ours there. Such a file counts as missing.

    Args:
        path: the file.
        max_bytes: read at most this much.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        directory = os.open(path.parent, flags | os.O_DIRECTORY)
        stack.callback(os.close, directory)
        descriptor = os.open(path.name, flags, dir_fd=directory)
        file = stack.enter_context(open(descriptor, "rb"))
        for status in (os.fstat(directory), os.fstat(descriptor)):
            writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if status.st_uid != os.geteuid() or writable:
                return None
        return file.read(max_bytes)
    return None


def write_own(path: Path, content: bytes) -> None:
    """Write a cache file that only this user can read or write.

    A directory that cannot be written is no error: it costs only the time that the file would save.
    """
    with contextlib.suppress(OSError, StoreError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path, content, mode=0o600)
