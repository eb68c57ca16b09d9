"""Receipts of earlier full verifications, so that gigabytes are not hashed at every start.

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
import time
from dataclasses import astuple
from pathlib import Path
from typing import final

from prejit.runtime.base.files import Identity, digest_file, is_digest
from prejit.runtime.errors import StoreError
from prejit.runtime.store.runtime_cache import cache_root, read_own, write_own

SETTLED_SECONDS = 2.0
"""A file that changed less than this many seconds before it was hashed gets no receipt. A second change
within the same tick of the clock would leave the same ctime ("racily clean" in git's terms)."""

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
        """Return whether a receipt says that this very file had this digest."""
        held = self._held.get(digest) == list(astuple(identity))
        if held:
            self._valid[digest] = astuple(identity)
        return held

    def digest_of(self, path: Path) -> str:
        """Return the digest of a file, from its receipt or by hashing it.

        Raises:
            StoreError: the file cannot be read.
        """
        try:
            with open(path, "rb") as file:
                identity = Identity.of(os.fstat(file.fileno()))
                for digest in self._held:
                    if is_digest(digest) and self.holds(digest, identity):
                        return digest
                hashed_at = time.time()
                digest = digest_file(file.fileno())
        except OSError as error:
            raise StoreError(f"{path}: cannot read: {error.strerror}") from error
        self.add(digest, identity, hashed_at=hashed_at)
        return digest

    def add(self, digest: str, identity: Identity, *, hashed_at: float) -> None:
        """Add a receipt for a file that was hashed and had this digest.

        Args:
            digest: the digest.
            identity: the file, before it was hashed.
            hashed_at: when the hashing began, in seconds since the epoch.
        """
        if hashed_at - identity.ctime_ns / 1e9 > SETTLED_SECONDS:
            self._valid[digest] = astuple(identity)
            self._added = True

    def save(self) -> None:
        """Write the valid receipts, if any was added. Receipts of files that are gone are dropped.

        A cache directory that cannot be written is no error: it costs only time.
        """
        if self._added:
            write_own(self._path, json.dumps(self._valid).encode())
