"""Verification of a bundle's files in threads, in the order of need, while the caller does other things.

A caller that needs some bytes waits for them, and helps: on one CPU it does the work itself. A failure is
raised to whoever waits for anything afterwards, so that no request ends as if the bundle were sound.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, final

from prejit.runtime.base.file_hashing import digest_file, hash_file
from prejit.runtime.base.files import Content, store_errors
from prejit.runtime.base.process_facts import span
from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.errors import RejectError
from prejit.runtime.format.bundle_schema import Chunks, Descriptor
from prejit.runtime.format.layout import Layout, OpenFile
from prejit.runtime.format.verified_bytes import Verification

SMALL_BYTES = 1 << 20
"""A load waits for blobs that are smaller. SHA-256 takes 0.5 ms for so many bytes."""


class Job(NamedTuple):
    """The verification of a part of a blob, in bytes from its start.

    `run` returns the seconds that reading took. It raises RejectError if the part is damaged, StoreError if
    the disk does not give it.
    """

    blob: str
    start: int
    end: int
    run: Callable[[], float]


_WAITING, _RUNNING, _DONE = range(3)


@final
class HashingVerification(Verification):
    """Jobs that threads run in their order, and callers that wait for some of them. Thread-safe."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        threads: int = 0,
        finished: Callable[[], object] | None = None,
        failed: Callable[[], object] | None = None,
    ) -> None:
        """Begin.

        Args:
            jobs: in the order in which their bytes are needed.
            threads: number of threads that run them; 0: only callers that wait do.
            finished: called once, by the thread that ran the last job, if all jobs succeeded.
            failed: called once after a failure, when no job runs any more.
        """
        super().__init__()
        self._jobs = jobs
        self._states = [_WAITING] * len(jobs)
        self._left = len(jobs)
        self._first = 0  # no job before it is waiting
        self._failure: Exception | None = None
        self._is_finishing = False  # all jobs are done, and `finished` is being called
        self._finished, self._failed = finished, failed
        self._running = 0
        self._job_seconds = self._read_seconds = 0.0  # of all threads together
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        for _ in range(min(threads, len(jobs))):
            # Without a thread, whoever waits runs the jobs.
            if (thread := start_thread(self._work, "prejit-verify")) is not None:
                self._threads.append(thread)

    @property
    def is_finished(self) -> bool:
        """True if every job has succeeded and `finished` has returned."""
        return self._left == 0 and not self._is_finishing

    @property
    def read_share(self) -> float:
        """The part of the work so far that was reading, 0 to 1."""
        return self._read_seconds / self._job_seconds if self._job_seconds else 0.0

    def check(self) -> None:
        """Raise the failure, if there is one by now."""
        failure = self._failure
        if failure is not None:
            # A new error each time: one with a traceback would keep this object, and with it every open file.
            raised = type(failure).__new__(type(failure), *failure.args)
            vars(raised).update(vars(failure))
            raise raised

    def wait(self, blob: str, start: int = 0, end: int | None = None) -> None:
        """Wait until a part of a blob is verified."""
        needed = [
            place
            for place, job in enumerate(self._jobs)
            if job.blob == blob and job.end > start and (end is None or job.start < end)
        ]
        self._help(needed)

    def wait_for_small(self) -> None:
        """Wait for every blob of less than `SMALL_BYTES`. Raises as `check`."""
        self._help([p for p, job in enumerate(self._jobs) if job.end < SMALL_BYTES])

    def finish(self) -> None:
        """Wait until every job has succeeded. Raises as `check`."""
        if not self.is_finished:
            self._help(range(len(self._jobs)))
        self.check()

    def stop(self, reason: Exception) -> None:
        """Run no more jobs and wait for the threads. Whoever waits for a job that is left gets the reason."""
        with self._changed:
            is_over = False
            if self._left and self._failure is None:
                self._failure = reason
                is_over = self._running == 0
            self._changed.notify_all()
        if is_over:
            self._end_after_failure()
        for thread in self._threads:
            thread.join()

    def refuse(self, reason: Exception) -> None:
        """Give everybody who would wait the reason, without taking a lock."""
        if not self.is_finished:
            self._failure = reason

    def _help(self, needed: Sequence[int]) -> None:
        if self.is_finished:
            return
        self.check()  # a fork may never get the lock
        started = time.perf_counter()
        for place in needed:
            if self._take(place):
                self._run(place)
            self.check()
        with self._changed:
            while self._failure is None and (
                self._is_finishing or any(self._states[place] != _DONE for place in needed)
            ):
                self._changed.wait()
        self.check()
        self.waits.append(span("verification", started))

    def _take(self, place: int) -> bool:
        with self._changed:
            if self._states[place] != _WAITING or self._failure is not None:
                return False
            self._states[place] = _RUNNING
            self._running += 1
            return True

    def _work(self) -> None:
        # At exit the interpreter waits for this thread.
        while self._failure is None and threading.main_thread().is_alive():
            with self._changed:
                while self._first < len(self._jobs) and self._states[self._first] != _WAITING:
                    self._first += 1
                place = self._first
            if place == len(self._jobs):
                return
            if self._take(place):
                self._run(place)

    def _run(self, place: int) -> None:
        failure: Exception | None = None
        started, reading = time.perf_counter(), 0.0
        try:
            reading = self._jobs[place].run()
        except Exception as error:  # whoever waits gets it
            failure = error.with_traceback(None)
        with self._changed:
            self._states[place] = _DONE
            self._job_seconds += time.perf_counter() - started
            self._read_seconds += reading
            self._failure = self._failure or failure
            self._left -= failure is None
            self._running -= 1
            is_over = self._failure is not None and self._running == 0
            self._is_finishing = is_last = self._left == 0
            self._changed.notify_all()
        if is_over:
            self._end_after_failure()
        if is_last:
            if self._finished is not None:
                self._finished()
            with self._changed:
                self._is_finishing = False
                self._changed.notify_all()
            self._forget()

    def _end_after_failure(self) -> None:
        if self._failed is not None:
            self._failed()
        self._forget()

    def _forget(self) -> None:
        """Drop the functions of the jobs, which keep the files that they read."""
        self._jobs = [job._replace(run=_nothing) for job in self._jobs]
        self._finished = self._failed = None


