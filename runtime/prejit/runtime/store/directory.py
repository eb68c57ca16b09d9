"""The directory in which this machine keeps results between starts."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def cache_root() -> Path:
    """Where the runtime keeps what it can make again: `$PREJIT_RUNTIME_CACHE`, else the user's cache."""
    if root := os.environ.get("PREJIT_RUNTIME_CACHE"):
        return Path(root)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "prejit" / "runtime"


def read_own(path: Path, max_bytes: int) -> bytes | None:
    """A cache file that only this process's user can have put there; None where there is none.

    Others could forge what they can write, and where they can write names, link to files of ours.
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
