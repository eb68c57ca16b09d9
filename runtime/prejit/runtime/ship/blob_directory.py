"""Blobs of a directory, written as they arrive: hashed on the way, resumable, once for all processes.

blobs/sha256/<hex>     whole and right: it got this name after its last byte was hashed and synced
.partial/<hex>         what has arrived of a blob; the next attempt goes on behind it
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from prejit.runtime.base.files import Identity
from prejit.runtime.base.written_files import lock_file, remove_and_unlock, sync_directory
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.ship.repository import PIECE_BYTES, Pieces, checked


class BlobDirectory:
    """The blobs below a directory, and those on the way to it.

    Attributes:
        path: the directory.
        partial: the directory of what is on the way.
        written: the blobs that this object has written, by digest.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is made until a blob is written."""
        self.path = path
        self.partial = path / ".partial"
        self.written: dict[str, Identity] = {}

    def blob(self, digest: str) -> Path:
        """Return the file of a blob."""
        return self.path / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def has(self, at: Descriptor) -> bool:
        """Return whether a blob is there, whole. Its bytes were right when it was written."""
        try:
            status = os.stat(self.blob(at.digest), follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == at.size

    def write(self, at: Descriptor, pieces: Pieces) -> None:
        """Write a blob unless it is there. Of several processes that write it, one does and the others wait.

        Raises:
            RejectError: other bytes arrive than the digest names. Nothing of them is kept.
            StoreError: they do not arrive, or the disk is full. What arrived is kept.
        """
        name = at.digest.removeprefix("sha256:")
        try:
            self.blob(at.digest).parent.mkdir(parents=True, exist_ok=True)
            with self._locked(name):
                if not self.has(at):
                    self._write(at, pieces, self.partial / name)
        except OSError as error:
            raise self._failed(error) from error

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        path = self.partial / f"{name}.lock"
        try:
            self.partial.mkdir(exist_ok=True)
            descriptor = lock_file(path)
        except (
            FileNotFoundError
        ):  # a process that has written all of its bundle has dropped the directory
            with self._locked(name):
                yield
            return
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            yield  # a file system without locks: two processes may fetch the same blob, and both are right
            return
        try:
            yield
        finally:
            remove_and_unlock(path, descriptor)

    def _write(self, at: Descriptor, pieces: Pieces, partial: Path) -> None:
        hasher = hashlib.sha256()
        with open(partial, "a+b", buffering=0) as file:
            file.seek(0)
            while piece := file.read(PIECE_BYTES):
                hasher.update(piece)
            start = file.tell()
            if start > at.size:
                hasher, start = hashlib.sha256(), 0
                file.truncate(0)
            try:
                for each in checked(at, pieces(start), str(partial), hasher):
                    view = memoryview(each)
                    while view:
                        view = view[file.write(view) :]
            except RejectError:
                file.truncate(0)
                if start:  # the wrong bytes may be those of an earlier attempt
                    self._write(at, pieces, partial)
                    return
                with contextlib.suppress(OSError):
                    partial.unlink()
                raise
            os.fsync(file.fileno())
            target = self.blob(at.digest)
            os.replace(partial, target)
            os.fchmod(file.fileno(), 0o444)  # before, a kill would leave a part that cannot go on
            self.written[at.digest] = Identity.of(os.fstat(file.fileno()))
        sync_directory(target.parent)

    def _failed(self, error: OSError) -> StoreError:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = (
            "free some space on that disk and try again: what arrived is kept" if is_full else None
        )
        return StoreError(f"{self.path}: cannot write: {error.strerror}", hint=hint)

    def keep_only(self, held: Iterable[Descriptor]) -> None:
        """Remove other blobs, and the directory of what is on the way, if nothing is."""
        kept = {self.blob(at.digest) for at in held}
        for file in (self.path / "blobs" / "sha256").iterdir():
            if file not in kept:
                with contextlib.suppress(OSError):
                    file.unlink()
        with contextlib.suppress(OSError):
            self.partial.rmdir()
