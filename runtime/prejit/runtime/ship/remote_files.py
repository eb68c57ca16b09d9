"""The files of a bundle that is elsewhere, read as those of a layout on this machine are read.

So the same code reads and checks an index, manifests and signatures, and asks the trust policies, before any
weights have moved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping

from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.checks.oci import check_digest
from prejit.runtime.format.names import OCI_LAYOUT

_log = logging.getLogger(__name__)
Fetch = Callable[[Descriptor, int], Iterator[bytes | memoryview]]
"""Gives a blob's bytes from a place on, for as long as they arrive."""
PAUSES_SECONDS = (0.2, 1.0, 3.0, 8.0)
"""Pauses before each further attempt, while nothing arrives."""
_KEPT_BYTES = limits.MAX_CONFIG_BYTES
"""Blobs up to this size are kept once they were read: several checks read them."""


class RemoteFiles:
    """Implements `repository.BundleFiles` by what fetches a blob."""

    def __init__(
        self, name: str, index_file: bytes, fetch: Fetch, known: Mapping[str, bytes] | None = None
    ) -> None:
        """Fetch nothing yet.

        Args:
            name: for messages.
            index_file: the bytes of `index.json`.
            fetch: fetches blobs.
            known: blobs that are here, by digest, which their bytes have.
        """
        self.path = name
        self._index_file, self._fetch = index_file, fetch
        self._read = dict(known or {})

    def file_path(self, name: str) -> str:
        """See `LayoutFiles.file_path`."""
        return f"{self.path} ({name})"

    def blob_path(self, digest: str) -> str:
        """See `LayoutFiles.blob_path`."""
        return f"{self.path} ({digest})"

    def read(self, name: str, max_bytes: int) -> bytes:
        """See `LayoutFiles.read`."""
        content = OCI_LAYOUT if name == "oci-layout" else self._index_file
        if len(content) > max_bytes:
            raise RejectError(self.file_path(name), f"expected at most {max_bytes} bytes")
        return content

    def read_blob(self, at: Descriptor) -> bytes:
        """See `LayoutFiles.read_blob`."""
        found = self._read.get(at.digest)
        if found is None:
            content = bytearray()
            for piece in self.pieces(at, 0):
                content += piece
            found = bytes(content)
            check_digest(found, at.digest, self.blob_path(at.digest))
            if at.size <= _KEPT_BYTES:
                self._read[at.digest] = found
        if len(found) != at.size:
            raise RejectError(
                self.blob_path(at.digest), f"expected {at.size} bytes, found {len(found)}"
            )
        return found

    def pieces(self, at: Descriptor, start: int) -> Iterator[bytes | memoryview]:
        """See `BlobSource.pieces`. A transfer that was cut goes on where it was.

        Raises:
            RejectError: more bytes arrive than the blob has.
            StoreError: no more arrive, after some attempts.
        """
        if at.digest in self._read:
            yield self._read[at.digest][start:]
            return
        place, pauses = start, iter(PAUSES_SECONDS)
        while place < at.size:
            began = place
            try:
                for piece in self._fetch(at, place):
                    place += len(piece)
                    if place > at.size:
                        raise RejectError(
                            self.blob_path(at.digest), f"expected {at.size} bytes, found more"
                        )
                    yield piece
                error = None
            except StoreError as raised:
                error = raised
            if place == at.size:
                return
            if place > began:
                pauses = iter(PAUSES_SECONDS)
            pause = next(pauses, None)
            if pause is None:
                raise error or StoreError(
                    f"{self.blob_path(at.digest)}: the transfer ended after {place} of {at.size} bytes",
                    hint="try again: what arrived is kept",
                )
            _log.info("%s: goes on at byte %d: %s", self.blob_path(at.digest), place, error)
            time.sleep(pause)
