"""What holds bundles (a registry, a bucket, a server, a directory, a tar), and what a bundle is made of.

Nothing here or in the kinds of repositories decides what is moved: that is `shipping`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.checks.oci import check_digest, check_manifest
from prejit.runtime.format.index_writing import encode_root, index_of_copy
from prejit.runtime.format.layout import LayoutFiles
from prejit.runtime.format.names import INDEX_MEDIA_TYPE, OCI_LAYOUT
from prejit.runtime.format.referrers import Referrer, referrers
from prejit.runtime.format.root import Root

if TYPE_CHECKING:
    from requests import Response

_log = logging.getLogger(__name__)
PIECE_BYTES = 1 << 20
_HASHED_LATER = 8
"""How many pieces may be written before they are hashed."""
_MAX_ATTACHED_BYTES = 256 << 20
MOST_TRANSFERS = 8
"""How many blobs most places take at the same time."""
MOST_TAGS = 100_000
"""How many tags a place may have to be listed. Pages without end would fill the memory."""
Pieces = Callable[[int], Iterator[bytes | memoryview]]
"""Gives the bytes of a blob from a place on, in pieces of any size."""
Fetch = Callable[[Descriptor, int], Iterator[bytes | memoryview]]
"""Gives a blob's bytes from a place on, for as long as they arrive."""
PAUSES_SECONDS = (0.2, 1.0, 3.0, 8.0)
"""Pauses before each further attempt, while little arrives."""
WINDOW_SECONDS = 60.0
LEAST_BYTES = 60 << 10
"""How much must arrive in each window while a place is waited for: 1 KiB/s. Else a load could take days."""
_KEPT_BYTES = limits.MAX_CONFIG_BYTES
"""Blobs up to this size are kept once they were read: several checks read them."""


class BlobSource(Protocol):
    """Gives the bytes of blobs."""

    def pieces(self, at: Descriptor, start: int) -> Iterator[bytes | memoryview]:
        """Yield a blob's bytes from a place on. They may be wrong.

        Raises:
            StoreError: they do not arrive.
        """


class BundleFiles(LayoutFiles, BlobSource, Protocol):
    """The files of one bundle in a repository."""


@dataclass(frozen=True, slots=True)
class BundleDocument:
    """A small blob that says what others are: the bundle's index, a manifest."""

    at: Descriptor
    content: bytes

    def pieces(self, start: int) -> Iterator[bytes]:
        """Yield its bytes from a place on, as `Pieces`."""
        yield self.content[start:]


@dataclass(frozen=True, slots=True)
class Shipment:
    """What moves: a bundle, or some of its targets.

    Attributes:
        digest: the bundle's digest.
        documents: the manifests of the targets, then what is attached to them and to the bundle, each after
            what it refers to, then the bundle's index.
        blobs: all other blobs, each digest once.
        index_file: the bytes of `index.json`.
        beside: takes the digests of other targets, and returns the shipment that has these, too;
            None: it is for mounting, and nobody fetches it.
    """

    digest: str
    documents: tuple[BundleDocument, ...]
    blobs: tuple[Descriptor, ...]
    index_file: bytes
    beside: Callable[[Collection[str]], Shipment] | None = field(default=None, compare=False)

    @property
    def all(self) -> tuple[Descriptor, ...]:
        """All its blobs, the documents among them."""
        return (*self.blobs, *(document.at for document in self.documents))

    @property
    def size(self) -> int:
        """The bytes of all of it."""
        return sum(at.size for at in self.all)


@dataclass(frozen=True, slots=True)
class Tagged:
    """A tag of a repository, and the digest of the bundle that it leads to."""

    tag: str
    digest: str


