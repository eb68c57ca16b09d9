"""The interface of what holds the files of a shared store."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, Protocol


class RemoteError(Exception):
    """A remote store does not answer, or refuses. The text says which and why, in one line."""


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
