"""Move a bundle from one place to another: only what the other side lacks, many blobs at a time.

open -> index and manifests -> which targets -> blobs that are missing -> documents -> the tag
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.names import REF_NAME
from prejit.runtime.format.root import Root, read_root
from prejit.runtime.ship.mounted_forms import form_of
from prejit.runtime.ship.reference import REGISTRY, Reference
from prejit.runtime.ship.repository import (
    BlobSource,
    Destination,
    Repository,
    Shipment,
    shipment_of,
)

if TYPE_CHECKING:
    from prejit.runtime.ship.registry_repository import Registry

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a transfer is: bytes that moved, and those that must."""

    moved: int
    missing: int


Report = Callable[[TransferProgress], object]


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of a transfer.

    Attributes:
        digest: the bundle's.
        blobs, moved_bytes: the blobs that moved, documents among them, and their bytes.
        present_bytes: bytes of blobs that the other side had.
        mounted_bytes: bytes of blobs that a registry took from another of its repositories.
    """

    digest: str
    blobs: int
    moved_bytes: int
    present_bytes: int
    mounted_bytes: int = 0


def open_repository(reference: Reference) -> Repository:
    """Return the place that a reference names. Nothing is connected or opened yet.

    Raises:
        UsageError: a package that reaches it is not installed.
    """
    # Each brings packages of its own.
    if reference.scheme == REGISTRY:
        from prejit.runtime.ship.registry_repository import Registry

        return Registry(reference)
    if reference.is_remote:
        from prejit.runtime.ship.object_repository import ObjectRepository

        return ObjectRepository(reference)
    from prejit.runtime.ship.directory_repository import DirectoryRepository, TarRepository

    return (TarRepository if reference.scheme == "tar" else DirectoryRepository)(reference.place)


def open_destination(reference: Reference) -> Repository:
    """Return the place where a bundle is to be. Errors as of `open_repository`.

    Raises:
        UsageError: it is a directory that another tool has written.
    """
    found = open_repository(reference)
    if reference.scheme == "dir":
        from prejit.runtime.ship.directory_repository import DirectoryRepository

        assert isinstance(found, DirectoryRepository)
        found.check_replaceable()
    return found


def targets_named(root: Root, names: Sequence[str], where: str) -> tuple[Descriptor, ...]:
    """Return the targets of a bundle with some names; all of them where no name is given.

    Raises:
        UsageError: the bundle has no such target.
    """
    known = {(at.annotations or {}).get(REF_NAME, ""): at for at in root.bundle.manifests}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"{where}: expected one of the targets {', '.join(known)}, found {unknown[0]!r:.80}",
            hint="`prejit inspect` lists the targets of a bundle",
        )
    return tuple(at for name, at in known.items() if not names or name in names)


def move(
    files: BlobSource,
    shipment: Shipment,
    into: Destination,
    tag: str,
    *,
    mounts_from: str = "",
    report: Report = lambda _: None,
) -> Moved:
    """Move what the other side lacks, then its documents and its tag.

    Args:
        files: where it comes from.
        shipment: what moves.
        into: where it goes.
        tag: leads to it there; empty: none does, or its digest.
        mounts_from: a repository of the same registry that has the blobs; empty: none.
        report: called as bytes move, by any thread.

    Raises:
        StoreError, RejectError: something does not arrive, or is not what its digest names. A further
            attempt goes on with what did.
    """
    try:
        missing = missing_blobs(shipment, into)
        counting = Counting(missing, report)
        move_blobs(files, missing, into, counting, mounts_from)
        into.publish(shipment, tag)
    finally:
        into.close()
    documents = sum(each.at.size for each in shipment.documents)
    mounted = counting.mounted
    absent = sum(at.size for at in missing) + documents
    count = len(missing) - len(mounted) + len(shipment.documents)
    present = shipment.size - absent
    return Moved(shipment.digest, count, absent - sum(mounted), present, sum(mounted))


def missing_blobs(shipment: Shipment, into: Destination) -> list[Descriptor]:
    """Return the blobs that the other side lacks, the largest first, which take longest."""
    with ThreadPoolExecutor(into.most_transfers, "prejit-ship") as pool:
        there = list(pool.map(into.has, shipment.blobs))
    missing = [at for at, is_there in zip(shipment.blobs, there, strict=True) if not is_there]
    return sorted(missing, key=lambda at: -at.size)


def move_blobs(
    files: BlobSource,
    missing: Sequence[Descriptor],
    into: Destination,
    counting: Counting,
    mounts_from: str = "",
) -> None:
    """Move blobs, many at a time. Arguments and errors as of `move`."""
    with ThreadPoolExecutor(into.most_transfers, "prejit-ship") as pool:
        jobs = [pool.submit(_move_one, files, at, into, mounts_from, counting) for at in missing]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:  # ctrl-C, too
            if not all(job.done() for job in jobs):
                counting.is_over = True
                pool.shutdown(cancel_futures=True)
    failed = [job.exception() for job in jobs if not job.cancelled() and job.exception()]
    for error in sorted(failed, key=lambda error: isinstance(error, _OverError)):
        assert error is not None
        raise error


class _OverError(StoreError):
    """Another blob's transfer has failed, or the user has stopped all."""


