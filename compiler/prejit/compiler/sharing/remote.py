"""The interface of what holds the files of a shared store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

SETTLE_SECONDS = 0.5
"""Time in which the writes of machines that all saw no file take effect. Then the last one has won."""


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
        """Return a small file; None: there is none.

        Args:
            path: its name.
            most: the number of bytes that it may have.

        Raises:
            RemoteError: it does not answer, or the file is larger.
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
        cannot promise it (`claim`).

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


def claim(remote: Remote, path: str, content: bytes) -> bool:
    """Do what `Remote.create` does, for a store that writes without a condition.

    This is Fischer's algorithm (Lamport, A fast mutual exclusion algorithm, 1987): who finds no file writes
    one, waits until the writes of all others that found none have taken effect, and reads back whose is
    there. Two machines may both succeed if one needs more than `SETTLE_SECONDS` from its look to its write.

    Args:
        remote: the store.
        path: name of the file.
        content: differs from what any other machine writes.

    Raises:
        RemoteError: the store does not answer, or does not let us write.
    """
    if remote.has(path):
        return False
    remote.write(path, content)
    time.sleep(SETTLE_SECONDS)
    return remote.read(path, len(content) + (1 << 20)) == content
