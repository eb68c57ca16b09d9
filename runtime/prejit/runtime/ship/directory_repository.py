"""A bundle in a directory, and one in a tar file: an OCI image layout each."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar

from prejit.runtime.base.files import store_errors
from prejit.runtime.base.typed_json import parse_object
from prejit.runtime.base.written_files import lock_file, write_file
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.index_writing import is_ours, locked, stranger
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import OCI_LAYOUT
from prejit.runtime.format.root import read_root
from prejit.runtime.ship.blob_directory import BlobDirectory
from prejit.runtime.ship.repository import (
    MOST_TRANSFERS,
    PIECE_BYTES,
    Pieces,
    RemoteFiles,
    Shipment,
    Tagged,
    blob_name,
    checked,
)


class _OneBundle:
    """A place that holds one bundle, and so has no tags. Abstract: subclasses open it."""

    name: str
    _kind: ClassVar[str]
    _remove: ClassVar[str]

    def open(self, tag: str, digest: str) -> RemoteFiles:
        """See `Repository.open`."""
        raise NotImplementedError

    def resolve(self, tag: str) -> str:
        """See `Repository.resolve`."""
        return read_root(self.open("", "")).digest

    def tags(self) -> list[Tagged]:
        """See `Repository.tags`."""
        return [Tagged("", self.resolve(""))]

    def remove(self, tag: str) -> int:
        """See `Repository.remove`."""
        raise UsageError(
            f"{self.name}: expected a registry or a bucket, found a {self._kind}",
            hint=f"remove it with: {self._remove} {self.name}",
        )


class DirectoryRepository(_OneBundle):
    """Implements `repository.Repository` for a directory, which holds one bundle."""

    _kind, _remove = "directory", "rm -r"

    def __init__(self, path: str) -> None:
        """Nothing is opened or made yet."""
        self.name, self.most_transfers = path, MOST_TRANSFERS
        self._blobs = BlobDirectory(Path(path))
        self.has, self.write = self._blobs.has, self._blobs.write

    def check_replaceable(self) -> None:
        """Check that another bundle may take the place of what is here: `publish` removes all other blobs.

        Raises:
            UsageError: there are other files, images of another tool, or an `index.json` of another kind.
        """
        path = os.path.join(self.name, "index.json")
        if not os.path.isfile(path):  # to open a FIFO would wait for its writer
            found = stranger(Path(self.name))
            if found not in ("", "index.json"):
                raise self._occupied(repr(found))
            return
        try:
            with open(path, "rb") as file:
                content = file.read(limits.MAX_INDEX_BYTES)
        except OSError:  # what cannot be written says so
            return
        read = parse_object(content)
        if is_ours(content) or not read or read.get("manifests") == []:  # ours, damaged, empty
            return
        try:
            with Layout(self.name) as layout:  # skopeo and oras write bundles, too
                read_root(layout)
        except RejectError as error:
            raise self._occupied("what another tool wrote") from error

    def _occupied(self, found: str) -> UsageError:
        return UsageError(
            f"{self.name}: expected a bundle or an empty directory, found {found}; nothing was changed",
            hint="give another directory, or move this away",
        )

    def open(self, tag: str, digest: str) -> RemoteFiles:
        """See `Repository.open`."""
        layout = Layout(self.name)
        files = RemoteFiles(
            self.name, layout.read("index.json", limits.MAX_INDEX_BYTES), self._fetch
        )
        layout.close()
        _check_is(files, digest)
        return files

    def _fetch(self, at: Descriptor, start: int) -> Iterator[bytes]:
        # A bundle of a machine's store, or one that is mounted, has its blobs elsewhere.
        with Layout(self.name) as layout, layout.open_blob(at.digest, at.size) as (descriptor, _):
            while piece := os.pread(descriptor, PIECE_BYTES, start):
                start += len(piece)
                yield piece

    def publish(self, shipment: Shipment, tag: str) -> None:
        """See `Repository.publish`. A directory has no tags. The blobs of the bundle before go.

        Raises:
            StoreError: another process has put another bundle there since the blobs were written.
        """
        path = Path(self.name)
        with locked(path):
            for document in shipment.documents:
                self.write(document.at, document.pieces)
            if not all(self.has(at) for at in shipment.blobs):
                raise StoreError(
                    f"{self.name}: another bundle was put there meanwhile", hint="try again"
                )
            write_file(path / "oci-layout", OCI_LAYOUT)
            write_file(path / "index.json", shipment.index_file)
            held = (*shipment.blobs, *(document.at for document in shipment.documents))
            self._blobs.keep_only(held)

    def close(self) -> None:
        """See `Destination.close`. Another attempt goes on with what arrived."""


class TarRepository(_OneBundle):
    """Implements `repository.Repository` for a tar file, which holds one bundle: an `oci-archive`.

    It is written once, from its start to its end, under a name of its own until it is whole.
    """

    _kind, _remove = "file", "rm"

    def __init__(self, path: str) -> None:
        """Nothing is opened or made yet."""
        self.name, self.most_transfers = path, 1
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._out: tarfile.TarFile | None = None
        self._temporary = Path(f"{path}.partial")
        self._written = set[str]()
        self._places: dict[str, tuple[int, int]] = {}

    def open(self, tag: str, digest: str) -> RemoteFiles:
        """See `Repository.open`."""
        try:
            with tarfile.open(self.name, "r:") as tar:
                members = [each for each in tar if each.isreg()]
        except (OSError, tarfile.TarError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or error
            raise StoreError(
                f"{self.name}: cannot read it as a tar file: {why}",
                hint="give a file that `prejit push BUNDLE FILE.tar` or skopeo's oci-archive wrote",
            ) from error
        self._places = {
            each.name.removeprefix("./"): (each.offset_data, each.size) for each in members
        }
        if "index.json" not in self._places:
            raise RejectError(self.name, "expected an OCI image layout, found no index.json")
        if self._places["index.json"][1] > limits.MAX_INDEX_BYTES:
            raise RejectError(self.name, f"expected at most {limits.MAX_INDEX_BYTES} bytes")
        files = RemoteFiles(self.name, b"".join(self._read("index.json", 0)), self._fetch)
        _check_is(files, digest)
        return files

    def _read(self, name: str, start: int) -> Iterator[bytes]:
        if name not in self._places:
            raise RejectError(f"{self.name}: {name}", "expected a file, found none")
        offset, size = self._places[name]
        with open(self.name, "rb", buffering=0) as file:
            file.seek(offset + start)
            left = size - start
            while left > 0 and (piece := file.read(min(PIECE_BYTES, left))):
                left -= len(piece)
                yield piece

    def _fetch(self, at: Descriptor, start: int) -> Iterator[bytes]:
        yield from self._read(blob_name(at.digest), start)

    def has(self, at: Descriptor) -> bool:
        """See `Repository.has`."""
        return at.digest in self._written

    def write(self, at: Descriptor, pieces: Pieces) -> None:
        """See `Repository.write`. One blob after the other."""
        with self._lock:
            stream = _Stream(checked(at, pieces(0), self.name))
            self._add(blob_name(at.digest), at.size, stream)
            self._written.add(at.digest)

    def _add(self, name: str, size: int, content: io.RawIOBase | io.BytesIO) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o644
        with store_errors(self.name, "write"):
            if self._out is None:
                # Another process that writes the same tar waits. What a killed one left is written over.
                self._file = os.fdopen(lock_file(self._temporary, mode=0o644), "wb")
                self._file.truncate(0)
                self._out = tarfile.open(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
            self._out.addfile(member, content)

    def publish(self, shipment: Shipment, tag: str) -> None:
        """See `Repository.publish`."""
        for document in shipment.documents:
            self.write(document.at, document.pieces)
        for name, content in (("oci-layout", OCI_LAYOUT), ("index.json", shipment.index_file)):
            self._add(name, len(content), io.BytesIO(content))
        assert self._out is not None
        assert self._file is not None
        with store_errors(self.name, "write"):
            self._out.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._temporary, self.name)
            self._file.close()
            self._file = None

    def close(self) -> None:
        """See `Destination.close`. Nothing can go on with a tar that is not whole."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._temporary.unlink()
            with contextlib.suppress(OSError):  # it writes what it holds, and the disk may be full
                self._file.close()
            self._file = None


class _Stream(io.RawIOBase):
    """Pieces as a file that is read once."""

    def __init__(self, pieces: Iterator[bytes | memoryview]) -> None:
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts, wanted = [], size
        while wanted > 0:
            if not self._left:
                self._left = memoryview(next(self._pieces, b""))
                if not self._left:
                    break
            parts.append(bytes(self._left[:wanted]))
            wanted -= len(parts[-1])
            self._left = self._left[len(parts[-1]) :]
        return b"".join(parts)


def _check_is(files: RemoteFiles, digest: str) -> None:
    if digest and (found := read_root(files).digest) != digest:
        raise RejectError(str(files.path), f"expected {digest}, found {found}")
