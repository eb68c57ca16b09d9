"""Files that this machine keeps between starts. They only save time, but for quarantines of executables.

A receipt records that this user hashed a file, that its digest was right, and the file's identity at that
time. The identity includes ctime, which the kernel sets at every change and which no program can set back.
So a receipt becomes invalid when the file is written, replaced, copied or touched. It does not detect a
disk that decays below the file system, nor a process that had the file mapped for writing, with unsaved
changes, when it was hashed. `prejit verify` uses no receipts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

from prejit.runtime.base.files import Identity, digest_of, is_digest, store_errors, user_directory
from prejit.runtime.base.process_facts import is_plain_start
from prejit.runtime.base.typed_json import from_plain, to_json
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.records import dataclass


def cache_root() -> Path:
    """Return the directory of the runtime's cache: `$PREJIT_RUNTIME_CACHE`, else one of the user's cache."""
    if root := os.environ.get("PREJIT_RUNTIME_CACHE"):
        return Path(root)
    return user_directory("XDG_CACHE_HOME", "~/.cache") / "runtime"


def is_own(status: os.stat_result) -> bool:
    """Return whether only this process's user can have written a file."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read_own(path: Path, max_bytes: int) -> bytes | None:
    """Return at most `max_bytes` of a cache file that only this process's user can have written, or None.

    Another user who may write to the file could forge it. One who may write to the directory could put a
    link to another file of ours there. Such a file counts as missing.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        directory = os.open(path.parent, flags | os.O_DIRECTORY)
        stack.callback(os.close, directory)
        descriptor = os.open(path.name, flags, dir_fd=directory)
        file = stack.enter_context(open(descriptor, "rb"))
        for status in (os.fstat(directory), os.fstat(descriptor)):
            if not is_own(status):
                return None
        return file.read(max_bytes)
    return None


def write_own(path: Path, content: bytes, *, is_synced: bool = True) -> None:
    """Write a cache file that only this user can read or write. `is_synced` as of `write_file`.

    A directory that cannot be written is no error: it costs only the time that the file would save.
    """
    from prejit.runtime.base.written_files import write_file  # few starts have anything to keep

    with contextlib.suppress(OSError, StoreError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path, content, mode=0o600, is_synced=is_synced)


_MAX_START_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 14
_MAX_RECEIPTS_BYTES = 64 << 20


def first_programs(digest: str) -> tuple[str, ...]:
    """Return the names of the programs that an earlier start of a bundle (its digest) used first.

    A start loads them at once, because most starts of a bundle are alike. A wrong guess costs only time.
    """
    if is_plain_start():
        return ()
    with contextlib.suppress(ValueError, RecursionError):
        names = json.loads(read_own(_first_programs_file(digest), _MAX_START_BYTES) or b"")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()


def remember_first_programs(digest: str, names: Sequence[str]) -> None:
    """Keep the names of the programs that a start used first, for the next start."""
    content = json.dumps(list(names)).encode()
    write_own(_first_programs_file(digest), content, is_synced=False)


def _first_programs_file(digest: str) -> Path:
    return cache_root() / "starts" / "v1" / f"{digest.removeprefix('sha256:')}.json"


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The answer of an executable (its digest) on this machine: whether it was right, and where it is.

    `difference`: what it returned instead, for people; empty: it was right.
    """

    right: bool
    bundle: str
    target: str
    program: str
    executable: str
    difference: str


def answer_file(**ingredients: object) -> Path:
    """Return the file of the kept answer that these ingredients name."""
    name = digest_of(to_json(ingredients)).removeprefix("sha256:")
    return cache_root() / "canary" / "v1" / f"{name}.json"


def read_answer(path: Path) -> KeptAnswer | None:
    """Return the kept answer in a file; None: there is none. Raise RejectError where the file is damaged."""
    if not (content := read_own(path, _MAX_ANSWER_BYTES)):
        if content is None:
            return None
        raise RejectError(str(path), "expected a kept answer, found an empty file", hint=_HINT)
    try:
        return from_plain(KeptAnswer, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise RejectError(str(path), f"expected a kept answer: {error}", hint=_HINT) from error


_HINT = "remove the file: prejit checks the executable again"


def write_answer(path: Path, answer: KeptAnswer) -> bool:
    """Write a kept answer whole. Return whether it is there now."""
    # The first result waits for it: a right answer may be lost by a power cut, and is asked again.
    write_own(path, to_json(answer), is_synced=not answer.right)
    with contextlib.suppress(RejectError):
        return read_answer(path) == answer
    return False


SETTLED_SECONDS = 2.0
"""A file that changed less than this many seconds before it was hashed gets no receipt. A second change
within the same tick of the clock would leave the same ctime ("racily clean" in git's terms)."""


@final
class Receipts:
    """The receipts for the files of one directory."""

    def __init__(self, directory: Path, *, is_shared: bool = False) -> None:
        """Read them. `is_shared`: bundles share the directory, and each keeps the receipts of the others."""
        self._is_shared = is_shared
        name = hashlib.sha256(os.fsencode(os.path.abspath(directory))).hexdigest()
        self._path = cache_root() / "receipts" / "v1" / f"{name}.json"
        self._held = self._read()
        self._valid: dict[str, tuple[int, ...]] = {}
        self._added = False

    def _read(self) -> dict[str, list[int]]:
        content = read_own(self._path, _MAX_RECEIPTS_BYTES)
        with contextlib.suppress(ValueError, RecursionError):
            held = json.loads(content or b"")
            return held if isinstance(held, dict) else {}
        return {}

    def holds(self, digest: str, identity: Identity) -> bool:
        """Return whether a receipt says that this very file had this digest."""
        if held := self._held.get(digest) == list(identity):
            self._valid[digest] = identity
        return held

    def find(self, identity: Identity) -> str | None:
        """Return the digest that a receipt gives this very file; None: there is no receipt."""
        digests = filter(is_digest, self._held)
        return next((each for each in digests if self.holds(each, identity)), None)

    def digest_of(self, path: Path) -> str:
        """Return the digest of a file, from its receipt or by hashing it. Raise StoreError if that fails."""
        from prejit.runtime.base.file_hashing import digest_file

        with store_errors(path, "read"), open(path, "rb") as file:
            identity = Identity.of(os.fstat(file.fileno()))
            if (known := self.find(identity)) is not None:
                return known
            hashed_at = time.time()
            digest = digest_file(file.fileno())
        self.add(digest, identity, hashed_at=hashed_at)
        return digest

    def add(self, digest: str, identity: Identity, *, hashed_at: float) -> None:
        """Add a receipt for a file that was hashed and had this digest.

        `identity` is the file's before it was hashed, `hashed_at` when that began, in seconds since the
        epoch.
        """
        if hashed_at - identity.ctime_ns / 1e9 > SETTLED_SECONDS:
            self.add_written(digest, identity)

    def add_written(self, digest: str, identity: Identity) -> None:
        """Add a receipt for a file that this process has written and hashed itself, and that had this digest.

        Nobody else can have changed it before: it had no name that others know.
        """
        self._valid[digest] = identity
        self._added = True

    def save(self) -> None:
        """Write the valid receipts, if any was added. Receipts of files that are gone are dropped."""
        if self._added:
            others = self._read() if self._is_shared else {}  # what others have added meanwhile
            content = json.dumps({**others, **self._valid}).encode()
            write_own(self._path, content, is_synced=False)  # the first result waits for it
