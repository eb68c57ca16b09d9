"""Digests of the files of a checkpoint, made while its tensors are read: the disk is read once."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import final

from prejit.compiler.checkpoint.tensor_files import Reading
from prejit.runtime.base.files import Identity, digest_of, store_errors
from prejit.runtime.errors import CheckpointError
from prejit.runtime.machine.kept_files import Receipts

_BLOCK_BYTES = 1 << 20
_OUTLINE_BYTES = 64 << 10
"""Bytes at the end of a file that tell it from others of its size. They are values, names come first."""


def watching(files: Mapping[Path, HashedFile]) -> Reading:
    """Return what readers call, so that each file is hashed up to what they read next."""

    def read_ahead(path: Path, start: int, end: int) -> None:
        files[path].read_ahead(start, end)

    return read_ahead


@final
class HashedFile:
    """A file whose digest comes from a receipt, or is made while others read the file, in any thread."""

    def __init__(self, path: Path) -> None:
        """Look for a receipt. Nothing is hashed yet.

        Raises:
            StoreError: there is no such file.
        """
        self._path = path
        with store_errors(path, "read"):
            self._identity = Identity.of(path.stat())
        self._began = time.time()
        # Of this file alone: saving drops what it was not asked for.
        self._receipts = Receipts(path)
        self._digest = self._receipts.find(self._identity)
        self._hasher = hashlib.sha256()
        self._lock = threading.Lock()  # guards the hasher: rows of a matrix are rounded in threads
        self.hashed_bytes = 0
        """Number of bytes hashed so far. A file with a receipt is not hashed."""

    @property
    def is_known(self) -> bool:
        """Whether the digest is known."""
        return self._digest is not None

    def read_ahead(self, start: int, end: int) -> None:
        """Hash up to the end of bytes that are read next, which are in memory then.

        Bytes far ahead are read without it, and hashed when their turn comes. Otherwise all that lies before
        them would have to stay in memory until it is read.

        Raises:
            CheckpointError, StoreError: as `check_unchanged`. To read a mapped file that became shorter would
                end the process.
        """
        self.check_unchanged()
        if not self.is_known and start - self.hashed_bytes <= self._identity.size // 2:
            self._hash_to(end)

    def digest(self) -> str:
        """Return the digest; what was not read yet is hashed now.

        Raises:
            CheckpointError, StoreError: as `check_unchanged`.
        """
        if self._digest is None:
            self._hash_to(self._identity.size)
            self.check_unchanged()
            self._digest = f"sha256:{self._hasher.hexdigest()}"
            self._receipts.add(self._digest, self._identity, hashed_at=self._began)
            self._receipts.save()
        return self._digest

    def outline(self) -> str:
        """Return the size and the digest of the last bytes. Files of one outline are most likely equal."""
        size = self._identity.size
        with store_errors(self._path, "read"), self._path.open("rb") as file:
            file.seek(max(0, size - _OUTLINE_BYTES))
            return f"{size} {digest_of(file.read(_OUTLINE_BYTES))}"

    def check_unchanged(self) -> None:
        """Check that the file is still the one that was found.

        Raises:
            CheckpointError: it changed.
            StoreError: it is gone.
        """
        with store_errors(self._path, "read"):
            now = Identity.of(self._path.stat())
        if now != self._identity:
            raise CheckpointError(
                f"{self._path}: it changed while the build read it",
                hint="build again when the file is whole",
            )

    def _hash_to(self, end: int) -> None:
        with self._lock:
            if end <= self.hashed_bytes:
                return
            block = bytearray(_BLOCK_BYTES)
            with store_errors(self._path, "read"), self._path.open("rb", buffering=0) as file:
                file.seek(self.hashed_bytes)
                while self.hashed_bytes < end and (count := file.readinto(block)):
                    self._hasher.update(memoryview(block)[:count])
                    self.hashed_bytes += count
