"""A store in a directory. Any number of processes may share one.

    <root>/v1/blobs/sha256/<digits>        contents, named by their own digest
    <root>/v1/actions/<kind>/<digits>.json a result, named by the digest of its key
    <root>/v1/last/<kind>/<digits>.json    the last key of a name, which explains a miss
    <root>/v1/temp/                        files being written; locks of results being made
    <root>/v1/in-use                       locked, shared, by every process that has the store open
    <root>/v1/names                        locked while a file gets its name or is deleted
    <root>/v1/secret-<user>                32 random bytes, for that user's eyes only: the key of `seal`

Every file appears whole by a rename, blobs before the result that names them, so a process may be killed at
any moment. When several builds need a result, one makes it and the others wait for its lock
(`DirectoryStore.making`). Reading checks digests; a damaged file is deleted and made again. The mtime of a
file is the time of its last use, to the hour; `prejit gc` removes files by it.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from prejit.compiler.store.build_cache_key import SEALED, Key
from prejit.compiler.store.cached_files import (
    BlobWriter,
    Files,
    discard,
    opened,
    parse_json,
    reading,
    size_of,
    writing,
)
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.written_files import lock_file, remove_and_unlock, write_file
from prejit.runtime.errors import StoreError

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

LOCAL = "local"
"""The name of the store on this machine."""
VERSION = "v1"
"""Rises when files of the last version can no longer be read. 1 (2026-11-20): the first."""
ZIG = "zig"
"""Directory below the root in which the compiler zig keeps its own cache (native/kernel_library.py)."""

_SECRET_BYTES = 32
"""Size of the secret of `DirectoryStore.seal`."""

_POLL_SECONDS = 0.05
"""Interval at which a build tries the lock that another build holds."""

_NOTE_SECONDS = 3600
"""A use updates a file's mtime when the mtime is at least this many seconds old."""


