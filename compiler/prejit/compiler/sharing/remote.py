"""The interface of what holds the files of a shared store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeVar

_Answer = TypeVar("_Answer")

SETTLE_SECONDS = 0.5
"""Time in which the writes of machines that all saw no file take effect. Then the last one has won."""
LEASE_BYTES = 1 << 20
"""Maximum size of a file that is read to see whose it is."""
UPLOAD_BYTES_PER_SECOND = 256 << 10
"""A file may take this long to arrive at a store: a slow network is not a store that is down."""


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

    Results are at `ac/<64 digits>`, contents at `cas/<64 digits>`, the layout of Bazel's remote cache.
    """

    @property
    def name(self) -> str:
        """Its URL without passwords, for people."""

    def read(self, path: str, most: int) -> bytes | None:
        """Return a small file; None: there is none. One that is larger, or damaged, has no bytes.

        Args:
            path: its name.
            most: the number of bytes that it may have.

        Raises:
            RemoteError: it does not answer.
        """

    def download(self, path: str, write: Callable[[memoryview], object]) -> bool:
        """Read a file in pieces; return whether there is one.

        Raises:
            RemoteError: it does not answer.
        """

    def has(self, path: str) -> bool:
        """Return whether a file is there.

        Raises:
            RemoteError: it does not answer.
        """

    def write(self, path: str, content: bytes | BinaryIO) -> None:
        """Write a file. It appears whole.

        Raises:
            RemoteError: it does not answer, or does not let us write.
        """

    def create(self, path: str, content: bytes) -> bool:
        """Write a small file unless there is one; return whether the file is ours.

        Of several machines that do so at the same time, one succeeds. A store without conditional writes
        cannot promise it (`claim`). A file with the same content is ours: the answer to an earlier attempt
        was lost.

        Raises:
            RemoteError: it does not answer, or does not let us write.
        """

    def remove(self, path: str) -> bool:
        """Delete a file if it is there; return False if this kind of store deletes by itself only.

        Raises:
            RemoteError: it does not answer, or does not let us delete.
        """

    def listed(self) -> Iterator[RemoteFile]:
        """Yield all results and contents.

        Raises:
            UsageError: this kind of store cannot list its files.
            RemoteError: it does not answer.
        """


def size_of(content: bytes | BinaryIO) -> int:
    """Return the number of bytes to write; a file is read from where it stands."""
    if isinstance(content, bytes):
        return len(content)
    begin = content.tell()
    size = content.seek(0, os.SEEK_END) - begin
    content.seek(begin)
    return size


def again(
    ask: Callable[[], _Answer],
    pauses: Sequence[float],
    failure: type[RemoteError] = RemoteError,
) -> _Answer:
    """Ask a store, and once more after each pause for as long as it fails.

    Args:
        ask: sends the request.
        pauses: seconds before each further attempt.
        failure: the errors after which it is asked again.

    Raises:
        RemoteError: the last attempt failed too, or an attempt failed in another way.
    """
    for pause in pauses:
        try:
            return ask()
        except failure:
            time.sleep(pause)
    return ask()


def claim(remote: Remote, path: str, content: bytes) -> bool:
    """Do what `Remote.create` does, for a store that writes without a condition.

    This is Fischer's algorithm (Lamport, A fast mutual exclusion algorithm, 1987): who finds no file writes
    one, waits until the writes of all others that found none have taken effect, and reads back whose is
    there. The wait is twice the time from our own look to our write where that is more than
    `SETTLE_SECONDS`, so a store may be slow. Two machines may both succeed if the write of one of them takes
    that much longer than that of the other.

    Args:
        remote: the store.
        path: name of the file.
        content: differs from what any other machine writes.

    Raises:
        RemoteError: the store does not answer, or does not let us write.
    """
    began = time.monotonic()
    found = remote.read(path, LEASE_BYTES)
    if found is None:
        remote.write(path, content)
    elif found != content:
        return False
    time.sleep(max(SETTLE_SECONDS, 2 * (time.monotonic() - began)))
    return remote.read(path, LEASE_BYTES) == content
