"""An OCI image layout on disk, open for reading.

A reader follows no links, reads at most the expected size, and never opens a path outside the layout.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, Self, final

from prejit.runtime.base.files import STORE_ERRORS, Content, Identity, is_digest, map_file, read_all
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.checks.oci import check_digest

ATTEMPTS = 20
"""How often a bundle may be replaced while it is read. Opening all files takes milliseconds, a build takes
seconds."""


STORED = "bundles"
"""The directory of a machine's store that holds its bundles, each without blobs of its own."""


class ArrivingFile(Protocol):
    """A file that is read while it arrives."""

    def wait(self, end: int) -> None:
        """Wait until the bytes before a place are there."""

    def refuse(self, reason: RejectError) -> None:
        """Say that bytes that arrived are wrong: nothing is kept, and whoever waits gets the reason."""


class OpenFile(NamedTuple):
    """An open file.

    Attributes:
        path: its path, for errors.
        descriptor, identity: its descriptor, and what it was when it was opened.
        content: its map.
        arriving: waits for its bytes; None: all are there.
    """

    path: str
    descriptor: int
    identity: Identity
    content: Content
    arriving: ArrivingFile | None = None


class LayoutFiles(Protocol):
    """The small files of a layout, on this machine (`Layout`) or elsewhere (`ship.repository`).

    They say what a bundle is: `index.json`, indexes and manifests, configs, signatures.
    """

    @property
    def path(self) -> object:
        """Where the layout is, as text for messages."""

    def file_path(self, name: str) -> str:
        """Return where a file at the top of the layout is, for messages."""

    def blob_path(self, digest: str) -> str:
        """Return where a blob is, for messages."""

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a file at the top of the layout."""

    def read_blob(self, at: Descriptor) -> bytes:
        """Return a blob's bytes, which have its digest."""


class TargetFiles(LayoutFiles, Protocol):
    """All files of a bundle's targets, on this machine or on the way to it (`ship.arriving_bundle`).

    Attributes:
        blobs_root: the directory that has its `blobs`: its own, or that of a store.
        has_shared_blobs: whether its blobs are in a store, among those of other bundles.
    """

    blobs_root: Path
    has_shared_blobs: bool

    def open_blob(
        self, digest: str, size: int
    ) -> contextlib.AbstractContextManager[tuple[int, Identity]]:
        """Open a blob. Yield its file descriptor and its identity.

        Raises:
            RejectError: the blob is missing, is no regular file, or has another size.
        """

    def arrives(self, digest: str) -> ArrivingFile | None:
        """Return what waits for the bytes of a blob; None: all are there."""


