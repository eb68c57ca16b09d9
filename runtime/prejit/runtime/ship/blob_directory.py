"""Blobs of a directory, written as they arrive: hashed on the way, resumable, once for all processes.

blobs/sha256/<hex>     whole and right: it got this name after its last byte was hashed and synced
.partial/<hex>         what has arrived of a blob; the next attempt goes on behind it

A blob that is read while it arrives (`ArrivingBlob`) has its full size from the start: a hole, which fills.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from prejit.runtime.base.file_hashing import hash_file
from prejit.runtime.base.files import Identity
from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.base.written_files import lock_file, remove_and_unlock, sync_directory
from prejit.runtime.errors import PrejitError, RejectError, StoreError
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.ship.repository import PIECE_BYTES, Pieces, checked

_WRITE_BYTES = 16 << 10
"""Larger writes make larger folios, of memory that a virtual machine may have given back to its host: 0.9 to
1.4 s of CPU time for 1.2 GB with 256 KiB, 1.9 s with 1 MiB, 0.4 to 0.6 s with 16 KiB (Linux 6.18, ext4)."""
_HASH_BYTES = 8 << 20
"""Bytes that are hashed at a time, behind those that arrive: few turns at the lock of the interpreter."""


class ArrivingBlob:
    """A file that is read while it is written: how much of it is there. Thread-safe.

    `is_refused`: whether a reader has found wrong bytes.
    """

    def __init__(self) -> None:
        """Nothing is there yet."""
        self.is_refused = False
        self._changed = threading.Condition()
        self._descriptor = self._end = -1  # no file yet
        self._failure: BaseException | None = None

    def open(self) -> int:
        """Wait until the file has its size, and return a descriptor for it, which the caller closes."""
        self.wait(0)
        return os.dup(self._descriptor)

    def wait(self, end: int) -> None:
        """Wait until the bytes before a place are there.

        Raises:
            StoreError, RejectError: they do not arrive.
        """
        with self._changed:
            while self._end < end and self._failure is None:
                self._changed.wait()
            if self._end < end and self._failure is not None:
                raise self._failure.with_traceback(None)

    def refuse(self, reason: RejectError) -> None:
        """See `ArrivingFile.refuse`. Whoever writes the file ends, and removes it."""
        self.is_refused = True
        self.fail(reason)

    def opened(self, descriptor: int) -> None:
        """Say which file it is, by a descriptor that is this object's from now on. It has its full size."""
        self._descriptor = descriptor
        weakref.finalize(self, os.close, self._descriptor)

    def reached(self, end: int) -> None:
        """Say that the bytes before a place are there."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Say that no more bytes come, and why."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()


class BlobDirectory:
    """The blobs below a directory, and those on the way to it.

    Attributes:
        path: the directory.
        partial: the directory of what is on the way.
        written: the blobs that this object has written, by digest.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is made until a blob is written."""
        self.path = path
        self.partial = path / ".partial"
        self.written: dict[str, Identity] = {}

    def blob(self, digest: str) -> Path:
        """Return the file of a blob."""
        return self.path / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def open(self, digest: str) -> int:
        """Return a descriptor of a blob. Raise RejectError where it is missing or is no regular file."""
        path = self.blob(digest)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise RejectError(str(path), f"expected a file: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RejectError(str(path), "expected a regular file")
        return descriptor

    def has(self, at: Descriptor) -> bool:
        """Return whether a blob is there, whole. Its bytes were right when it was written."""
        try:
            status = os.stat(self.blob(at.digest), follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == at.size

    def lacking_bytes(self, at: Descriptor) -> int:
        """Return how many bytes a blob will take on the disk that it does not take now."""
        if self.has(at):
            return 0
        with contextlib.suppress(OSError):
            status = os.stat(self.partial / at.digest.removeprefix("sha256:"))
            return max(0, at.size - status.st_blocks * 512)  # the rest of it may be a hole
        return at.size

    def write(self, at: Descriptor, pieces: Pieces, arrival: ArrivingBlob | None = None) -> None:
        """Write a blob unless it is there. If several processes write it, one does and the others wait.

        `arrival` gets the progress.

        Raises:
            RejectError: other bytes arrive than the digest names. Nothing of them is kept.
            StoreError: they do not arrive, or the disk is full. What arrived is kept.
        """
        name = at.digest.removeprefix("sha256:")
        try:
            self.blob(at.digest).parent.mkdir(parents=True, exist_ok=True)
            with self._locked(name) as partial:
                if not self.has(at):
                    self._write(at, pieces, partial, arrival)
                elif arrival is not None:
                    arrival.opened(self.open(at.digest))
                    arrival.reached(at.size)
        except OSError as error:
            raise self._failed(error) from error

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        """Lock a blob, and yield the file to which only this process writes it."""
        path = self.partial / f"{name}.lock"
        try:
            self.partial.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = lock_file(path)
        except FileNotFoundError:
            # A process that has written all of its bundle has dropped the directory.
            with self._locked(name) as partial:
                yield partial
            return
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            # A file system without locks: each process that fetches the blob has a file of its own.
            own = self.partial / f"{name}.{os.getpid()}-{threading.get_ident()}"
            try:
                yield own
            finally:
                own.unlink(missing_ok=True)
            return
        try:
            yield self.partial / name
        finally:
            remove_and_unlock(path, descriptor)

    def _write(
        self, at: Descriptor, pieces: Pieces, partial: Path, arrival: ArrivingBlob | None
    ) -> None:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(descriptor, "r+b", buffering=0) as file:
            hasher = hashlib.sha256()
            filled = _filled(descriptor, at.size)
            for place in range(0, filled, PIECE_BYTES):
                hasher.update(os.pread(descriptor, min(PIECE_BYTES, filled - place), place))
            is_wrong = 0 < filled == at.size and f"sha256:{hasher.hexdigest()}" != at.digest
            if is_wrong or os.fstat(descriptor).st_size > at.size:
                partial.unlink()  # never cut: somebody may have mapped it
                self._write(at, pieces, partial, arrival)
                return
            file.seek(filled)
            if arrival is not None:
                file.truncate(at.size)
                arrival.opened(os.dup(descriptor))
                arrival.reached(filled)
            try:
                if arrival is not None:
                    self._write_arriving(file, at, pieces(filled), hasher, arrival)
                else:
                    for each in checked(at, pieces(filled), str(partial), hasher):
                        _write_piece(file, each)
            except PrejitError as error:
                is_wrong = isinstance(error, RejectError)
                if is_wrong or (arrival is not None and arrival.is_refused):
                    partial.unlink()
                if not is_wrong or not filled or arrival is not None:
                    raise
                # The wrong bytes may be those of an earlier attempt.
                self._write(at, pieces, partial, None)
                return
            os.fsync(descriptor)
            target = self.blob(at.digest)
            os.replace(partial, target)
            with contextlib.suppress(OSError):  # of another user, or a file system without modes
                os.fchmod(descriptor, 0o444)  # before, a kill would leave a part that cannot go on
            self.written[at.digest] = Identity.of(os.fstat(descriptor))
        sync_directory(target.parent)

    def _write_arriving(
        self,
        file: io.FileIO,
        at: Descriptor,
        pieces: Iterable[bytes | memoryview],
        hasher: hashlib._Hash,
        arrival: ArrivingBlob,
    ) -> None:
        """Write pieces and let `arrival` know at once. Hash them behind that, while a CPU is idle.

        Who reads them meanwhile compares them with the digests of their chunks, as with any directory.
        """
        where, digests = str(self.partial / at.digest.removeprefix("sha256:")), list[str]()
        hash_all = partial(
            _hash_behind, file.fileno(), at, file.tell(), hasher, arrival, digests.append
        )
        # An executor's thread would keep the interpreter from its exit.
        thread = start_thread(partial(_aside, hash_all), "prejit-hash")
        try:
            for piece in pieces:
                _write_piece(file, piece)
                arrival.reached(file.tell())
                if arrival.is_refused:
                    raise RejectError(where, "expected other bytes")
            if file.tell() != at.size:
                raise RejectError(where, f"expected {at.size} bytes, found {file.tell()}")
        except BaseException as error:  # the other thread waits for the rest
            arrival.fail(self._failed(error) if isinstance(error, OSError) else error)
            raise
        finally:
            if thread is not None:
                thread.join()
        if not digests:  # no thread could start, or it failed
            hash_all()
        if digests != [at.digest]:
            raise RejectError(where, f"expected the bytes of {at.digest}, found {digests[0]}")

    def _failed(self, error: OSError) -> StoreError:
        hint = "write where this user may; $PREJIT_BUNDLES names the store of bundles"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space on that disk and try again: what arrived is kept"
        elif error.errno == errno.ENOTDIR:
            hint = "a file has this name: give a directory, or a file that ends in .tar"
        return StoreError(f"{self.path}: cannot write: {error.strerror}", hint=hint)

    def keep_only(self, held: Iterable[Descriptor]) -> None:
        """Remove other blobs, and the directory of what is on the way, if nothing is."""
        kept = {self.blob(at.digest) for at in held}
        for file in (self.path / "blobs" / "sha256").iterdir():
            if file not in kept:
                with contextlib.suppress(OSError):
                    file.unlink()
        with contextlib.suppress(OSError):
            self.partial.rmdir()


def _write_piece(file: io.FileIO, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while view:
        view = view[file.write(view[:_WRITE_BYTES]) :]


def _hash_behind(
    descriptor: int,
    at: Descriptor,
    start: int,
    before: hashlib._Hash,
    arrival: ArrivingBlob,
    found: Callable[[str], object],
) -> None:
    """Hash a file from a place on, as it arrives. `before` has seen what is before that."""
    hasher = before.copy()
    for place in range(start, at.size, _HASH_BYTES):
        end = min(place + _HASH_BYTES, at.size)
        arrival.wait(end)
        hash_file(descriptor, [hasher], place, end)
    found(f"sha256:{hasher.hexdigest()}")


def _aside(hash_all: Callable[[], object]) -> None:
    """Hash with a tenth of a CPU that others want, and all of an idle one. Whoever waits finds the errors."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    with contextlib.suppress(OSError, PrejitError):
        hash_all()


def _filled(descriptor: int, size: int) -> int:
    """Return how many bytes at the start of a file have arrived, of a blob of this size."""
    found = os.fstat(descriptor).st_size
    if found != size or not size:
        return found if found < size else 0
    hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    # A file system knows holes by blocks: the last one may be filled in part.
    return size if hole == size else max(0, hole - 1) // PIECE_BYTES * PIECE_BYTES
