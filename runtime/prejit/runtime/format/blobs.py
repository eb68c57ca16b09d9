"""Read the blobs of a bundle: every byte is verified before it is used.

Small blobs are verified whole. Large ones are verified in chunks, whose digests the config has, unless the
kernel verifies them by fs-verity.
`Blobs.begin` starts the verification, and `Layer.wait` waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

from prejit.runtime.base.files import Content, Identity, map_file, measure
from prejit.runtime.base.process_facts import Span, span
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.bundle_schema import Chunks, Descriptor, ImageManifest, Segment
from prejit.runtime.format.checks import layers as layer_checks
from prejit.runtime.format.layout import ATTEMPTS, Layout, OpenFile, TargetFiles
from prejit.runtime.format.root import Root, read_root
from prejit.runtime.format.verified_bytes import VERIFIED, Verification
from prejit.runtime.machine.kept_files import Receipts

if TYPE_CHECKING:
    from prejit.runtime.format import blob_hashing

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@final
class Blobs:
    """The blobs of one target or several, open and mapped.

    Each file is opened once. So what is verified is what is used, even if another file has its name by now.

    Attributes:
        hashed_bytes, receipt_bytes, verity_bytes: bytes that are hashed, have receipts, or are
            left to the kernel, which verifies them by fs-verity.
        reads: when `read` was called.
        verification: verifies these blobs; `verify` or `begin` makes it.
    """

    def __init__(
        self, layout: TargetFiles, manifests: Iterable[ImageManifest], receipts: Receipts | None
    ) -> None:
        """Open the blobs of targets; `receipts` of earlier verifications: None: hash everything.

        Raises:
            RejectError: a blob is missing or has another size.
        """
        self._receipts = receipts
        self._files: dict[str, OpenFile] = {}
        self._open = contextlib.ExitStack()
        self._close = weakref.finalize(self, self._open.close)
        sizes = {at.digest: at.size for m in manifests for at in (m.config, *m.layers)}
        for digest, size in sizes.items():
            descriptor, identity = self._open.enter_context(layout.open_blob(digest, size))
            path = layout.blob_path(digest)
            content = map_file(descriptor, size, path)
            arriving = layout.arrives(digest)
            self._files[digest] = OpenFile(path, descriptor, identity, content, arriving)
        self.hashed_bytes = self.receipt_bytes = self.verity_bytes = 0
        self.reads: list[Span] = []
        self.verification: Verification = VERIFIED

    def read(self, at: Descriptor) -> bytes:
        """Return a copy of a blob, to which nobody else can write. The caller must check its digest."""
        started = time.perf_counter()
        content = bytes(self._files[at.digest].content)
        self.reads.append(span("reading", started))
        return content

    def layers(self, manifest: ImageManifest) -> dict[str, Layer]:
        """Return every layer of a target, by media type, as `verification` verifies them."""
        return {
            at.mediaType: Layer(
                self._files[at.digest].content,
                self._files[at.digest].path,
                at.digest,
                self.verification,
            )
            for at in manifest.layers
        }

    def verify(self, chunks: Iterable[tuple[str, Chunks]] = ()) -> None:
        """Verify every blob that has no valid receipt now, whole: check 8.

        `chunks` of blobs, by digest, are compared as well, with the fs-verity digests of files that have one.

        Raises:
            RejectError: a blob is cut off, or has another digest.
            StoreError: the disk does not give its bytes.
        """
        tables = dict.fromkeys(chunks)  # targets share layers
        with_chunks = {digest for digest, _ in tables}
        whole = [(digest, None) for digest in self._files if digest not in with_chunks]
        parts: list[tuple[str, Chunks | None]] = [*tables, *whole]
        jobs, names = list["blob_hashing.Job"](), list[tuple[str, Identity]]()
        for digest, table in parts:
            file = self._files[digest]
            if table is not None:
                _is_measured(file, table)
            if not self._holds(file, digest):
                from prejit.runtime.format import blob_hashing

                run = partial(blob_hashing.check_whole, file, digest, table)
                jobs.append(blob_hashing.Job(digest, 0, file.identity.size, run))
                names.append((digest, file.identity))
        self._begin(jobs, names, threads=len(os.sched_getaffinity(0)))
        self.verification.finish()

    def begin(
        self, manifest: ImageManifest, chunks: Mapping[str, Chunks], first: Iterable[str]
    ) -> None:
        """Begin to verify the blobs of a target that have no valid receipt, in threads.

        `verification` waits for them. Large layers that the kernel verifies are left to it.

        Args:
            manifest: the target. Nobody may use the blobs of others.
            chunks: the chunks of large layers, by media type; other blobs are hashed whole.
            first: media types of layers in the order in which they are needed; all others come after them.

        Raises:
            RejectError: a file has another fs-verity digest than its chunks.
        """
        layers = {at.mediaType: at.digest for at in manifest.layers}
        needed_first = [layers[name] for name in first if name in layers]
        every = (at.digest for at in manifest.layers)  # libraries of the user have one media type
        tables = {layers[name]: each for name, each in chunks.items()}
        jobs, names = list["blob_hashing.Job"](), list[tuple[str, Identity]]()
        for digest in dict.fromkeys((*needed_first, *every, manifest.config.digest)):
            file, table = self._files[digest], tables.get(digest)
            size = file.identity.size
            if table is not None and _is_measured(file, table):
                self.verity_bytes += size
                _log.debug("%s: the kernel verifies it, by fs-verity", digest)
                continue
            if self._holds(file, digest) or (table is not None and self._holds(file, table.name)):
                self.receipt_bytes += size
                _log.debug("%s: has a receipt", digest)
                continue
            _log.debug("%s: to be hashed%s", digest, "" if table is None else " in chunks")
            from prejit.runtime.format import blob_hashing  # starts with receipts have no job

            if table is None:
                run = partial(blob_hashing.check_whole, file, digest, None)
                jobs.append(blob_hashing.Job(digest, 0, size, run))
            for start, end, expected in () if table is None else table.places(size):
                run = partial(blob_hashing.check_chunk, file, start, end, expected)
                jobs.append(blob_hashing.Job(digest, start, end, run))
            # What chunks say of a file holds for these chunks, and not for the file's sha256.
            names.append((digest if table is None else table.name, file.identity))
        # Whoever waits is one more thread.
        self._begin(jobs, names, threads=max(1, len(os.sched_getaffinity(0)) - 1))

    def _holds(self, file: OpenFile, name: str) -> bool:
        return self._receipts is not None and self._receipts.holds(name, file.identity)

    def _begin(
        self,
        jobs: Sequence[blob_hashing.Job],
        names: Iterable[tuple[str, Identity]],
        *,
        threads: int,
    ) -> None:
        """Begin jobs. If all succeed, files with these names and identities get receipts."""
        self.hashed_bytes = sum(job.end - job.start for job in jobs)
        _log.info(
            "verifying: %d bytes are hashed, %d have receipts, %d are left to fs-verity",
            *(self.hashed_bytes, self.receipt_bytes, self.verity_bytes),
        )
        if not jobs:
            self._close()
            return
        from prejit.runtime.format import blob_hashing

        # The method keeps this object, and with it the descriptors, until the work is over.
        finish = partial(self._finish, names, time.time())
        self.verification = blob_hashing.HashingVerification(
            jobs, threads=threads, finished=finish, failed=self._close
        )

    def _finish(self, names: Iterable[tuple[str, Identity]], began: float) -> None:
        self._close()
        _log.info("verified: all that was hashed is right")
        if self._receipts is not None:
            for name, identity in names:
                self._receipts.add(name, identity, hashed_at=began)
            self._receipts.save()


def _is_measured(file: OpenFile, chunks: Chunks) -> bool:
    """Return whether the kernel compares each page of a file, when it reads it, with the right digest."""
    if (found := measure(file.descriptor)) is None:
        return False
    if found != chunks.verity:
        raise RejectError(
            file.path,
            f"expected the fs-verity digest {chunks.verity}, found {found}",
            hint="copy the file again and run `fsverity enable` on it without options: it has other bytes, "
            "or a salt, or blocks of another size than 4096 bytes",
        )
    return True


def check_blobs(
    layout: Layout, manifests: Iterable[ImageManifest], receipts: Receipts | None
) -> Blobs:
    """Open every blob of targets and verify it now, whole. Arguments and errors as `Blobs` and `verify`."""
    blobs = Blobs(layout, manifests, receipts)
    blobs.verify()
    return blobs


def read_whole(path: str | os.PathLike[str], read: Callable[[Layout, Root], _T]) -> _T:
    """Read one bundle whole, the old one or the new one, even if a build replaces it meanwhile.

    Readers take no lock. They begin again if a check fails and the index has changed since they began. So
    `read`, which takes the layout and what its `index.json` leads to, may be called several times.

    Raises:
        StoreError: the directory cannot be opened, or a build replaces it again and again.
        RejectError: the bundle is damaged.
    """
    for _ in range(ATTEMPTS):
        with Layout(path) as layout:
            try:
                return read(layout, read_root(layout))
            except RejectError:
                if not layout.is_replaced():
                    raise
    raise StoreError(
        f"{os.fspath(path)}: cannot read a bundle: it was replaced {ATTEMPTS} times meanwhile",
        hint="wait until the builds that write to this directory are done, then try again",
    )


class Layer(NamedTuple):
    """A layer of a bundle, mapped. Its bytes may be damaged until `wait` has returned for them."""

    content: Content
    path: str
    digest: str = ""
    verification: Verification = VERIFIED

    @classmethod
    def in_layout(cls, layout: Layout, at: Descriptor) -> Layer:
        """Return a layer that is verified elsewhere, or frame by frame.

        Raises:
            RejectError: the file is not there, or has another size.
            StoreError: it cannot be read.
        """
        return cls(layout.map_blob(at.digest, at.size), layout.blob_path(at.digest), at.digest)

    @classmethod
    def in_file(cls, path: str | os.PathLike[str]) -> Layer:
        """Return a layer that is a file of its own, verified elsewhere. It must not be empty."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return cls(map_file(file.fileno(), size, os.fspath(path)), os.fspath(path))

    def wait(self, start: int = 0, end: int | None = None) -> Content:
        """Return the content after a part of it was verified; `end` None: the end of the layer.

        Raises:
            RejectError: the bundle is damaged.
            StoreError: the disk does not give its bytes.
        """
        self.verification.wait(self.digest, start, end)
        return self.content

    def unpack(self, segment: Segment) -> bytes:
        """Return a frame of a pack, decompressed: the very bytes that check 9 verified.

        A frame has digests of its own, so that it needs no other verification.
        """
        # The slice is a copy, to which no other process can write.
        frame = self.content[segment.offset : segment.offset + segment.size]
        return layer_checks.unpack(frame, segment, self.path)
