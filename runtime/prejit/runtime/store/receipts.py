"""Receipts of earlier full verifications, so that gigabytes are not hashed at every start.

A receipt says: this process's user hashed this file, and it was right; the file's identity was this one.
The identity holds ctime, which the kernel sets at every change and which no program can set back. So a
receipt stops holding as soon as the file is written, replaced, copied or touched. It does not see
a disk that decays below the file system, nor a process that already held the file mapped for writing, with
unsaved changes, when it was hashed: `prejit verify` always hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import astuple
from pathlib import Path
from typing import final

from prejit.runtime.base.files import Identity, digest_file, write_file
from prejit.runtime.errors import StoreError
from prejit.runtime.store.directory import cache_root, read_own

SETTLED_SECONDS = 2.0
"""A file that changed less than this before it was hashed gets no receipt: a second change within the
clock tick of the first would leave the same ctime ("racily clean" in git's terms)."""

_MAX_BYTES = 64 << 20


@final
class Receipts:
    """The receipts for the files of one directory."""

    def __init__(self, directory: Path) -> None:
        name = hashlib.sha256(os.fsencode(os.path.abspath(directory))).hexdigest()
        self._path = cache_root() / "receipts" / "v1" / f"{name}.json"
        self._held = self._read()
        self._valid: dict[str, tuple[int, ...]] = {}
        self._added = False

    def _read(self) -> dict[str, list[int]]:
        content = read_own(self._path, _MAX_BYTES)
        with contextlib.suppress(ValueError, RecursionError):
            held = json.loads(content or b"")
            return held if isinstance(held, dict) else {}
        return {}

    def holds(self, digest: str, identity: Identity) -> bool:
        """Whether this very file was hashed before and had this digest."""
        held = self._held.get(digest) == list(astuple(identity))
        if held:
            self._valid[digest] = astuple(identity)
        return held

    def digest_of(self, path: Path) -> str:
        """The digest of a file: from its receipt, or hashed now.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            with open(path, "rb") as file:
                identity = Identity.of(os.fstat(file.fileno()))
                for digest in self._held:
                    if self.holds(digest, identity):
                        return digest
                digest = digest_file(file.fileno())
        except OSError as error:
            raise StoreError(f"{path}: cannot read: {error.strerror}") from error
        self.add(digest, identity)
        return digest

    def add(self, digest: str, identity: Identity) -> None:
        """Notes that the file was hashed just now and had this digest."""
        if time.time() - identity.ctime_ns / 1e9 > SETTLED_SECONDS:
            self._valid[digest] = astuple(identity)
            self._added = True

    def save(self) -> None:
        """Writes what holds, if anything was added; receipts of files that are gone are dropped.

        A cache directory that cannot be written costs only time: no error.
        """
        if not self._added:
            return
        with contextlib.suppress(OSError, StoreError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_file(self._path, json.dumps(self._valid).encode())
            self._path.chmod(0o600)