class Destination(Protocol):
    """A place to which a bundle moves.

    Every method raises StoreError where the place does not answer, or does not let us do what is asked, and
    RejectError where it gives something else than was asked for.
    """

    @property
    def name(self) -> str:
        """Its URL without passwords, or its path."""

    @property
    def most_transfers(self) -> int:
        """How many blobs it takes at the same time."""

    def has(self, at: Descriptor) -> bool:
        """Return whether a blob is there."""

    def write(self, at: Descriptor, pieces: Pieces) -> None:
        """Write a blob. It appears whole, and only if its bytes have its digest."""

    def publish(self, shipment: Shipment, tag: str) -> None:
        """Write the documents of a bundle whose blobs are there, and let a tag lead to it."""

    def close(self) -> None:
        """End a transfer, whole or not: remove what no further attempt can use."""


class Repository(Destination, Protocol):
    """A place that holds bundles under tags, and their blobs once each."""

    def open(self, tag: str, digest: str) -> BundleFiles:
        """Return the files of the bundle with a tag or a digest; either may be empty."""

    def resolve(self, tag: str) -> str:
        """Return the digest of the bundle that a tag leads to; empty: there is no such tag."""

    def tags(self) -> list[Tagged]:
        """Return all tags in the order of their names."""

    def remove(self, tag: str) -> int:
        """Remove a tag. The blobs stay, for what is being pushed at this moment may rely on them.

        Returns:
            Bytes of blobs to which no tag leads any more; 0 where the place itself collects them.
        """


def blob_name(digest: str) -> str:
    """Return the path of a blob in an OCI image layout."""
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def check_count(tags: Sized, name: str) -> None:
    """Raise StoreError where a place has too many tags to list them."""
    if len(tags) > MOST_TAGS:
        raise StoreError(
            f"{name}: expected at most {MOST_TAGS} tags, found more",
            hint="name a tag or a digest: only the list of all tags is refused",
        )


def shipment_of(files: LayoutFiles, root: Root, targets: Iterable[Descriptor]) -> Shipment:
    """Return what moves if some targets of a bundle do, with all that is attached to them and to the bundle.

    Raises:
        RejectError: a file is damaged.
    """
    kept = tuple(targets)
    documents, blobs = [], dict[str, Descriptor]()
    for at in kept:
        content = files.read_blob(at)
        manifest = check_manifest(content, files.blob_path(at.digest))
        documents.append(BundleDocument(at, content))
        blobs |= {each.digest: each for each in (manifest.config, *manifest.layers)}
    known = {root.digest, *(at.digest for at in kept)}
    attached = _in_order(referrers(files, root), known)
    extra = sum(at.size for each in attached for at in (each.config, *each.layers))
    if extra > _MAX_ATTACHED_BYTES:  # no signature covers how much is attached, nor by whom
        raise RejectError(
            str(files.path),
            f"expected at most {_MAX_ATTACHED_BYTES} bytes of what is attached, found {extra}",
        )
    for each in attached:
        documents.append(BundleDocument(each.descriptor, files.read_blob(each.descriptor)))
        for at in (each.config, *each.layers):
            blobs.setdefault(at.digest, at)  # what a target says of a blob counts
    entries = [each.entry for each in sorted(attached, key=lambda each: each.descriptor.digest)]
    index = replace(root.bundle, manifests=kept)
    if root.subject is None or root.subject.mediaType == INDEX_MEDIA_TYPE:
        if root.subject is None:  # skopeo copies targets without the index, which follows from them
            content = index_of_copy(files, root.bundle.manifests)
        else:
            content = files.read_blob(root.subject)
        documents.append(
            BundleDocument(Descriptor(INDEX_MEDIA_TYPE, root.digest, len(content)), content)
        )
        index_file = encode_root(index, content, entries)
    else:
        index_file = encode_copy(kept, entries)
    for document in documents:
        blobs.pop(document.at.digest, None)

    def beside(others: Collection[str]) -> Shipment:
        every = (at for at in root.bundle.manifests if at in kept or at.digest in others)
        return shipment_of(files, root, every)

    return Shipment(root.digest, tuple(documents), tuple(blobs.values()), index_file, beside)


