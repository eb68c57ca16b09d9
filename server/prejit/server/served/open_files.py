"""The number of files that this process may have open, of which every connection is one."""

from __future__ import annotations

import contextlib
import resource

_MAX_FILES = 65_536


def allow_many_connections() -> None:
    """Raise the soft limit of open files, whose default is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
