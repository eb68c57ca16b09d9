"""The build cache: what was made, by what it was made from. Any number of processes may share one.

    <root>/v1/blobs/sha256/<digits>        contents, named by their own digest
    <root>/v1/actions/<kind>/<digits>.json a result, named by the digest of its key
    <root>/v1/last/<kind>/<digits>.json    the last key of a name, so that a miss can be explained
    <root>/v1/temp/                        files that are being written; the locks of results that are made
    <root>/v1/in-use                       locked, shared, by every process that has the cache open

Every file appears whole by a rename, blobs before the action that names them, so a process may be
killed at any moment. What several builds want is made by one of them, whose lock the others wait for
(`Cache.making`). What is read is checked; what is damaged is deleted and made again: the cache heals itself.
A file's mtime says, to the hour, when it was last written or looked up: garbage.py goes by it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, final

from prejit.compiler.store.key import Key
from prejit.runtime.base.digests import digest_of, is_digest
from prejit.runtime.base.files import sync_directory
from prejit.runtime.errors import StoreError

VERSION = "v1"
"""Raised when a file of the last version could no longer be read. 1 (2026-11-20): the first."""
ZIG = "zig"
"""Directory of a cache that the compiler zig keeps its own in (kernel_library.py)."""

_POLL_SECONDS = 0.05
"""How often a lock is tried that another build holds."""

_NOTE_SECONDS = 3600
"""A use is noted when the last noted one is older."""


def default_root() -> Path:
    """`$PREJIT_CACHE`, else `$XDG_CACHE_HOME/prejit/build`, else `~/.cache/prejit/build`.

    Raises:
        StoreError: none of them is set and there is no home directory.
    """
    if chosen := os.environ.get("PREJIT_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path there counts as not set.
    if os.path.isabs(base):
        return Path(base, "prejit", "build")
    try:
        return Path.home() / ".cache" / "prejit" / "build"
    except RuntimeError as error:
        raise StoreError(
            "expected a directory for the build cache, found no home directory",
            hint="set PREJIT_CACHE to a directory that you can write",
        ) from error


@final
class BlobWriter:
    """Writes one blob that need not fit into memory.

    `with cache.blob_writer() as blob: blob.write(...)`; afterwards `blob.digest` is its name. The
    blob is in the cache when the block ends without an error, and not at all otherwise.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._hash = hashlib.sha256()
        self._file: BufferedWriter | None = None
        self.size = 0

    @property
    def digest(self) -> str:
        """`sha256:` and the hash of what was written so far."""
        return f"sha256:{self._hash.hexdigest()}"

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Appends content.

        Raises:
            StoreError: it cannot be written.
        """
        assert self._file is not None, "write inside the with block"
        with _storing(Path(self._file.name)):
            self._file.write(content)
        self._hash.update(content)
        self.size += memoryview(content).nbytes

    def __enter__(self) -> BlobWriter:
        self._file = self._cache._new_temp()
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
            self._cache._commit(file, self._cache._blob(self.digest))
        else:
            _discard(file)


@final
class Cache:
    """A build cache in a directory. Safe for many processes and threads."""

    def __init__(self, root: Path) -> None:
        """See `open`, which makes the directories."""
        self.root = root
        self._base = root / VERSION
        self._temp = self._base / "temp"
        self._blobs = self._base / "blobs" / "sha256"

    @classmethod
    def open(cls, root: Path | None = None) -> Cache:
        """The cache in a directory, which is made where it does not exist.

        Args:
            root: the directory; None: `default_root()`.

        Raises:
            StoreError: the directory cannot be made or written.
        """
        cache = cls((root or default_root()).absolute())
        with _storing(cache.root):
            cache._temp.mkdir(parents=True, exist_ok=True)
            cache._blobs.mkdir(parents=True, exist_ok=True)
            _discard(cache._new_temp())  # better to know now than after the first compile
            cache._sweep()
            in_use = cache._open_in_use()
            weakref.finalize(cache, os.close, in_use)
            fcntl.flock(in_use, fcntl.LOCK_SH)
        return cache

    def exists(self) -> bool:
        """Whether there is a cache in the directory."""
        return self._base.is_dir()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Keeps others from opening the cache, unless one has it open; gives whether none has.

        For a cache that was not opened itself.

        Raises:
            StoreError: the directory cannot be written.
        """
        with _storing(self.root):
            in_use = self._open_in_use()
        try:
            try:
                fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(in_use)

    @contextmanager
    def changing_names(self, how: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Held shared by who gives a file its name, alone by who looks at one and deletes it.

        Or what was new would be deleted for having been old. The system releases it with the process.

        Raises:
            OSError: the directory cannot be written.
        """
        lock = os.open(self._base / "names", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, how)
            yield
        finally:
            os.close(lock)

    @contextmanager
    def making(self, key: Key, *, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Held by whoever makes the result of a key: all others wait, and then find it in the cache.

        The system releases it with the process, so nobody waits for a maker that was killed.

        Args:
            key: of what is made.
            give_up: asked while it is waited for; true: it is wanted no more.

        Yields:
            Whether it is held, which only `give_up` prevents.

        Raises:
            StoreError: the directory cannot be written.
        """
        path = self._temp / f"{key.digest.removeprefix('sha256:')}.lock"
        while (lock := self._try_lock(path)) is None:
            if give_up():
                yield False
                return
            time.sleep(_POLL_SECONDS)
        try:
            yield True
        finally:
            with suppress(OSError):
                path.unlink()
            os.close(lock)

    def _try_lock(self, path: Path) -> int | None:
        """An open lock file that nobody else holds; None: somebody does."""
        with _storing(path):
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever held it, or swept it, removed the file: another may hold a new one by now.
                if os.path.samestat(os.fstat(lock), os.stat(path)):
                    return lock
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            return None

    def put_blob(self, content: bytes) -> str:
        """Stores content; gives its digest.

        Raises:
            StoreError: it cannot be written.
        """
        with self.blob_writer() as blob:
            blob.write(content)
        return blob.digest

    def blob_writer(self) -> BlobWriter:
        """A context manager that writes one blob piece by piece."""
        return BlobWriter(self)

    def blob_path(self, digest: str) -> Path | None:
        """The file of a blob, or None where there is none. Its content is not checked."""
        path = self._blob(digest)
        return path if path.is_file() else None

    def read_blob(self, digest: str) -> bytes | None:
        """The content of a blob, or None: there is none, or it was damaged and is deleted now.

        Raises:
            StoreError: it cannot be read.
        """
        path = self._blob(digest)
        with _reading(path), _opened(path) as file:
            if file is None:
                return None
            content = file.read()
            if digest_of(content) == digest:
                return content
            _remove_damaged(path, file)
            return None

    def verify_blob(self, digest: str) -> bool:
        """Whether a blob is there and undamaged; read in pieces. A damaged one is deleted.

        Raises:
            StoreError: it cannot be read.
        """
        path = self._blob(digest)
        with _reading(path), _opened(path) as file:
            if file is None:
                return False
            if f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == digest:
                return True
            _remove_damaged(path, file)
            return False

    def store(self, key: Key, result: dict[str, Any], *, blobs: Iterable[str] = ()) -> None:
        """Stores the result of a key, and remembers the key as the last one of its name.

        Args:
            key: what the result was made from.
            result: JSON.
            blobs: digests of the blobs that the result is worth nothing without.

        Raises:
            StoreError: it cannot be written, or one of the blobs is not there.
        """
        sizes = {digest: _size(self._blob(digest)) for digest in blobs}
        if missing := sorted(digest for digest, size in sizes.items() if size is None):
            raise StoreError(
                f"{self.root}: expected blob {missing[0]} in the build cache, found none",
                hint="something else deletes files there; build again",
            )
        body = {**_key_json(key), "result": result, "blobs": sizes}
        self._write(self._action(key), body)
        self._write(self._last(key.kind, key.name), _key_json(key))

    def lookup(self, key: Key, *, verify: bool = False) -> dict[str, Any] | None:
        """The result that was stored for a key, or None: there is none, or a blob of it is missing.

        Args:
            key: what the result would be made from.
            verify: read the result's blobs and compare their digests too, not only their sizes.

        Raises:
            StoreError: the cache cannot be read.
        """
        body = self._read(self._action(key))
        if body is None or body["ingredients"] != [list(pair) for pair in key.ingredients]:
            return None
        self._note_use(key, body["blobs"])  # first: what is noted now is not collected below us
        for digest, size in body["blobs"].items():
            if _size(self._blob(digest)) != size:
                return None
            if verify and not self.verify_blob(digest):
                return None
        result: dict[str, Any] = body["result"]
        return result

    def last_key(self, kind: str, name: str) -> Key | None:
        """The key of the last result that was stored for a name, or None.

        Raises:
            StoreError: the cache cannot be read.
        """
        body = self._read(self._last(kind, name))
        if body is None or (body["kind"], body["name"]) != (kind, name):
            return None
        return Key(kind, name, tuple((name, value) for name, value in body["ingredients"]))

    def files(self) -> Iterator[tuple[str, Path, tuple[str, ...] | None]]:
        """Every file, results first, for garbage.py.

        Returns:
            `results`, `reasons`, `contents` or `temporary files`; the path; and of a result the names of its
            contents, or None where it is damaged.
        """
        for path in self._base.glob("actions/*/*.json"):
            try:
                body = _parse(path.read_bytes())
            except FileNotFoundError:
                continue
            named = (
                None if body is None else tuple(d.removeprefix("sha256:") for d in body["blobs"])
            )
            yield "results", path, named
        for kind, pattern in (
            ("reasons", "last/*/*.json"),
            ("contents", "blobs/sha256/*"),
            ("temporary files", "temp/*"),
        ):
            yield from ((kind, path, ()) for path in self._base.glob(pattern))

    def _note_use(self, key: Key, blobs: Iterable[str]) -> None:
        action = self._action(key)
        with suppress(OSError):  # a cache that we may only read, or a blob that is not there
            if time.time() - action.stat().st_mtime > _NOTE_SECONDS:
                for path in (action, *map(self._blob, blobs), self._last(key.kind, key.name)):
                    os.utime(path)

    def _open_in_use(self) -> int:
        return os.open(self._base / "in-use", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)

    def _blob(self, digest: str) -> Path:
        if not is_digest(digest):
            raise ValueError(f"expected a sha256 digest, found {digest!r}")
        return self._blobs / digest.removeprefix("sha256:")

    def _action(self, key: Key) -> Path:
        digits = key.digest.removeprefix("sha256:")
        return self._base / "actions" / key.kind / f"{digits}.json"

    def _last(self, kind: str, name: str) -> Path:
        digits = digest_of(name.encode("utf-8", "surrogatepass")).removeprefix("sha256:")
        return self._base / "last" / kind / f"{digits}.json"

    def _write(self, path: Path, body: dict[str, Any]) -> None:
        """Writes JSON behind its own digest, so that a changed byte is noticed."""
        content = json.dumps(body, sort_keys=True, allow_nan=False).encode("ascii")
        with _storing(path):
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                sync_directory(path.parent.parent)
        file = self._new_temp()
        try:
            with _storing(path):
                file.write(f"{digest_of(content)}\n".encode() + content)
        except BaseException:
            _discard(file)
            raise
        self._commit(file, path)

    def _read(self, path: Path) -> dict[str, Any] | None:
        with _reading(path), _opened(path) as file:
            if file is None:
                return None
            body = _parse(file.read())
            if body is None:
                _remove_damaged(path, file)
            return body

    def _new_temp(self) -> BufferedWriter:
        """A new file to write to, locked for as long as this process lives and has it open."""
        while True:
            path = self._temp / secrets.token_hex(16)
            with _storing(path):
                file = path.open("xb")
                fcntl.flock(file, fcntl.LOCK_EX)
                # Another process may have swept it before it was locked.
                if path.exists():
                    return file
                file.close()

    def _commit(self, file: BufferedWriter, path: Path) -> None:
        """Gives a finished temp file its name. What was there, damaged or not, is replaced."""
        try:
            with _storing(path):
                file.flush()
                os.fsync(file.fileno())
                with self.changing_names(fcntl.LOCK_SH):
                    os.replace(file.name, path)
                sync_directory(path.parent)
        except BaseException:
            _discard(file)
            raise
        file.close()

    def _sweep(self) -> None:
        """Removes the temp files of processes that died. Those of living ones are locked."""
        for path in self._temp.iterdir():
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _parse(stored: bytes) -> dict[str, Any] | None:
    """What `_write` wrote; None: it is damaged."""
    digest, _, content = stored.partition(b"\n")
    if digest != digest_of(content).encode():
        return None
    body: dict[str, Any] = json.loads(content)
    return body


def _size(path: Path) -> int | None:
    with _reading(path):
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None


def _key_json(key: Key) -> dict[str, Any]:
    return {"kind": key.kind, "name": key.name, "ingredients": list(map(list, key.ingredients))}


def _discard(file: BufferedWriter) -> None:
    with suppress(OSError):
        os.unlink(file.name)
    with suppress(OSError):  # closing flushes, which fails again on a full disk
        file.close()


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader | None]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        yield file


def _remove_damaged(path: Path, file: BufferedReader) -> None:
    """Deletes a file unless somebody has put a new one in its place meanwhile."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            path.unlink()


@contextmanager
def _storing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = (
                "free some space, or give --cache DIR or PREJIT_CACHE a directory on another disk"
            )
        else:
            hint = "give --cache DIR, or set PREJIT_CACHE to a directory that you can write"
        raise StoreError(
            f"{path}: cannot write the build cache: {error.strerror or error}", hint=hint
        ) from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: cannot read: {error.strerror or error}",
            hint="check its permissions and the disk",
        ) from error