def _in_order(attached: Iterable[Referrer], known: set[str]) -> list[Referrer]:
    """Return what refers to something known, or to what does so, each after what it refers to."""
    left, found = list(attached), list[Referrer]()
    while ready := [each for each in left if each.subject.digest in known]:
        found += ready
        known |= {each.descriptor.digest for each in ready}
        left = [each for each in left if each not in ready]
    return found


def encode_copy(targets: Iterable[Descriptor], others: Iterable[Descriptor]) -> bytes:
    """Return the bytes of the `index.json` of a copy of targets that lacks the bundle's index."""
    manifests = [json.loads(to_json(at)) for at in (*targets, *others)]
    # Its first key says that it is none of the files that a build writes.
    plain = {"schemaVersion": 2, "mediaType": INDEX_MEDIA_TYPE, "manifests": manifests}
    return json.dumps(plain).encode("ascii")


def checked(
    at: Descriptor, pieces: Iterable[bytes | memoryview], where: str, hasher: Any = None
) -> Iterator[bytes | memoryview]:
    """Yield pieces, and raise RejectError instead of the last one where all do not have a blob's digest.

    `hasher` has seen what came before the pieces.
    """
    hasher = hashlib.sha256() if hasher is None else hasher
    size = 0
    left: bytes | memoryview = b""
    hashing = deque[Future[None]]()
    # Pieces are hashed while others are received and written: neither waits for the other's every piece.
    with ThreadPoolExecutor(1, "prejit-hash") as thread:
        for piece in pieces:
            try:
                hashing.append(thread.submit(hasher.update, piece))
            except RuntimeError:  # the interpreter ends, and its executors take no work
                wait(hashing)
                hasher.update(piece)
            if len(hashing) > _HASHED_LATER:
                hashing.popleft().result()
            size += len(piece)
            if left:
                yield left
            left = piece
    found = f"sha256:{hasher.hexdigest()}"
    if found != at.digest:
        raise RejectError(
            where, f"expected the bytes of {at.digest}, found {size} bytes of {found}"
        )
    if left:
        yield left


def in_time(pieces: Iterable[bytes], where: str) -> Iterator[bytes]:
    """Yield what arrives, in pieces of about PIECE_BYTES. `pieces` must give each part at once.

    Raises:
        StoreError: it arrives too slowly.
    """
    waited, arrived = 0.0, 0
    some, size = list[bytes](), 0
    ahead, error = iter(pieces), None
    while error is None:
        began = time.monotonic()
        try:
            piece = next(ahead, b"")
        except Exception as raised:  # what came before it counts
            error, piece = raised, b""
        if not len(piece):
            break
        waited += time.monotonic() - began
        arrived += len(piece)
        if waited >= WINDOW_SECONDS:
            if arrived < LEAST_BYTES:
                error = StoreError(
                    f"{where}: expected at least {LEAST_BYTES >> 10} KiB in {WINDOW_SECONDS:.0f} s, found "
                    f"{arrived} bytes in {waited:.0f} s",
                    hint="check the network and the proxy, or take another mirror: what arrived is kept",
                )
            waited, arrived = 0.0, 0
        some.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield b"".join(some)
            some, size = [], 0
    if some:
        yield b"".join(some)
    if error is not None:
        raise error


def arriving(response: Response, where: str, *, is_decoded: bool = True) -> Iterator[bytes]:
    """Yield the body of an answer of requests as `in_time` does, and close it. Errors are urllib3's, too."""
    read = partial(response.raw.read1, PIECE_BYTES, decode_content=is_decoded)
    try:
        yield from in_time(iter(read, b""), where)
    finally:
        response.close()  # its connection, unless all was read


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
            if place - began >= LEAST_BYTES:
                pauses = iter(PAUSES_SECONDS)
            pause = next(pauses, None)
            if pause is None:
                raise error or StoreError(
                    f"{self.blob_path(at.digest)}: the transfer ended after {place} of {at.size} bytes",
                    hint="try again: what arrived is kept",
                )
            _log.info("%s: goes on at byte %d: %s", self.blob_path(at.digest), place, error)
            time.sleep(pause)
