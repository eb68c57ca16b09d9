"""Read the blobs of a bundle: every byte is verified before it is used.

Small blobs are verified whole. Large ones are verified in chunks, whose digests the config has.
`Blobs.begin` starts the verification, and `Layer.wait` waits for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar, final

from prejit.runtime.base.files import Content, Identity, map_file, timed_digest_file
from prejit.runtime.base.process import Span, span
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.checks import layers as layer_checks
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.opening import open_index
from prejit.runtime.format.schema import Chunks, Descriptor, ImageManifest, Index, Segment
from prejit.runtime.format.verification import VERIFIED, Job, Verification
from prejit.runtime.store.receipts import Receipts

_ATTEMPTS = 20
"""How often a bundle may be replaced while it is read. Opening all files takes milliseconds, a build takes
seconds."""

_T = TypeVar("_T")


class _File(NamedTuple):
    """An open file.

    Attributes:
        path: the file, for errors.
        descriptor: its file descriptor.
        identity: its identity when it was opened.
        content: its map.
    """

    path: str
    descriptor: int
    identity: Identity
    content: Content


@final
class Blobs:
    """The blobs of a bundle.

    Each file is opened once. So what is verified is what is used, even if another file has its name by now.

    Attributes:
        hashed_bytes: the number of bytes that are hashed; all others have a receipt.
        receipt_bytes: the number of these others.
        reads: when `read` was called.
        verification: verifies these blobs; `verify` or `begin` makes it.
    """

    def __init__(
        self,
        layout: Layout,
        manifests: Collection[ImageManifest],
        receipts: Receipts | None,
        *,
        keep: Collection[ImageManifest] = (),
    ) -> None:
        """Open the blobs.

        Args:
            layout: the bundle.
            manifests: the manifests of all its targets.
            receipts: receipts of earlier verifications; None: hash everything.
            keep: the manifests whose blobs are read afterwards. Their blobs are mapped.

        Raises:
            RejectError: a blob of `keep` is missing or has another size.
        """
        self._receipts = receipts
        kept = {at.digest: at.size for m in keep for at in (m.config, *m.layers)}
        everything = {at.digest: at.size for m in manifests for at in (m.config, *m.layers)}
        self._others = {d: size for d, size in everything.items() if d not in kept}
        self._files: dict[str, _File] = {}
        self._open = contextlib.ExitStack()
        self._close = weakref.finalize(self, self._open.close)
        self._layout = self._open.enter_context(layout.again())  # the caller closes its own
        for digest, size in kept.items():
            descriptor, identity = self._open.enter_context(layout.open_blob(digest, size))
            content = map_file(descriptor, size)
            self._files[digest] = _File(layout.blob_path(digest), descriptor, identity, content)
        self.hashed_bytes = self.receipt_bytes = 0
        self.reads: list[Span] = []
        self.verification = VERIFIED

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

    def verify(self) -> None:
        """Verify every blob that has no valid receipt, whole: check 8.

        Raises:
            RejectError: a blob is missing, of another size, or has another digest.
            StoreError: the disk does not give its bytes.
        """
        self._begin({}, (), threads=len(os.sched_getaffinity(0)), late=False)
        self.verification.finish()

    def begin(self, chunks: Mapping[str, Chunks], first: Iterable[str]) -> None:
        """Begin to verify every blob that has no valid receipt, in threads. `verification` waits for them.

        Args:
            chunks: the chunks of large blobs, by digest; other blobs are hashed whole.
            first: digests of blobs, in the order in which they are needed; all others come after them.
        """
        threads = max(1, len(os.sched_getaffinity(0)) - 1)  # whoever waits is one more
        self._begin(chunks, first, threads=threads, late=True)

    def _begin(
        self, chunks: Mapping[str, Chunks], first: Iterable[str], *, threads: int, late: bool
    ) -> None:
        jobs: list[Job] = []
        for digest in dict.fromkeys((*first, *self._files)):
            jobs += self._jobs(digest, chunks.get(digest))
        for digest, size in self._others.items():
            with (
                self._unless_replaced(late),
                self._layout.open_blob(digest, size) as (_, identity),
            ):
                if self._receipts is None or not self._receipts.holds(digest, identity):
                    jobs.append(
                        Job(digest, 0, size, partial(self._check_other, digest, size, late))
                    )
        sizes = [*(file.identity.size for file in self._files.values()), *self._others.values()]
        self.hashed_bytes = sum(job.end - job.start for job in jobs)
        self.receipt_bytes = sum(sizes) - self.hashed_bytes
        if not jobs:
            self._close()
            return
        self.verification = Verification(
            jobs, threads=threads, finished=self._finish, failed=self._close
        )

    def _finish(self) -> None:
        self._close()
        if self._receipts is not None:
            self._receipts.save()

    def _jobs(self, digest: str, chunks: Chunks | None) -> list[Job]:
        """Return the jobs of a blob that is kept; none if it has a receipt."""
        file, receipts = self._files[digest], self._receipts
        names = [digest] if chunks is None else [digest, chunks.name]
        if receipts is not None and any(receipts.holds(name, file.identity) for name in names):
            return []
        if chunks is None:
            return [Job(digest, 0, file.identity.size, partial(self._check_whole, digest, file))]
        done = _Countdown(len(chunks.digests), lambda: self._add_receipt(names[-1], file.identity))
        return [
            Job(digest, start, end, partial(_check_chunk, file, start, end, expected, done))
            for start, end, expected in chunks.places(file.identity.size)
        ]

    def _check_whole(self, digest: str, file: _File) -> float:
        seconds = _check_digest(file.path, file.descriptor, digest)
        self._add_receipt(digest, file.identity)
        return seconds

    def _check_other(self, digest: str, size: int, late: bool) -> float:
        seconds = 0.0
        with (
            self._unless_replaced(late),
            self._layout.open_blob(digest, size) as (descriptor, identity),
        ):
            seconds = _check_digest(self._layout.blob_path(digest), descriptor, digest)
            self._add_receipt(digest, identity)
        return seconds

    @contextlib.contextmanager
    def _unless_replaced(self, late: bool) -> Iterator[None]:
        """Ignore damage of a blob that is not kept if a build has replaced the bundle since it was loaded.

        The blob may be gone then, and nobody needs it. A bundle that is read now is read again instead.
        """
        try:
            yield
        except RejectError:
            if not (late and self._layout.is_replaced()):
                raise

    def _add_receipt(self, name: str, identity: Identity) -> None:
        if self._receipts is not None:
            self._receipts.add(name, identity)


class _Countdown:
    """Calls a function when it was called so many times, from any threads."""

    def __init__(self, count: int, then: Callable[[], object]) -> None:
        self._left = count
        self._then = then
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._then()


_buffers = threading.local()
"""One buffer a thread, for a chunk: a new one would have to be filled with zeros each time."""


def _check_chunk(
    file: _File, start: int, end: int, expected: str, done: Callable[[], object]
) -> float:
    seconds = check_chunk(file.path, file.descriptor, start, end, expected)
    done()
    return seconds


def check_chunk(path: str, descriptor: int, start: int, end: int, expected: str) -> float:
    """Compare a chunk of an open file with its digest.

    It is read, not mapped: if somebody truncates the file meanwhile, the result is an error and no SIGBUS.

    Args:
        path: the file, for errors.
        descriptor: its file descriptor.
        start: where the chunk begins, in bytes.
        end: where it ends.
        expected: its digest by BLAKE3, in hexadecimal digits.

    Returns:
        The seconds that reading it took.

    Raises:
        RejectError: they differ, or the file is shorter.
        StoreError: the disk does not give its bytes.
    """
    from blake3 import blake3  # starts with a receipt do not need it

    size = end - start
    if len(getattr(_buffers, "chunk", b"")) < size:
        _buffers.chunk = bytearray(size)
    view, count = memoryview(_buffers.chunk)[:size], 0
    started = time.perf_counter()
    with _readable(path):
        while count < size and (more := os.preadv(descriptor, [view[count:]], start + count)):
            count += more
    seconds = time.perf_counter() - started
    where = f"bytes {start} to {end - 1}"
    if count < size:
        raise RejectError(path, f"{where}: expected {size} bytes, found {count}")
    found = blake3(view).hexdigest()
    if found != expected:
        raise RejectError(path, f"{where}: expected blake3 {expected}, found {found}")
    return seconds


def _check_digest(path: str, descriptor: int, digest: str) -> float:
    """Compare an open file with its digest. Result and errors as `check_chunk`."""
    with _readable(path):
        found, seconds = timed_digest_file(descriptor)
    if found != digest:
        raise RejectError(path, f"expected {digest}, found {found}")
    return seconds


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Raise StoreError where a disk fails."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: cannot read: {error.strerror}",
            hint="the disk or the network failed, and the bundle may be sound: see the system's log",
        ) from error


def check_blobs(
    layout: Layout,
    manifests: Collection[ImageManifest],
    receipts: Receipts | None,
    *,
    keep: Collection[ImageManifest] = (),
) -> Blobs:
    """Verify every blob of a bundle now, each whole. Arguments and errors as `Blobs` and `Blobs.verify`."""
    blobs = Blobs(layout, manifests, receipts, keep=keep)
    blobs.verify()
    return blobs


def read_whole(path: str | os.PathLike[str], read: Callable[[Layout, Index, str], _T]) -> _T:
    """Read one bundle whole, the old one or the new one, even if a build replaces it meanwhile.

    Readers take no lock. They begin again if a check fails and the index has changed since they began.

    Args:
        path: directory of the bundle.
        read: reads from the layout; also takes the index and the bundle's digest. It may be called several
            times.

    Raises:
        StoreError: the directory cannot be opened, or a build replaces it again and again.
        RejectError: the bundle is damaged.
    """
    for _ in range(_ATTEMPTS):
        with Layout(path) as layout:
            try:
                index, digest = open_index(layout)
                return read(layout, index, digest)
            except RejectError:
                if not layout.is_replaced():
                    raise
    raise StoreError(
        f"{os.fspath(path)}: cannot read a bundle: it was replaced {_ATTEMPTS} times meanwhile",
        hint="wait until the builds that write to this directory are done, then try again",
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a bundle, mapped.

    Attributes:
        content: its bytes, which may be damaged until `wait` has returned for them.
        path: the file, for errors.
        digest: its digest.
        verification: verifies it; by default it is verified.
    """

    content: Content
    path: str
    digest: str = ""
    verification: Verification = VERIFIED

    def wait(self, start: int = 0, end: int | None = None) -> Content:
        """Return the content after a part of it was verified.

        Args:
            start: where the part begins, in bytes.
            end: where it ends; None: at the end of the layer.

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
