"""A remote store that is asked again where it fails: machines that share a build cannot go on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO, final

from prejit.compiler.sharing.remote import Remote, RemoteFile, again

PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before each further attempt. A server is restarted in this time, and leases last longer."""


@final
class Patient:
    """A `Remote` whose requests are tried several times."""

    def __init__(self, remote: Remote) -> None:
        """Wrap a remote store."""
        self._remote = remote

    @property
    def name(self) -> str:
        """See `Remote.name`."""
        return self._remote.name

    def read(self, path: str, most: int) -> bytes | None:
        """See `Remote.read`."""
        return again(lambda: self._remote.read(path, most), PAUSES_SECONDS)

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

        return again(attempt, PAUSES_SECONDS)

    def has(self, path: str) -> bool:
        """See `Remote.has`."""
        return again(lambda: self._remote.has(path), PAUSES_SECONDS)

    def write(self, path: str, content: bytes | BinaryIO) -> None:
        """See `Remote.write`."""

        def attempt() -> None:
            if not isinstance(content, bytes):
                content.seek(0)
            self._remote.write(path, content)

        again(attempt, PAUSES_SECONDS)

    def create(self, path: str, content: bytes) -> bool:
        """See `Remote.create`."""
        return again(lambda: self._remote.create(path, content), PAUSES_SECONDS)

    def remove(self, path: str) -> bool:
        """See `Remote.remove`."""
        return again(lambda: self._remote.remove(path), PAUSES_SECONDS)

    def listed(self) -> Iterator[RemoteFile]:
        """See `Remote.listed`. It is tried once."""
        return self._remote.listed()
