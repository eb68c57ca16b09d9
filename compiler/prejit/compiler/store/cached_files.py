"""Files of a directory store: each appears whole, by a rename, and is checked when it is read.

Blobs are contents named by their own digest; `Files.write_json` writes results.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader, BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, final

from prejit.runtime.base.files import digest_of, is_digest, store_errors
from prejit.runtime.base.written_files import locking, sync_directory
from prejit.runtime.errors import StoreError


@final
class Files:
    """The files below one directory."""

    def __init__(self, base: Path) -> None:
        """Use a directory; nothing is created yet."""
        self.base = base
        self.temp = base / "temp"
        self.blobs = base / "blobs" / "sha256"

    def new_temp(self) -> BufferedWriter:
        """Open a new temporary file. Its lock lasts until it is closed, so `remove_abandoned` spares it."""
        while True:
            path = self.temp / secrets.token_hex(16)
            with writing(path):
                file = path.open("xb")
                fcntl.flock(file, fcntl.LOCK_EX)
                # Another process may have removed it before it was locked.
                if path.exists():
                    return file
                file.close()

    def commit(self, file: BufferedWriter, path: Path) -> None:
        """Rename a finished temporary file. It replaces what was there, damaged or not."""
        try:
            with writing(path):
                file.flush()
                os.fsync(file.fileno())
                with self.changing_names(shared=True):
                    os.replace(file.name, path)
                sync_directory(path.parent)
        except BaseException:
            discard(file)
            raise
        file.close()

    @contextmanager
    def changing_names(self, *, shared: bool) -> Iterator[None]:
        """Lock the names of files: shared to rename a file, alone to check a file and delete it.

        Without the lock, a file that replaced an old one between check and deletion would be deleted.
        """
        path = self.base / "names"
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        with locking(lock, shared=shared):
            yield

    def sweep(self) -> None:
        """Remove the temporary files of processes that died."""
        for path in self.temp.iterdir():
            with suppress(OSError):
                remove_abandoned(path)

    def write_json(self, path: Path, body: Mapping[str, Any]) -> None:
        """Write JSON behind its own digest, so that `read_json` notices a changed byte."""
        content = json.dumps(body, sort_keys=True, allow_nan=False).encode("ascii")
        with writing(path):
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                sync_directory(path.parent.parent)
        file = self.new_temp()
        try:
            with writing(path):
                file.write(f"{digest_of(content)}\n".encode() + content)
        except BaseException:
            discard(file)
            raise
        self.commit(file, path)

    def read_json(self, path: Path) -> dict[str, Any] | None:
        """Return what `write_json` wrote; None: there is no file, or it was damaged and is deleted now."""
        with reading(path), opened(path) as file:
            if file is None:
                return None
            body = parse_json(file.read())
            if body is None:
                self.remove_damaged(path, file)
            return body

    def remove_damaged(self, path: Path, file: BufferedReader) -> None:
        """Delete a file, unless another process has replaced it meanwhile."""
        with suppress(FileNotFoundError), self.changing_names(shared=False):
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                path.unlink()

    def blob_path(self, digest: str) -> Path:
        """Return the path of a blob, whether it exists or not.

        Raises:
            ValueError: it is not a digest.
        """
        if not is_digest(digest):
            raise ValueError(f"expected a sha256 digest, found {digest!r}")
        return self.blobs / digest.removeprefix("sha256:")

    def read_blob(self, digest: str) -> bytes | None:
        """Return the content of a blob; None: there is none, or it was damaged and is deleted now.

        Raises:
            StoreError: it cannot be read.
        """
        path = self.blob_path(digest)
        with reading(path), opened(path) as file:
            if file is not None:
                content = file.read()
                if digest_of(content) == digest:
                    return content
                self.remove_damaged(path, file)
        return None

    def verify_blob(self, digest: str) -> bool:
        """Return whether a blob exists undamaged. Reads it in pieces; deletes a damaged one.

        Raises:
            StoreError: it cannot be read.
        """
        path = self.blob_path(digest)
        with reading(path), opened(path) as file:
            if file is not None:
                if f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == digest:
                    return True
                self.remove_damaged(path, file)
        return False


@final
class BlobWriter:
    """Writes one blob piece by piece: `with store.blob_writer() as blob: blob.write(...)`.

    The blob is in the store when the block ends without an error, and not at all otherwise.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._hash = hashlib.sha256()
        self._file: BufferedWriter | None = None
        self.size = 0
        """Number of bytes written so far."""

    @property
    def digest(self) -> str:
        """Digest of the bytes written so far."""
        return f"sha256:{self._hash.hexdigest()}"

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append content.

        Raises:
            StoreError: it cannot be written.
        """
        assert self._file is not None, "write inside the with block"
        with writing(Path(self._file.name)):
            self._file.write(content)
        self._hash.update(content)
        self.size += memoryview(content).nbytes

    def __enter__(self) -> BlobWriter:
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
            self._files.commit(file, self._files.blob_path(self.digest))
        else:
            discard(file)


def parse_json(stored: bytes) -> dict[str, Any] | None:
    """Return the JSON in the bytes of a file that `Files.write_json` wrote; None: it is damaged."""
    digest, _, content = stored.partition(b"\n")
    if digest != digest_of(content).encode():
        return None
    return json.loads(content)


def size_of(path: Path) -> int | None:
    """Return the size of a file; None: there is none."""
    with reading(path), suppress(FileNotFoundError):
        return path.stat().st_size
    return None


def discard(file: BufferedWriter) -> None:
    """Delete and close a temporary file."""
    with suppress(OSError):
        os.unlink(file.name)
    with suppress(OSError):  # closing flushes, which fails again on a full disk
        file.close()


def remove_abandoned(path: Path, *, dry_run: bool = False) -> bool:
    """Delete a temporary file unless a living process holds its lock; return whether it was abandoned.

    Args:
        path: the file.
        dry_run: whether to keep an abandoned file too.
    """
    with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not dry_run:
            path.unlink()
        return True
    return False


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader | None]:
    """Open a file to read; None: there is none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        yield file


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        hint = "give --cache DIR, or set PREJIT_CACHE to a directory that you can write"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = (
                "free some space, or give --cache DIR or PREJIT_CACHE a directory on another disk"
            )
        raise StoreError(
            f"{path}: cannot write the build cache: {error.strerror or error}", hint=hint
        ) from error


reading = partial(
    store_errors, what="read the build cache", hint="check its permissions and the disk"
)
"""Turns an OSError of a block into a StoreError that says what to do."""
