"""Blobs of a directory store: contents named by their own digest, checked when they are read."""

from __future__ import annotations

import hashlib
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import final

from prejit.compiler.store.cached_files import (
    Files,
    discard,
    opened,
    reading,
    writing,
)
from prejit.runtime.base.files import digest_of, is_digest


@final
class StoreBlobs:
    """The blobs of one store."""

    def __init__(self, files: Files) -> None:
        """Use a directory; nothing is created yet."""
        self._files = files
        self.directory = files.base / "blobs" / "sha256"

    def path(self, digest: str) -> Path:
        """Return the path of a blob, whether it exists or not.

        Raises:
            ValueError: it is not a digest.
        """
        if not is_digest(digest):
            raise ValueError(f"expected a sha256 digest, found {digest!r}")
        return self.directory / digest.removeprefix("sha256:")

    def writer(self) -> FileBlobWriter:
        """Return a context manager that writes one blob."""
        return FileBlobWriter(self._files, self)

    def read(self, digest: str) -> bytes | None:
        """Return the content of a blob; None: there is none, or it was damaged and is deleted now.

        Raises:
            StoreError: it cannot be read.
        """
        path = self.path(digest)
        with reading(path), opened(path) as file:
            if file is None:
                return None
            content = file.read()
            if digest_of(content) == digest:
                return content
            self._files.remove_damaged(path, file)
            return None

    def verify(self, digest: str) -> bool:
        """Return whether a blob exists undamaged. Reads it in pieces; deletes a damaged one.

        Raises:
            StoreError: it cannot be read.
        """
        path = self.path(digest)
        with reading(path), opened(path) as file:
            if file is None:
                return False
            if f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == digest:
                return True
            self._files.remove_damaged(path, file)
            return False


@final
class FileBlobWriter:
    """Writes one blob to a temporary file, which gets its name when the block ends without an error."""

    def __init__(self, files: Files, blobs: StoreBlobs) -> None:
        self._files = files
        self._blobs = blobs
        self._hash = hashlib.sha256()
        self._file: BufferedWriter | None = None
        self._size = 0

    @property
    def digest(self) -> str:
        """Digest of the bytes written so far."""
        return f"sha256:{self._hash.hexdigest()}"

    @property
    def size(self) -> int:
        """Number of bytes written so far."""
        return self._size

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append content.

        Raises:
            StoreError: it cannot be written.
        """
        assert self._file is not None, "write inside the with block"
        with writing(Path(self._file.name)):
            self._file.write(content)
        self._hash.update(content)
        self._size += memoryview(content).nbytes

    def __enter__(self) -> FileBlobWriter:
        self._file = self._files.new_temp()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        file, self._file = self._file, None
        assert file is not None
        if kind is None:
            self._files.commit(file, self._blobs.path(self.digest))
        else:
            discard(file)