def default_root() -> Path:
    """Return `$PREJIT_CACHE`, else `$XDG_CACHE_HOME/prejit/build`, else `~/.cache/prejit/build`.

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


class DirectoryStore:
    """A `Store` in a directory."""

    def __init__(self, root: Path, namespace: str = "") -> None:
        """Use a directory that exists; `open` creates it where it does not."""
        self.root = root
        self.namespace = namespace
        self._base = root / VERSION
        self._files = Files(self._base)

    @classmethod
    def open(cls, root: Path | None = None, namespace: str = "") -> Self:
        """Open the store in a directory, which is created where it does not exist.

        Raises:
            StoreError: the directory cannot be created or written.
        """
        store = cls((root or default_root()).absolute(), namespace)
        with writing(store.root):
            store._files.temp.mkdir(parents=True, exist_ok=True)
            store._files.blobs.mkdir(parents=True, exist_ok=True)
            discard(store._files.new_temp())  # fail now rather than after the first compile
            store._files.sweep()
            in_use = lock_file(store._in_use, shared=True, mode=0o666)
            weakref.finalize(store, os.close, in_use)
        return store

    def exists(self) -> bool:
        """Return whether the directory holds a store."""
        return self._base.is_dir()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Prevent other processes from opening the store, unless one has it open.

        Call it on a store that this process has not opened.

        Yields:
            Whether no other process has the store open.
        """
        in_use = _try_lock(self._in_use, self.root)
        try:
            yield in_use is not None
        finally:
            if in_use is not None:
                os.close(in_use)

    @contextmanager
    def making(self, key: Key, *, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """See `Store.making`."""
        path = self._files.temp / f"{key.digest.removeprefix('sha256:')}.lock"
        while (lock := _try_lock(path, path)) is None:
            if give_up():
                yield False
                return
            time.sleep(_POLL_SECONDS)
        try:
            yield True
        finally:
            remove_and_unlock(path, lock)

    def put_blob(self, content: bytes) -> str:
        """See `Store.put_blob`."""
        with self.blob_writer() as blob:
            blob.write(content)
        return blob.digest

    def blob_writer(self) -> BlobWriter:
        """See `Store.blob_writer`."""
        return BlobWriter(self._files)

    def blob_path(self, digest: str) -> Path | None:
        """See `Store.blob_path`."""
        path = self._files.blob_path(digest)
        return path if path.is_file() else None

    def read_blob(self, digest: str) -> bytes | None:
        """See `Store.read_blob`."""
        return self._files.read_blob(digest)

    def open_blob(self, digest: str) -> BinaryIO | None:
        """Open a blob to read, unchecked; None: there is none. A file that is deleted meanwhile stays whole.

        Raises:
            StoreError: it cannot be read.
        """
        path = self._files.blob_path(digest)
        with reading(path), suppress(FileNotFoundError):
            return path.open("rb")
        return None

    def put(self, key: Key, result: Mapping[str, Any], *, blobs: Iterable[str] = ()) -> None:
        """See `Store.put`."""
        sizes = {digest: size_of(self._files.blob_path(digest)) for digest in blobs}
        if missing := sorted(digest for digest, size in sizes.items() if size is None):
            raise StoreError(
                f"{self.root}: expected blob {missing[0]} in the build cache, found none",
                hint="another program deletes files there; build again",
            )
        body = {**_key_json(key), "result": result, "blobs": sizes}
        self._files.write_json(self._action(key), body)
        self._files.write_json(self._last(key.kind, key.name), _key_json(key))

    def get(self, key: Key, *, verify: bool = False) -> dict[str, Any] | None:
        """See `Store.get`."""
        found = self._get(key, verify=verify)
        _log.debug("%s %s: %s", key.kind, key.name, "not here" if found is None else "here")
        return found

    def _get(self, key: Key, *, verify: bool) -> dict[str, Any] | None:
        body = self._files.read_json(self._action(key))
        if body is None or body["ingredients"] != _key_json(key)["ingredients"]:
            return None
        self._note_use(key, body["blobs"])  # first: `prejit gc` spares what was just used
        for digest, size in body["blobs"].items():
            if size_of(self._files.blob_path(digest)) != size:
                return None
            if verify and not self._files.verify_blob(digest):
                return None
        return body["result"]

    def map(self, ask: Callable[[_Item], _Answer], items: Iterable[_Item]) -> Iterator[_Answer]:
        """See `Store.map`."""
        return map(ask, items)

    def where(self, key: Key) -> str | None:
        """See `Store.where`."""
        return None if self.get(key, verify=True) is None else LOCAL

    def last_result(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """See `Store.last_result`."""
        for key in self.last_keys(kind, name):
            if (body := self._files.read_json(self._action(key))) is not None:
                return body["result"]
        return None

    def last_keys(self, kind: str, name: str) -> tuple[Key, ...]:
        """See `Store.last_keys`."""
        body = self._files.read_json(self._last(kind, name))
        if body is None or (body["kind"], body["name"]) != (kind, name):
            return ()
        return (Key(kind, name, tuple((name, value) for name, value in body["ingredients"])),)

    def seal(self, text: str) -> str:
        """See `Store.seal`."""
        content = text.encode("utf-8", "surrogatepass")
        return f"{SEALED}{hmac.digest(self._secret, content, 'sha256').hex()}"

    @cached_property
    def _secret(self) -> bytes:
        """The secret of this user, made at the first use.

        Where nothing can be written, it is one for this process: what is sealed is then found by nobody.
        """
        path = self._base / f"secret-{os.getuid()}"
        if (found := _read_secret(path)) is not None:
            return found
        made = secrets.token_bytes(_SECRET_BYTES)
        with suppress(StoreError, OSError), self._files.changing_names(shared=False):
            if (found := _read_secret(path)) is not None:
                return found  # another process was faster
            write_file(path, made, mode=0o600)
        return made

    def blobs_of(self, key: Key) -> tuple[str, ...] | None:
        """Return the digests of the blobs that the result of a key needs; None: there is no result."""
        body = self._files.read_json(self._action(key))
        return None if body is None else tuple(body["blobs"])

    def files(self) -> Iterator[tuple[str, Path, tuple[str, ...] | None]]:
        """Yield every file, results first, for `prejit gc`.

        Yields:
            The kind of file (`results`, `reasons`, `contents` or `temporary files`); its path; and the file
            names of the blobs that a result needs, or None where the result is damaged.
        """
        for path in self._base.glob("actions/*/*.json"):
            try:
                body = parse_json(path.read_bytes())
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

    def remove_unchanged(self, path: Path, seen: os.stat_result) -> bool:
        """Delete a file that nobody used or replaced since `seen`; return whether it is gone."""
        with suppress(FileNotFoundError), self._files.changing_names(shared=False):
            now = path.stat()
            if not os.path.samestat(now, seen) or now.st_mtime != seen.st_mtime:
                return False
            path.unlink()
        return True

    def _note_use(self, key: Key, blobs: Iterable[str]) -> None:
        action = self._action(key)
        with suppress(OSError):  # a store that we may only read, or a blob that is missing
            # A time in the future is of a clock that was wrong.
            if abs(time.time() - action.stat().st_mtime) > _NOTE_SECONDS:
                named = map(self._files.blob_path, blobs)
                for path in (action, *named, self._last(key.kind, key.name)):
                    os.utime(path)

    @property
    def _in_use(self) -> Path:
        return self._base / "in-use"

    def _action(self, key: Key) -> Path:
        digits = key.digits_in(self.namespace)
        return self._base / "actions" / key.kind / f"{digits}.json"

    def _last(self, kind: str, name: str) -> Path:
        digits = digest_of(name.encode("utf-8", "surrogatepass")).removeprefix("sha256:")
        return self._base / "last" / kind / f"{digits}.json"


def _read_secret(path: Path) -> bytes | None:
    with reading(path), opened(path) as file:
        found = None if file is None else file.read()
    return found if found is not None and len(found) == _SECRET_BYTES else None


def _try_lock(path: Path, named: Path) -> int | None:
    """Return the descriptor of a locked lock file; None: another process holds the lock."""
    with writing(named), suppress(BlockingIOError):
        return lock_file(path, wait=False, mode=0o666)
    return None


def _key_json(key: Key) -> dict[str, Any]:
    return {"kind": key.kind, "name": key.name, "ingredients": list(map(list, key.ingredients))}
