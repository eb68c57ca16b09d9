"""Removing what was not used for the longest time from a shared store, until it has a given size.

Results and contents are files of their own. A build that finds a result whose contents are gone makes it
again, so any of them may go at any time, also beside running builds. Leases stay for a day: without that of
a machine that died, the lease of the machine that took over counts for nobody.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prejit.compiler.sharing.leases import PREFIX as LEASES
from prejit.compiler.sharing.remote import Remote, RemoteError
from prejit.runtime.errors import StoreError

_REQUESTS = 16
"""How many files are removed at the same time."""
_KEPT_SECONDS = 86_400
"""Leases stay that were written in this time before the newest file, by the clock of the store."""


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
    """Remove files, the last used last, until the rest has at most so many bytes. Leases stay for a day.

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
        total = left = sum(each.size for each in files)
        gone = list[str]()
        for each in files:
            if left <= max_bytes:
                break
            is_lease = each.path.startswith(LEASES)
            if not is_lease or files[-1].used - each.used > _KEPT_SECONDS:
                gone.append(each.path)
                left -= each.size
        if not dry_run:
            with ThreadPoolExecutor(_REQUESTS, "prejit-evict") as pool:
                for _ in pool.map(remote.remove, gone):
                    pass
    except RemoteError as error:
        raise StoreError(
            f"{error}: cannot make room in this store",
            hint="check that it answers, and that its credentials let you list and delete",
        ) from error
    return Evicted(remote.name, len(gone), total - left, len(files) - len(gone), left)
