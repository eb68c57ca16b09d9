"""Files that many machines share, by obstore: an HTTP server, S3, Google Cloud Storage, Azure, a directory.

An HTTP server is one that answers GET, HEAD and PUT: bazel-remote, nginx with WebDAV, or a bucket's own.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from prejit.compiler.sharing.remote import LEASE_BYTES, RemoteError, RemoteFile, claim, size_of
from prejit.runtime.base.written_files import sync_directory
from prejit.runtime.errors import UsageError
from prejit.runtime.ship.object_repository import open_objects

if TYPE_CHECKING:
    from obstore.store import ObjectStore

ANSWER_SECONDS = 1.0
"""How long a remote store may take to answer, and to send the next piece. Then a build goes on alone."""

_PIECE_BYTES = 1 << 20
_NOTE_SECONDS = 3600
"""A use updates the mtime of a file in a directory when the mtime is at least this many seconds old."""
_JSON = "application/json"
_SMALL_BYTES = 64 << 10
"""Files up to this size must arrive within `ANSWER_SECONDS`."""
_TRANSFER_SECONDS = 3600.0
"""Time limit of the transfer of a whole file."""
_NO_CONDITIONS = re.compile(r"status code: (400|405|501)\b")
"""How a server of the S3 API refuses a request with a condition that it does not know."""
_NO_LINKS = re.compile(r"Unable to rename file: .*\(os error (1|38|95)\)")
"""How a file system without hard links (SMB, FUSE) refuses to create a file only if there is none."""


class _TooLargeError(Exception):
    """A file has more bytes than its reader expects."""


class Objects:
    """A `Remote` in an object store."""

    def __init__(self, url: str) -> None:
        """Connect to nothing yet.

        Raises:
            UsageError: obstore is not installed, or does not know the URL.
        """
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self.name = urlunsplit(parts._replace(netloc=host))
        self._is_http = parts.scheme in ("http", "https")
        self._directory = Path(url2pathname(parts.path)) if parts.scheme == "file" else None
        self._url = url
        self._objects = _open(url, ANSWER_SECONDS)
        # Whether it creates a file only if there is none; None: nobody knows yet.
        self._arbitrates = False if self._is_http else True if self._directory else None

    def read(self, path: str, most: int) -> bytes | None:
        """See `Remote.read`."""
        content = bytearray()

        def take(piece: memoryview) -> None:
            content.extend(piece)
            if len(content) > most:
                raise _TooLargeError

        try:
            return bytes(content) if self.download(path, take) else None
        except _TooLargeError:
            return b""

    def download(self, path: str, write: Callable[[memoryview], object]) -> bool:
        """See `Remote.download`."""
        import obstore

        with self._asking(path):
            for piece in obstore.get(self._objects, path).stream(min_chunk_size=_PIECE_BYTES):
                write(memoryview(piece))
            self._note_use(path)
            return True
        return False

    def has(self, path: str) -> bool:
        """See `Remote.has`."""
        import obstore

        with self._asking(path):
            obstore.head(self._objects, path)
            self._note_use(path)  # a new result needs it
            return True
        return False

    def write(self, path: str, content: bytes | BinaryIO) -> None:
        """See `Remote.write`."""
        import obstore

        options: dict[str, Any] = {}
        if self._is_http:
            options["use_multipart"] = False  # a protocol of object stores
            if path.startswith("ac/"):  # bazel-remote reads a result as JSON where its type says so
                options["attributes"] = {"Content-Type": _JSON}
        with self._asking(path, may_be_missing=False):
            if self._directory is not None:
                _write_synced(self._directory, path, content)
            elif size_of(content) <= _SMALL_BYTES:
                obstore.put(self._objects, path, content, **options)
            else:
                asyncio.run(self._upload(path, content, options))

    def create(self, path: str, content: bytes) -> bool:
        """See `Remote.create`. Directories and object stores arbitrate; HTTP servers do not.

        Some servers of the S3 API ignore conditions. So the first file that is created is created again,
        which must fail. What a store refuses to do with a condition, it does as an HTTP server does.
        """
        try:
            if self._arbitrates is None:
                if self.read(path, LEASE_BYTES) not in (None, content):
                    return False
                if self._put_new(path, content):
                    self._arbitrates = not self._put_new(path, content)
            if self._arbitrates is not False:
                return self._put_new(path, content) or self.read(path, LEASE_BYTES) == content
        except NotImplementedError:
            self._arbitrates = False
        return claim(self, path, content)

    def _put_new(self, path: str, content: bytes) -> bool:
        """Write a file on the condition that there is none; return whether it was written."""
        import obstore

        with self._asking(path, may_be_missing=False):
            try:
                obstore.put(self._objects, path, content, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                return False
            except (obstore.exceptions.BaseError, OSError) as error:
                refusal = _NO_CONDITIONS if self._directory is None else _NO_LINKS
                if refusal.search(str(error)):
                    raise NotImplementedError from error
                raise
        return True

    def remove(self, path: str) -> bool:
        """See `Remote.remove`. HTTP servers keep or drop files as they are configured."""
        import obstore

        if not self._is_http:
            with self._asking(path):
                obstore.delete(self._objects, path)
        return not self._is_http

    def listed(self) -> Iterator[RemoteFile]:
        """See `Remote.listed`. A directory has the time of the last use, an object store that of writing."""
        import obstore

        if self._is_http:
            raise UsageError(
                f"{self.name}: expected a directory or an object store, whose files can be listed, found an "
                "HTTP server",
                hint="limit its size in the server itself: bazel-remote has --max_size",
            )
        with self._asking(""):
            for some in obstore.list(self._objects):
                for each in some:
                    if each["path"].startswith(("ac/", "cas/")):
                        used = each["last_modified"].timestamp()
                        yield RemoteFile(each["path"], each["size"], used)

    @cached_property
    def _uploads(self) -> ObjectStore:
        """A client that waits as long as a transfer may take."""
        return _open(self._url, _TRANSFER_SECONDS)

    async def _upload(self, path: str, content: bytes | BinaryIO, options: dict[str, Any]) -> None:
        """Write a large file, for as long as the store answers other requests.

        The time limit of a client runs from the begin of a request to the begin of its answer, so that of
        `_objects` would end every upload that takes longer.
        """
        import obstore

        upload = asyncio.ensure_future(obstore.put_async(self._uploads, path, content, **options))
        try:
            while not (await asyncio.wait({upload}, timeout=ANSWER_SECONDS))[0]:
                with suppress(FileNotFoundError):
                    await obstore.head_async(self._objects, path)
            upload.result()
        finally:
            upload.cancel()

    @contextmanager
    def _asking(self, path: str, *, may_be_missing: bool = True) -> Iterator[None]:
        """End the block where there is no such file, and turn any other failure into a RemoteError."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            if not (may_be_missing and isinstance(error, FileNotFoundError)):
                reason = str(error).partition("\n")[0].replace(path, "").strip()
                raise RemoteError(f"{self.name}: {path[:16]}: {reason:.300}") from error

    def _note_use(self, path: str) -> None:
        """Set the time of a file of a directory to now."""
        if self._directory is not None:
            with suppress(OSError):  # we may only read, or the file was just removed
                file = self._directory / path
                if abs(time.time() - file.stat().st_mtime) > _NOTE_SECONDS:
                    os.utime(file)


def _write_synced(directory: Path, path: str, content: bytes | BinaryIO) -> None:
    """Write a file of a directory so that it is whole after a power cut. obstore does not sync files."""
    temporary, file = directory / "temp" / secrets.token_hex(16), directory / path
    for each in (temporary, file):
        each.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("xb") as out:
            shutil.copyfileobj(BytesIO(content) if isinstance(content, bytes) else content, out)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(file.parent)


def _open(url: str, answer_seconds: float) -> ObjectStore:
    if url.startswith("file:"):
        return _open_directory(url)
    return open_objects(
        url,
        answer_seconds=answer_seconds,
        transfer_seconds=_TRANSFER_SECONDS,
        retries=False,
        headers={"Accept": f"{_JSON}, */*"},  # bazel-remote: results as JSON
    )


def _open_directory(url: str) -> ObjectStore:
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise UsageError(
            f"{url}: expected the package obstore, which reaches shared stores, found none",
            hint="pip install 'prejit[store]'",
        ) from error
    try:
        return from_url(url, mkdir=True)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{url}: expected the path of a directory, found {error!s:.300}"
        ) from error
