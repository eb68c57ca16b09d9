"""Fetch of a large layer only the chunks that the version before, which is in the store, does not have.

A fine-tuned model has other weights in some layers. The configs of both versions list the chunks of their
layers by digest. The layer as a whole is hashed as it is written, wherever its parts come from.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Chunks, Descriptor
from prejit.runtime.format.layout import Layout, LayoutFiles
from prejit.runtime.format.names import BUNDLE_NAME
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.format.root import Root, read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.repository import BundleFiles, Shipment

_log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """The place of a chunk: a file, and its bytes from `start` up to `end`, without `end`."""

    path: str
    start: int
    end: int


class EqualChunks:
    """Implements `repository.BundleFiles` by another one, and by chunks of files on this machine."""

    def __init__(
        self, files: BundleFiles, lacking: dict[str, Chunks], here: dict[str, _Place]
    ) -> None:
        """`lacking` has the chunks of layers by digest, `here` places of chunks by theirs."""
        self.path, self._files, self._lacking, self._here = files.path, files, lacking, here
        self.file_path, self.blob_path = files.file_path, files.blob_path
        self.read, self.read_blob = files.read, files.read_blob

    def pieces(self, at: Descriptor, start: int) -> Iterator[bytes | memoryview]:
        """See `BundleFiles.pieces`."""
        chunks = self._lacking.get(at.digest)
        if chunks is None:
            yield from self._files.pieces(at, start)
            return
        run = start
        for first, end, digest in chunks.places(at.size):
            if end > start and (content := self._content(digest)):
                yield from self._elsewhere(at, run, first)
                yield memoryview(content)[max(start - first, 0) :]
                run = end
        yield from self._elsewhere(at, run, at.size)

    def _elsewhere(self, at: Descriptor, place: int, end: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a blob between two places, which are not here."""
        for piece in self._files.pieces(at, place) if place < end else ():
            yield piece[: end - place]
            place += len(piece)
            if place >= end:
                return

    def _content(self, digest: str) -> bytes:
        """Return the bytes of a chunk; empty: they are not here, or are damaged."""
        from blake3 import blake3

        if (place := self._here.get(digest)) is None:
            return b""
        with contextlib.suppress(OSError), open(place.path, "rb", buffering=0) as file:
            content = os.pread(file.fileno(), place.end - place.start, place.start)
            if blake3(content).hexdigest() == digest:
                return content
        return b""


def with_equal_chunks(
    files: BundleFiles, root: Root, shipment: Shipment, store: MachineStore
) -> tuple[BundleFiles, int]:
    """Return the files of a bundle, and how many bytes a bundle of the same name has: the last one used.

    Raises:
        RejectError: a config or a manifest is damaged.
    """
    large = [at for at in shipment.blobs if at.size > limits.MIN_CHUNK_BYTES]
    if all(map(store.has, large)):
        return files, 0
    name = root.bundle.annotations[BUNDLE_NAME]
    before = None
    with contextlib.suppress(StoreError):  # one of them cannot be read now
        before = next((each.digest for each in store.bundles() if each.name == name), None)
    if before is None:
        return files, 0
    here = _here(store.directory(before))
    lacking = {at.digest: (at, each) for at, each in _chunked(files, root) if not store.has(at)}
    places = [place for at, each in lacking.values() for place in each.places(at.size)]
    count = sum(end - start for start, end, digest in places if digest in here)
    if not count:
        return files, 0
    _log.info("%s: %d bytes are chunks that %s has", files.path, count, before)
    return EqualChunks(files, {at.digest: each for at, each in lacking.values()}, here), count


def _here(bundle: Path) -> dict[str, _Place]:
    """Return where the chunks of a bundle of the store are; nothing if it is damaged."""
    with contextlib.suppress(StoreError, RejectError), Layout(bundle) as layout:
        return {
            digest: _Place(layout.blob_path(at.digest), start, end)
            for at, chunks in _chunked(layout, read_root(layout))
            for start, end, digest in chunks.places(at.size)
        }
    return {}


def _chunked(files: LayoutFiles, root: Root) -> Iterator[tuple[Descriptor, Chunks]]:
    """Yield the large layers of all targets, with their chunks."""
    for target in match(root, Fingerprint.current()):
        contents = read_contents(files, target)
        for media_type, chunks in (contents.config.chunks or {}).items():
            yield contents.manifest.layer(media_type), chunks