def _nothing() -> float:
    """Verify nothing: the work is over."""
    return 0.0


def check_chunk(
    file: OpenFile, start: int, end: int, expected: str, *hashers: hashlib._Hash
) -> float:
    """Compare a chunk of a file with its digest by BLAKE3. Return the seconds that reading it took.

    `hashers` get the bytes too.

    Raises:
        RejectError: they differ, or the file is shorter.
        StoreError: the disk does not give its bytes.
    """
    from blake3 import blake3  # starts with a receipt do not need it

    if file.arriving is not None:
        file.arriving.wait(end)
    size, chunk = end - start, blake3()
    with _readable(file.path):
        count, seconds = hash_file(file.descriptor, [chunk, *hashers], start, end)
    where = f"bytes {start} to {end - 1}"
    if count < size:
        raise RejectError(file.path, f"{where}: expected {size} bytes, found {count}")
    if (found := chunk.hexdigest()) != expected:
        error = RejectError(file.path, f"{where}: expected blake3 {expected}, found {found}")
        if file.arriving is not None:
            file.arriving.refuse(error)
        raise error
    # While we wait for the network; one by one they take 0.5 s for 500 MB.
    if file.arriving is not None:
        _map_pages(file.content, start, size)
    return seconds


def check_whole(file: OpenFile, digest: str, chunks: Chunks | None) -> float:
    """Compare a file with its digest and with those of its chunks, in one pass.

    Result and errors as `check_chunk`.
    """
    hasher, seconds = hashlib.sha256(), 0.0
    if chunks is None:
        if file.arriving is not None:
            file.arriving.wait(file.identity.size)
        with _readable(file.path):
            _, seconds = hash_file(file.descriptor, [hasher])
    else:
        for start, end, expected in chunks.places(file.identity.size):
            seconds += check_chunk(file, start, end, expected, hasher)
    if (found := f"sha256:{hasher.hexdigest()}") != digest:
        raise RejectError(file.path, f"expected {digest}, found {found}")
    return seconds


_readable = partial(
    store_errors,
    what="read",
    hint="the disk or the network failed, and the bundle may be sound: see the system's log",
)


def check_blob(layout: Layout, at: Descriptor) -> None:
    """Check the digest and the size of one blob, without a map of it.

    Raises:
        RejectError: it is missing, or differs.
        StoreError: the disk does not give its bytes.
    """
    path = layout.blob_path(at.digest)
    with layout.open_blob(at.digest, at.size) as (descriptor, _), _readable(path):
        found = digest_file(descriptor)
    if found != at.digest:
        raise RejectError(path, f"expected {at.digest}, found {found}")


_MADV_POPULATE_READ = 22
"""A number of madvise(2), which Python has no name for."""


def _map_pages(content: Content, start: int, size: int) -> None:
    """Enter a part of a map, which begins with a page, into the page tables at once (Linux 5.14)."""
    if not isinstance(content, bytes):
        with contextlib.suppress(OSError):
            content.madvise(_MADV_POPULATE_READ, start, size)