@final
class Layout:
    """An OCI image layout that is open for reading. Close it, or use it in a `with` statement.

    Attributes:
        path: its directory.
        blobs_root: the directory that has its `blobs`: its own, or that of a store.
        has_shared_blobs: whether its blobs are in a store, among those of other bundles.
        is_flat: whether its blobs lie beside `index.json`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the directories, so that later reads use the same ones.

        A directory that is replaced by another meanwhile is opened again.

        Raises:
            StoreError: there is no such directory, or it is not permitted.
            RejectError: the directory is not an OCI image layout.
        """
        self.path = Path(path)
        self._blobs_path = str(self.path / "blobs" / "sha256")
        self._directories: list[int] = []
        self.blobs_root, self.has_shared_blobs, self.is_flat = self.path, False, False
        for left in reversed(range(ATTEMPTS)):
            try:
                self._open(os.fspath(path))
                return
            except RejectError:
                replaced = self.is_replaced()
                self.close()
                if not replaced or not left:
                    raise

    def _open(self, path: str) -> None:
        try:
            self._root = self._open_directory(path, None)  # an empty one is not "."
        except OSError as error:
            is_missing = error.errno == errno.ENOENT
            from prejit.runtime.base.wording import nearest_path

            guess = nearest_path(self.path, "*/") if is_missing else None
            raise StoreError(
                f"{self.path}: cannot open a bundle: {os.strerror(error.errno or 0)}",
                hint=f"did you mean {guess}?"
                if guess
                else "give a directory that `prejit build` wrote, or `prejit copy` from a .tar",
            ) from error
        # Held open until the end, so that no later index gets this inode and `is_replaced` notices each.
        self._index = self._pinned_index()
        try:
            self._blobs, self._sha256 = self._open_blobs()
        except OSError as error:
            if error.errno in STORE_ERRORS:
                self.close()
                raise StoreError(
                    f"{self.path}: cannot open blobs/sha256: {error.strerror}"
                ) from error
            raise RejectError(
                str(self.path),
                f"expected an OCI image layout, found no blobs/sha256: {os.strerror(error.errno or 0)}",
                hint="give the directory of a bundle; a build that was interrupted leaves none",
            ) from error

    def _open_blobs(self) -> tuple[int, int]:
        """Open `blobs` and the directory of the blobs in it: the layout's own, or those of a machine's store.

        A mounted artifact (`ship.mounted_forms`) has its blobs beside `index.json`, and is both.
        """
        try:
            blobs = self._open_directory("blobs", self._root, os.O_NOFOLLOW)
        except FileNotFoundError:
            if any(is_digest(f"sha256:{name}") for name in os.listdir(self._root)):
                self.is_flat, self._blobs_path = True, str(self.path)
                return self._root, self._root
            if self.path.parent.name != STORED:
                raise
            # Bundles of a store share their blobs. `..` is a directory's own, whatever its path says.
            blobs = self._open_directory("../../blobs", self._root, os.O_NOFOLLOW)
            self.blobs_root, self.has_shared_blobs = self.path.parents[1], True
            self._blobs_path = str(self.blobs_root / "blobs" / "sha256")
        return blobs, self._open_directory("sha256", blobs, os.O_NOFOLLOW)

    def _open_directory(self, name: str, parent: int | None, flags: int = 0) -> int:
        flags |= os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=parent)
        self._directories.append(descriptor)
        return descriptor

    def _pinned_index(self) -> Identity | None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open("index.json", flags, dir_fd=self._root)
        except OSError:  # reading it later raises the error
            return self._index_in(self._root)
        self._directories.append(descriptor)
        return Identity.of(os.fstat(descriptor))

    def _index_in(self, directory: int | None) -> Identity | None:
        """Return the identity of the index in an open directory; None: in the one that has the path now."""
        name = "index.json" if directory is not None else self.path / "index.json"
        try:
            return Identity.of(os.stat(name, dir_fd=directory, follow_symlinks=False))
        except OSError:
            return None

    def is_replaced(self) -> bool:
        """Return whether the index at this path has changed since the layout was opened.

        Writers rename a new index into its place before they remove a blob. So if a blob is missing and the
        index is the same, the bundle is damaged. If the index is another one, the bundle may have been
        replaced.
        """
        return self._index_in(None) != self._index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directories. Mapped blobs stay valid."""
        while self._directories:
            os.close(self._directories.pop())

    def file_path(self, name: str) -> str:
        """Return the path of a file at the top of the layout, for messages."""
        return str(self.path / name)

    def blob_path(self, digest: str) -> str:
        """Return the path of a blob, for messages."""
        return f"{self._blobs_path}/{digest.removeprefix('sha256:')}"

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a file at the top of the layout.

        Raises:
            RejectError: the file is missing, is no regular file, or is larger than max_bytes.
        """
        path = str(self.path / name)
        with self._open_file(name, self._root, path) as (descriptor, status):
            if status.st_size > max_bytes:
                raise RejectError(
                    path, f"expected at most {max_bytes} bytes, found {status.st_size}"
                )
            return read_all(descriptor, status.st_size, path)

    def read_blob(self, at: Descriptor) -> bytes:
        """Return a blob's bytes, which have its digest. Raises RejectError as `open_blob`."""
        path = self.blob_path(at.digest)
        with self.open_blob(at.digest, at.size) as (descriptor, _):
            content = read_all(descriptor, at.size, path)
        check_digest(content, at.digest, path)
        return content

    def arrives(self, digest: str) -> None:
        """See `TargetFiles.arrives`."""

    @contextlib.contextmanager
    def open_blob(self, digest: str, size: int) -> Iterator[tuple[int, Identity]]:
        """See `TargetFiles.open_blob`."""
        path = self.blob_path(digest)
        name = digest.removeprefix("sha256:")
        with self._open_file(name, self._sha256, path) as (descriptor, status):
            if status.st_size != size:
                raise RejectError(path, f"expected {size} bytes, found {status.st_size}")
            yield descriptor, Identity.of(status)

    def map_blob(self, digest: str, size: int) -> Content:
        """Return a blob as `map_file` maps it. Raises RejectError as `open_blob`."""
        with self.open_blob(digest, size) as (descriptor, _):
            return map_file(descriptor, size, self.blob_path(digest))

    @contextlib.contextmanager
    def _open_file(
        self, name: str, directory: int, path: str
    ) -> Iterator[tuple[int, os.stat_result]]:
        # O_NONBLOCK: if somebody put a FIFO there, opening it must not wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=directory)
        except OSError as error:
            if error.errno in STORE_ERRORS:
                raise StoreError(f"{path}: cannot open: {error.strerror}") from error
            what = "a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
            raise RejectError(path, f"expected a file, found: {what}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RejectError(path, "expected a regular file")
            yield descriptor, status
        finally:
            os.close(descriptor)
