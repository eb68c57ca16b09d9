"""Fetch the bundle that a reference names into this machine's store, as far as it is needed and allowed.

The index, manifests and signatures come first. The trust policies decide about them before the weights
are fetched.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from prejit.runtime.errors import RejectError, StoreError, UntrustedError
from prejit.runtime.fallback_reporting import closest_target, mismatch
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Chunks, Descriptor
from prejit.runtime.format.checks.oci import check_index
from prejit.runtime.format.layout import Layout, LayoutFiles
from prejit.runtime.format.names import BUNDLE_NAME, INDEX_MEDIA_TYPE, WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import OpenTarget, match, read_contents, read_manifests
from prejit.runtime.format.root import Root, read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.arriving_bundle import ArrivingBundle
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.reference import Reference
from prejit.runtime.ship.repository import BundleFiles, Shipment, shipment_of
from prejit.runtime.ship.shipping import (
    Counting,
    Moved,
    Report,
    missing_blobs,
    move,
    move_blobs,
    open_destination,
    open_repository,
    targets_named,
)

_log = logging.getLogger(__name__)
OFFLINE = "PREJIT_OFFLINE"
"""The environment variable that lets a tag mean what it meant when it was last asked for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which targets of a bundle are fetched.

    Attributes:
        machine: the target that this machine loads is; None: those of `names`, or all.
        names: names of targets.
        must_match: whether to raise MismatchError where the machine matches no target. If not, the closest
            one is fetched, whose portable programs the machine can compile.
    """

    machine: Fingerprint | None = None
    names: tuple[str, ...] = ()
    must_match: bool = False


@dataclass(frozen=True, slots=True)
class Pulled:
    """A bundle of the store, which `load` takes as `path`, and what moved; None: it was all there."""

    path: Path
    digest: str
    moved: Moved | None


def pull(
    reference: Reference,
    store: MachineStore,
    wanted: Wanted,
    policies: Sequence[str] = (),
    report: Report = lambda _: None,
) -> Pulled:
    """Fetch what this machine lacks of a bundle, and return where it is.

    Args:
        reference: where it comes from.
        store: where it goes.
        wanted: which of its targets.
        policies: the files of the trust policies that must let it run.
        report: called as bytes move, by any thread.

    Raises:
        UntrustedError: a policy refuses it. Only its index, manifests and signatures were fetched.
        MismatchError: the machine matches no target, and must.
        StoreError: the place does not answer, the disk is full, or a tag cannot be asked for.
        RejectError: what arrives is not what its digest names.
    """
    with contextlib.ExitStack() as held:
        found = _find(reference, store, wanted, policies, held)
        if isinstance(found, Pulled):
            return found
        moved = move(found.files, found.shipment, store, "", report=report)
    moved = replace(
        moved,
        moved_bytes=moved.moved_bytes - found.equal_bytes,
        present_bytes=moved.present_bytes + found.equal_bytes,
    )
    return Pulled(store.directory(moved.digest), moved.digest, moved)


def arrive(
    reference: Reference,
    store: MachineStore,
    wanted: Wanted,
    policies: Sequence[str] = (),
    report: Report = lambda _: None,
) -> tuple[Path, str, ArrivingBundle | None]:
    """Return the directory and the digest of a bundle of the store, and itself if its weights are on the way.

    All else has arrived, and the policies have allowed it. Arguments and errors as of `pull`.
    """
    with contextlib.ExitStack() as held:
        found = _find(reference, store, wanted, policies, held)
        if isinstance(found, Pulled):
            return found.path, found.digest, None
        missing = missing_blobs(found.shipment, store)
        weights = [at for at in missing if at.mediaType == WEIGHTS_MEDIA_TYPE]
        if found.loads_first:  # another process loads it from the store before this one may
            weights = []
        counting, arriving = Counting(missing, report), None
        if weights:
            what = found.files, found.shipment, weights, store, counting
            arriving = ArrivingBundle(*what, held.pop_all())
        try:
            move_blobs(found.files, [at for at in missing if at not in weights], store, counting)
        except BaseException:
            counting.is_over = True  # for the weights, too
            raise
        if arriving is None:
            store.publish(found.shipment)
        else:
            arriving.go_on()
    return store.directory(found.shipment.digest), found.shipment.digest, arriving


class _Found(NamedTuple):
    """A bundle in another place, which the store lacks in whole or in part.

    Attributes:
        files: its files.
        shipment: the targets that are here by then.
        equal_bytes: bytes of it that another bundle of the store has.
        loads_first: whether a policy wants a child process to load it before this one does.
    """

    files: BundleFiles
    shipment: Shipment
    equal_bytes: int
    loads_first: bool


def _find(
    reference: Reference,
    store: MachineStore,
    wanted: Wanted,
    policies: Sequence[str],
    held: contextlib.ExitStack,
) -> Pulled | _Found:
    """Return the bundle that a reference means now. `held` keeps the store from being collected."""
    if reference.digest and (here := _held(reference.digest, store, wanted)):
        with contextlib.suppress(UntrustedError):  # signatures may have been attached since
            _check_trust(here, wanted, policies)
            store.note_use(reference.digest)
            return here
    if os.environ.get(OFFLINE, "") not in ("", "0"):
        return _offline(reference, store, wanted, policies)
    held.enter_context(store.writing())
    files = open_repository(reference).open(reference.tag, reference.digest)
    root = read_root(files)
    _log.info("%s: is %s", reference, root.digest)
    targets, loads_first = _chosen(files, root, wanted, policies, str(reference))
    if not reference.digest:  # not before the policies let it run
        store.remember(reference, root.digest)
    present = store.targets_of(root.digest)
    kept = tuple(at for at in root.bundle.manifests if at.digest in present or at in targets)
    shipment = shipment_of(files, root, kept)
    if store.holds(shipment):
        store.note_use(root.digest)
        return Pulled(store.directory(root.digest), root.digest, None)
    store.check_room(shipment)
    root = root._replace(bundle=replace(root.bundle, manifests=kept))
    files, equal_bytes = with_equal_chunks(files, root, shipment, store)
    return _Found(files, shipment, equal_bytes, loads_first)


def pull_into(
    reference: Reference,
    output: Reference,
    wanted: Wanted,
    policies: Sequence[str] = (),
    report: Report = lambda _: None,
) -> Moved:
    """Fetch a bundle into a directory or a tar of its own. Arguments and errors as of `pull`."""
    files = open_repository(reference).open(reference.tag, reference.digest)
    root = read_root(files)
    targets, _ = _chosen(files, root, wanted, policies, str(reference))
    shipment = shipment_of(files, root, targets)
    return move(files, shipment, open_destination(output), "", report=report)


def _chosen(
    files: LayoutFiles, root: Root, wanted: Wanted, policies: Sequence[str], where: str
) -> tuple[tuple[Descriptor, ...], bool]:
    """Return the targets that are wanted, which every policy lets run, and whether one loads them first."""
    if wanted.machine is None:
        chosen = targets_named(root, wanted.names, where)
        candidates = [at for at in match(root, Fingerprint.current()) if at.descriptor in chosen]
    else:
        candidates = [_best(files, match(root, wanted.machine), wanted.must_match)]
        chosen = tuple(at.descriptor for at in candidates)
    loads_first = False
    if policies:
        from prejit.runtime.trust.enforcing import enforce

        manifests = read_manifests(files, candidates)
        loads_first = enforce(policies, files, root, candidates, manifests)[1] is not None
    return chosen, loads_first


def _best(files: LayoutFiles, targets: Sequence[OpenTarget], must_match: bool) -> OpenTarget:
    matching = next((target for target in targets if target.verdict.matches), None)
    if matching is None:
        if must_match:
            raise mismatch(files, targets)
        return closest_target(targets)
    return matching


def _held(digest: str, store: MachineStore, wanted: Wanted) -> Pulled | None:
    """Return a bundle of the store that has all that is wanted; None: it must be fetched."""
    path = store.directory(digest)
    with contextlib.suppress(StoreError, RejectError), Layout(path) as layout:
        root = read_root(layout)
        if root.digest != digest or root.subject is None or not store.is_whole(layout, root):
            return None
        whole = _index_of(layout, root)
        if wanted.machine is None:
            needed = {at.digest for at in targets_named(whole, wanted.names, str(path))}
        else:
            needed = {_best(layout, match(whole, wanted.machine), False).descriptor.digest}
        if needed <= {at.digest for at in root.bundle.manifests}:
            return Pulled(path, digest, None)
    return None


def _check_trust(here: Pulled, wanted: Wanted, policies: Sequence[str]) -> None:
    """Raise UntrustedError where a policy refuses a bundle of the store with what is attached to it here."""
    if policies:
        with Layout(here.path) as layout:
            _chosen(layout, read_root(layout), wanted, policies, str(here.path))


def _index_of(layout: LayoutFiles, root: Root) -> Root:
    """Return a bundle with all targets of its index, those that are not here among them."""
    assert root.subject is not None
    if root.subject.mediaType != INDEX_MEDIA_TYPE:
        return root
    content = layout.read_blob(root.subject)
    return root._replace(bundle=check_index(content, root.path))


def _offline(
    reference: Reference, store: MachineStore, wanted: Wanted, policies: Sequence[str]
) -> Pulled:
    digest = reference.digest or store.remembered(reference)
    found = _held(digest, store, wanted) if digest else None
    if found is None:
        raise StoreError(
            f"{reference}: {OFFLINE} is set, and {store.path} does not hold "
            f"{'what is wanted of ' + digest if digest else 'a bundle of this reference'}",
            hint="fetch it first, on this machine or another: prejit pull " + str(reference),
        )
    _check_trust(found, wanted, policies)
    _log.warning("%s: offline: %s, as it was when last asked for", reference, digest)
    store.note_use(digest)
    return found


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
