"""`prejit gc`: removes files that no build used for some days, and files that killed processes left behind.

It is safe beside running builds. An environment is locked by the process that makes it and by the workers in
it. The mtime of a file in the build cache is its last use (store/directory_store.py); it is checked again
just before the file is deleted. While a build has the cache open, files used in the last day stay. A build
that loses a result all the same compiles it again.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prejit.compiler.checkpoint.model_source import gguf_directories
from prejit.compiler.store.cached_files import remove_abandoned
from prejit.compiler.store.directory_store import ZIG, DirectoryStore, default_root
from prejit.compiler.targets import environments
from prejit.runtime.errors import StoreError

_DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Found:
    """A file or an environment.

    Attributes:
        kind: `environments`, `results`, `reasons`, `contents`, `compiler files`, `temporary files`, `locks`,
            `GGUF directories`.
        name: packages of an environment; path of anything else.
        size: size in bytes.
        reason: why it is removed; None: it stays.
    """

    kind: str
    name: str
    size: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Collection:
    """Result of a collection."""

    found: tuple[Found, ...]
    builds_running: bool


def collect(named: Path | None = None, *, days: float, dry_run: bool = False) -> Collection:
    """Remove environments and cache entries.

    Args:
        named: the build cache. Nothing outside it is removed, not even environments. None: the default cache,
            the environments of `environments.root`, and what was made from GGUF files.
        days: minimum days without use.
        dry_run: whether to keep everything and only report.

    Raises:
        StoreError: a directory cannot be read, or a lock cannot be written.
    """
    before = time.time() - days * _DAY_SECONDS
    cache_root = (named or default_root()).absolute()
    cache, root = DirectoryStore(cache_root), environments.root()
    in_reach = named is None or root.resolve().is_relative_to(cache_root.resolve())

    def outside(before: float) -> Iterator[Found]:
        if in_reach:
            yield from _environments(root, before, dry_run)
        if named is None:
            yield from _gguf_directories(before, dry_run)

    try:
        if not cache.exists():
            return Collection((*outside(before),), False)
        with cache.alone() as alone:
            if not alone:
                before = min(before, time.time() - _DAY_SECONDS)
            found = (
                *outside(before),
                *_files(cache, before, dry_run),
                *_compiler_files(cache, before if alone else 0.0, dry_run),
            )
        return Collection(found, not alone)
    except OSError as error:
        raise StoreError(
            f"{error.filename or cache_root}: cannot collect garbage: {error.strerror}",
            hint="check its permissions and the disk",
        ) from error


def _files(cache: DirectoryStore, before: float, dry_run: bool) -> Iterator[Found]:
    """Yield the files of the cache, results first: the blobs of a result that stays, stay too."""
    named: set[str] = set()
    for kind, path, contents in cache.files():
        try:
            seen = path.stat()
        except FileNotFoundError:
            continue
        reason = None
        if kind == "temporary files":
            reason = "left behind" if remove_abandoned(path, dry_run=dry_run) else None
        elif contents is None:
            reason = "damaged"
        elif _last_use(path, seen, dry_run) < before and path.name not in named:
            reason = "not used"
        if reason and kind != "temporary files" and not dry_run:
            reason = reason if cache.remove_unchanged(path, seen) else None
        if reason is None and contents is not None:
            named.update(contents)
        yield Found(kind, str(path), seen.st_size, reason)


def _last_use(path: Path, seen: os.stat_result, dry_run: bool) -> float:
    """Return when a file was last used, in seconds since 1970.

    A time in the future is of a clock that was wrong. The file gets the time of now, so that it grows old.
    """
    now = time.time()
    if seen.st_mtime <= now + _DAY_SECONDS:
        return seen.st_mtime
    if not dry_run:
        with suppress(OSError):
            os.utime(path)
    return now


def _compiler_files(cache: DirectoryStore, before: float, dry_run: bool) -> Iterator[Found]:
    """Yield zig's own cache, 50 s of compiling for each CPU level, which is removed whole or not at all."""
    paths = [path for path in (cache.root / ZIG).rglob("*") if path.is_file()]
    if not paths:
        return
    files = [path.stat() for path in paths]
    last_use = max(_last_use(*file, dry_run) for file in zip(paths, files, strict=True))
    reason = "not used" if last_use < before else None
    if reason and not dry_run:
        shutil.rmtree(cache.root / ZIG, ignore_errors=True)  # the next collection removes the rest
    yield Found("compiler files", str(cache.root / ZIG), sum(f.st_size for f in files), reason)


def _environments(root: Path, before: float, dry_run: bool) -> Iterator[Found]:
    suffix = environments.LOCK_SUFFIX
    if not root.is_dir():
        return
    entries = {entry.name: entry for entry in os.scandir(root)}
    for name in sorted(entries):
        if entries[name].is_dir(follow_symlinks=False):
            yield _environment(root / name, before, dry_run)
        elif name.endswith(suffix) and name.removesuffix(suffix) not in entries:
            yield Found("locks", str(root / name), 0, _remove_lock(root / name, dry_run))


def _environment(path: Path, before: float, dry_run: bool) -> Found:
    size, name = _tree_bytes(path), _described(path)
    reason = None
    with suppress(BlockingIOError), environments.locked(path, wait=False):
        try:
            marker = path / environments.MARKER
            idle = _last_use(marker, marker.stat(), dry_run) < before
        except FileNotFoundError:
            reason = "half made"
        else:
            if environments.read(path) is None:
                reason = "broken"
            elif idle:
                reason = "not used"
        if reason and not dry_run:
            environments.remove(path)
            if path.exists():
                reason = None  # another user's
            else:
                environments.lock_path(path).unlink(missing_ok=True)
    return Found("environments", name, size, reason)


def _gguf_directories(before: float, dry_run: bool) -> Iterator[Found]:
    """Yield what was made from GGUF files, also by processes that were killed and by other versions."""
    for path in sorted(gguf_directories().glob("*/*")):
        with suppress(OSError):  # another user's, or removed meanwhile
            size, last_use = _tree_bytes(path), _last_use(path, path.stat(), dry_run)
            reason = "not used" if last_use < before else None
            if reason and not dry_run:
                # No build takes half of it for the whole.
                gone = path.with_name(f"{path.name}.gone")
                shutil.rmtree(path.replace(gone))
            yield Found("GGUF directories", str(path), size, reason)


def _remove_lock(lock: Path, dry_run: bool) -> str | None:
    """Delete a lock file whose environment has gone, unless a process holds it."""
    path = lock.with_name(lock.name.removesuffix(environments.LOCK_SUFFIX))
    with suppress(BlockingIOError), environments.locked(path, wait=False):
        if path.exists():  # made meanwhile
            return None
        if not dry_run:
            lock.unlink(missing_ok=True)
        return "left behind"
    return None


def _described(path: Path) -> str:
    """Return the pinned packages of an environment, or the start of its key."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        marker = json.loads((path / environments.MARKER).read_bytes())
        return ", ".join(r for r in marker["requirements"] if "==" in r)
    return path.name[:12]


def _tree_bytes(path: Path) -> int:
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                seen = os.lstat(os.path.join(directory, name))
                total += seen.st_size if stat.S_ISREG(seen.st_mode) else 0
    return total
