"""The interface of what holds the files of a shared store, and what is built on any of them.

`Patient` asks a store again, `claim` lets one machine create a file, and `evict` makes room. Nothing here and
in `objects` and `oci_registry` knows what the files are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeVar, final

from prejit.runtime.errors import StoreError

_Answer = TypeVar("_Answer")

SETTLE_SECONDS = 0.5
"""Time in which the writes of machines that all saw no file take effect. Then the last one has won."""
LEASE_BYTES = 1 << 20
"""Maximum size of a file that is read to see whose it is."""
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses of `Patient` before each further attempt. A server is restarted in this time, and leases last
longer."""
LEASES = f"ac/{8 * '0'}"
"""How the names of leases begin, so that `evict` knows them without reading files."""
_KEPT_SECONDS = 86_400
"""`evict` keeps leases that were written in this time before the newest file, by the clock of the store."""
_REQUESTS = 16
"""How many files `evict` removes at the same time."""


class RemoteError(Exception):
    """A remote store does not answer, or refuses. The text says which and why, in one line."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a remote store.

    Attributes:
        path: its name.
        size: bytes.
        used: time of its last use in seconds since 1970; where the store does not know it, of its writing.
    """

    path: str
    size: int
    used: float


class Remote(Protocol):
    """Files that many machines read and write, under short names. They may be wrong: anyone may write there.

    Results are at `ac/<64 digits>`, contents at `cas/<64 digits>`, the layout of Bazel's remote cache. Every
    method raises a RemoteError if the store does not answer, or does not let us do what is asked.
    """

    @property
    def name(self) -> str:
        """Its URL without passwords, for people."""

    def read(self, path: str, most: int) -> bytes | None:
        """Return a small file; None: there is none. One with more than `most` bytes, or damaged, has none."""

    def download(self, path: str, write: Callable[[memoryview], object]) -> bool:
        """Read a file in pieces; return whether there is one."""

    def has(self, path: str) -> bool:
        """Return whether a file is there."""

    def write(self, path: str, content: bytes | BinaryIO) -> None:
        """Write a file. It appears whole."""

    def create(self, path: str, content: bytes) -> bool:
        """Write a small file unless there is one; return whether the file is ours.

        If several machines do so at the same time, one succeeds. A store without conditional writes
        cannot promise it (`claim`). A file with the same content is ours: the answer to an earlier attempt
        was lost.
        """

    def remove(self, path: str) -> bool:
        """Delete a file if it is there; return False if this kind of store deletes by itself only."""

    def listed(self) -> Iterator[RemoteFile]:
        """Yield all files.

        Raises:
            UsageError: this kind of store cannot list its files.
        """


def size_of(content: bytes | BinaryIO) -> int:
    """Return the number of bytes to write; a file is read from where it stands."""
    if isinstance(content, bytes):
        return len(content)
    begin = content.tell()
    size = content.seek(0, os.SEEK_END) - begin
    content.seek(begin)
    return size


def _again(ask: Callable[[], _Answer]) -> _Answer:
    """Ask a store, and once more after each pause for as long as it fails."""
    for pause in PAUSES_SECONDS:
        try:
            return ask()
        except RemoteError:
            time.sleep(pause)
    return ask()


def claim(remote: Remote, path: str, content: bytes) -> bool:
    """Do what `Remote.create` does, for a store that writes without a condition.

    This is Fischer's algorithm (Lamport, A fast mutual exclusion algorithm, 1987): who finds no file writes
    one, waits until the writes of all others that found none have taken effect, and reads back whose is
    there. The wait is twice the time from our own look to our write where that is more than
    `SETTLE_SECONDS`, so a store may be slow. Two machines may both succeed if the write of one of them takes
    that much longer than that of the other. Each machine must write other content.
    """
    began = time.monotonic()
    found = remote.read(path, LEASE_BYTES)
    if found is None:
        remote.write(path, content)
    elif found != content:
        return False
    time.sleep(max(SETTLE_SECONDS, 2 * (time.monotonic() - began)))
    return remote.read(path, LEASE_BYTES) == content


@final
class Patient:
    """A `Remote` whose requests are tried several times.

    Machines that share a build cannot go on without it.
    """

    def __init__(self, remote: Remote) -> None:
        """Wrap a remote store. Its files are listed once."""
        self._remote = remote
        self.name, self.listed = remote.name, remote.listed

    def read(self, path: str, most: int) -> bytes | None:
        """See `Remote.read`."""
        return _again(lambda: self._remote.read(path, most))

    def download(self, path: str, write: Callable[[memoryview], object]) -> bool:
        """See `Remote.download`. A further attempt skips what was written before."""
        written = 0

        def attempt() -> bool:
            place = 0

            def take(piece: memoryview) -> None:
                nonlocal place, written
                begin = max(0, written - place)
                place += piece.nbytes
                if begin < piece.nbytes:
                    write(piece[begin:])
                    written = place

            return self._remote.download(path, take)

        return _again(attempt)

    def has(self, path: str) -> bool:
        """See `Remote.has`."""
        return _again(lambda: self._remote.has(path))

    def write(self, path: str, content: bytes | BinaryIO) -> None:
        """See `Remote.write`."""

        def attempt() -> None:
            if not isinstance(content, bytes):
                content.seek(0)
            self._remote.write(path, content)

        _again(attempt)

    def create(self, path: str, content: bytes) -> bool:
        """See `Remote.create`."""
        return _again(lambda: self._remote.create(path, content))

    def remove(self, path: str) -> bool:
        """See `Remote.remove`."""
        return _again(lambda: self._remote.remove(path))


@dataclass(frozen=True, slots=True)
class Evicted:
    """The results that were removed from a shared store."""

    name: str
    removed: int
    freed_bytes: int
    kept: int
    kept_bytes: int


def evict(remote: Remote, max_bytes: int, *, dry_run: bool = False) -> Evicted:
    """Remove files, the last used last, until the rest has at most so many bytes.

    Any result or content may go at any time, also beside running builds: a build makes again what is gone.
    Leases stay for a day. Without that of a machine that died, the lease of the machine that took over counts
    for nobody.

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
            if not each.path.startswith(LEASES) or files[-1].used - each.used > _KEPT_SECONDS:
                gone.append(each.path)
                left -= each.size
        if not dry_run:
            with ThreadPoolExecutor(_REQUESTS, "prejit-evict") as pool:
                list(pool.map(remote.remove, gone))
    except RemoteError as error:
        raise StoreError(
            f"{error}: cannot make room in this store",
            hint="check that it answers, and that its credentials let you list and delete",
        ) from error
    return Evicted(remote.name, len(gone), total - left, len(files) - len(gone), left)
