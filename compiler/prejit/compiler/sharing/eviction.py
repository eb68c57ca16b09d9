"""Removing what was not used for the longest time from a shared store, until it has a given size.

Results and contents are files of their own. A build that finds a result whose contents are gone makes it
again, so any file may go at any time, also beside running builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prejit.compiler.sharing.remote import Remote, RemoteError
from prejit.runtime.errors import StoreError

_REQUESTS = 16
"""How many files are removed at the same time."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """What was removed from a shared store.

    Attributes:
        name: the store.
        removed: number of files that went, or would go.
        freed_bytes: their sizes.
        kept: number of files that stay.
        kept_bytes: their sizes.
    """

    name: str
    removed: int
    freed_bytes: int
    kept: int
    kept_bytes: int


def evict(remote: Remote, max_bytes: int, *, dry_run: bool = False) -> Evicted:
    """Remove files, the last used last, until the rest has at most so many bytes.

    Args:
        remote: the store.
        max_bytes: size of what may stay.
        dry_run: whether to remove nothing.

    Raises:
        UsageError: this kind of store cannot list its files.
        StoreError: it does not answer, or does not let us delete.
    """
    try:
        files = sorted(remote.listed(), key=lambda each: (each.used, each.path))
        total = sum(each.size for each in files)
        leaving, left = 0, total
        while left > max_bytes:
            left -= files[leaving].size
            leaving += 1
        if not dry_run:
            _remove(remote, [each.path for each in files[:leaving]])
    except RemoteError as error:
        raise StoreError(
            f"{error}: cannot make room in this store",
            hint="check that it answers, and that its credentials let you list and delete",
        ) from error
    return Evicted(remote.name, leaving, total - left, len(files) - leaving, left)


def _remove(remote: Remote, paths: Sequence[str]) -> None:
    with ThreadPoolExecutor(_REQUESTS, "prejit-evict") as pool:
        for _ in pool.map(remote.remove, paths):
            pass