class Counting:
    """Counts bytes as they move, and ends a transfer that is over: once somebody sets `is_over`.

    `mounted` has the sizes of the blobs that a registry took from another of its repositories.
    """

    def __init__(self, missing: Sequence[Descriptor], report: Report) -> None:
        """`missing` moves; `report` is called as it does."""
        self.is_over = False
        self.mounted: list[int] = []
        self._moved, self._missing, self._report = 0, sum(at.size for at in missing), report
        self._lock = threading.Lock()

    def pieces(self, files: BlobSource, at: Descriptor, start: int) -> Iterator[bytes | memoryview]:
        """Yield a blob's bytes from a place on. Raise StoreError once the transfer is over."""
        self.add(start)
        for piece in files.pieces(at, start):
            if self.is_over:
                raise _OverError("the transfer was stopped", hint="try again: what arrived is kept")
            yield piece
            self.add(len(piece))

    def add(self, count: int) -> None:
        """Count bytes that moved."""
        with self._lock:
            self._moved += count
            self._report(TransferProgress(min(self._moved, self._missing), self._missing))


def _move_one(
    files: BlobSource, at: Descriptor, into: Destination, mounts_from: str, counting: Counting
) -> None:
    if mounts_from:
        registry: Registry = into  # type: ignore[assignment]
        if registry.mount(at, mounts_from):
            _log.debug("%s: mounted from %s", at.digest, mounts_from)
            counting.mounted.append(at.size)
            counting.add(at.size)
            return
    _log.debug("%s: %d bytes to %s", at.digest, at.size, into.name)
    into.write(at, lambda start: counting.pieces(files, at, start))


def ship(
    source: Reference,
    target: Reference,
    names: Sequence[str] = (),
    report: Report = lambda _: None,
    *,
    form: str = "",
) -> Moved:
    """Move a bundle, or some of its targets, from one reference to another.

    `form`: a form of `mounted_forms` in which it arrives, which platforms mount; empty: as a bundle.

    Raises:
        UsageError: a target is unknown, or the other side cannot hold some targets alone, or a form.
        StoreError, RejectError: see `move`.
    """
    if form and target.is_remote and target.scheme != REGISTRY:
        raise UsageError(
            f"{target}: expected a registry, a directory or a .tar for the form {form}, found a bucket or "
            "a web server",
            hint="platforms mount what is in a registry; a bucket holds the bundle as it is",
        )
    at, into = open_repository(source), open_destination(target)
    files = at.open(source.tag, source.digest)
    root = read_root(files)
    chosen = targets_named(root, names, str(source))
    content: BlobSource = files
    if form:
        content, shipment = form_of(form, files, root, chosen)
    else:
        shipment = shipment_of(files, root, chosen)
        if target.scheme == REGISTRY and len(chosen) < len(root.bundle.manifests):
            shipment = _alone(shipment, chosen, source)
    if target.digest and target.digest != shipment.digest:
        raise UsageError(
            f"{target}: expected the digest of what is pushed, {shipment.digest}",
            hint="leave the digest out: it follows from the bundle",
        )
    mounts_from = mountable(source, target)
    return move(content, shipment, into, target.tag, mounts_from=mounts_from, report=report)


def mountable(source: Reference, target: Reference) -> str:
    """Return the repository from which a registry can take blobs itself; empty: from none."""
    is_same_host = source.scheme == target.scheme == REGISTRY and source.host == target.host
    return source.path if is_same_host and source.path != target.path else ""


def _alone(shipment: Shipment, chosen: Sequence[Descriptor], source: Reference) -> Shipment:
    """Return one target without the bundle's index: a registry wants all that an index lists."""
    if len(chosen) > 1:
        raise UsageError(
            f"{source}: expected one target or all of them: a registry takes no index whose other "
            "manifests are missing",
            hint="push all targets, or each under a tag of its own",
        )
    kept = tuple(each for each in shipment.documents if each.at.digest != shipment.digest)
    return replace(shipment, digest=chosen[0].digest, documents=kept)
