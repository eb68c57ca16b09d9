"""Facts of files, paths and directories that show whether they have changed.

`sitecustomize` loads this file by its path at the start of Python, for the compiler's `process_watch`.
"""

from __future__ import annotations

import hashlib
import os
import stat

_stat = os.stat
"""As it was when this was loaded: a recording replaces it, to see the program's calls."""


def identity_of(path: str) -> list[int] | None:
    """Return size, times and inode of a file: while they stay, so does its content; None: no file."""
    try:
        found = _stat(path)
    except (OSError, ValueError):
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def kind_of(path: str) -> int:
    """Return what a path leads to, as Linux has it: a file, a directory, ...; 0: nothing."""
    try:
        return stat.S_IFMT(_stat(path).st_mode)
    except (OSError, ValueError):
        return 0


def listing_digest(path: str) -> str | None:
    """Return a digest of the names in a directory; None: it cannot be listed."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return None
    return hashlib.blake2b(
        "\0".join(names).encode(errors="surrogatepass"), digest_size=16
    ).hexdigest()
