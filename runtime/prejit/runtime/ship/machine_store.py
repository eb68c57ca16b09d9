"""The bundles of this machine, by digest: fetched once, shared by processes, users and containers.

    blobs/sha256/<hex>               the blobs of all bundles, once each
    bundles/<hex>/index.json         a bundle: `load` takes this directory, and finds its blobs in the store
    bundles/<hex>/oci-layout
    tags/<hash>.json                 which digest a tag had when it was last asked for
    pins/<hex>                       `gc` leaves the bundle alone

`$PREJIT_BUNDLES` names it, else it is below the user's cache. It may be mounted read-only.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prejit.runtime.base.files import is_digest, store_errors, user_directory
from prejit.runtime.base.written_files import lock_file, unlock, write_file
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.index_writing import locked
from prejit.runtime.format.layout import STORED, Layout
from prejit.runtime.format.names import BUNDLE_NAME, OCI_LAYOUT
from prejit.runtime.format.referrers import reached
from prejit.runtime.format.root import Root, read_root
from prejit.runtime.machine.kept_files import Receipts
from prejit.runtime.ship.blob_directory import BlobDirectory
from prejit.runtime.ship.reference import Reference
from prejit.runtime.ship.repository import MOST_TRANSFERS, Shipment

BUNDLES = "PREJIT_BUNDLES"
"""The environment variable that names the store."""


def machine_store() -> MachineStore:
    """Return the store of this machine."""
    if given := os.environ.get(BUNDLES):
        return MachineStore(Path(given))
    return MachineStore(user_directory("XDG_CACHE_HOME", "~/.cache") / "bundles")


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle of the store.

    Attributes:
        digest, name: the bundle's digest, and its name for people.
        targets: how many of its targets are here.
        size: bytes of its blobs, those that other bundles have too among them.
        used: when it was last asked for, in seconds since 1970.
        is_pinned: whether `gc` leaves it alone.
    """

    digest: str
    name: str
    targets: int
    size: int
    used: float
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of `MachineStore.collect`, or of its dry run: bundles, files, and their bytes."""

    bundles: int
    files: int
    freed_bytes: int


class MachineStore:
    """Implements the writing half of `repository.Repository`, and gives what `load` reads."""

    def __init__(self, path: Path) -> None:
        """Nothing is opened or made yet."""
        self.path, self.name, self.most_transfers = path, str(path), MOST_TRANSFERS
        self._blobs = BlobDirectory(path)
        self.has, self.write = self._blobs.has, self._blobs.write
        self.open_blob = self._blobs.open

    def directory(self, digest: str) -> Path:
        """Return the directory of a bundle, which `load` takes."""
        return self.path / STORED / digest.removeprefix("sha256:")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep `collect` away while a bundle arrives.

        A store without locks, which `collect` refuses, and one that this user only reads have no need of it.
        """
        with contextlib.ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True, mode=0o755)
                descriptor = lock_file(self.path / "lock", shared=True)
                held.callback(unlock, descriptor)
            except OSError as error:
                has_no_locks = error.errno in (errno.ENOLCK, errno.EOPNOTSUPP)
                if not self.path.is_dir() or (os.access(self.path, os.W_OK) and not has_no_locks):
                    raise StoreError(
                        f"{self.path}: cannot write to the store of bundles: {error.strerror}",
                        hint=f"name another directory in {BUNDLES}",
                    ) from error
            yield

    def check_room(self, shipment: Shipment) -> None:
        """Raise StoreError where the disk has no room for what is missing of a bundle.

        Others write to the disk meanwhile: it may be full later nevertheless.
        """
        lacking = sum(map(self._blobs.lacking_bytes, shipment.all))
        disk = None
        with contextlib.suppress(OSError):
            disk = shutil.disk_usage(self.path)
        if disk is None or not disk.total or not os.access(self.path, os.W_OK):
            return  # a network file system that knows no sizes, or one that is read-only
        if lacking > disk.free:
            raise StoreError(
                f"{self.path}: expected {lacking} free bytes on its disk for what is missing of "
                f"{shipment.digest}, found {disk.free}",
                hint="free some space on that disk; `prejit store --gc SIZE` removes bundles",
            )

    def publish(self, shipment: Shipment, tag: str = "") -> None:
        """See `Repository.publish`. A bundle of which other targets are here keeps them."""
        self._check_directories()
        for document in shipment.documents:
            self.write(document.at, document.pieces)
        directory = self.directory(shipment.digest)
        with store_errors(directory, "make it"):
            directory.mkdir(parents=True, exist_ok=True)
        with locked(directory):
            # Another process may have fetched other targets since this one looked.
            others = self.targets_of(shipment.digest)
            others -= {document.at.digest for document in shipment.documents}
            if others and shipment.beside is not None:
                wider = shipment.beside(others)
                shipment = wider if all(map(self.has, wider.all)) else shipment
            write_file(directory / "oci-layout", OCI_LAYOUT)
            write_file(directory / "index.json", shipment.index_file)
        receipts = Receipts(self.path, is_shared=True)
        for digest, identity in self._blobs.written.items():
            receipts.add_written(digest, identity)
        receipts.save()

    def close(self) -> None:
        """See `Destination.close`. Another attempt, or another process, goes on with what arrived."""

    def holds(self, shipment: Shipment) -> bool:
        """Return whether a bundle is here with all these targets, and with what is attached to it now."""
        try:
            held = (self.directory(shipment.digest) / "index.json").read_bytes()
        except OSError:
            return False
        return held == shipment.index_file and all(map(self.has, shipment.blobs))

    def is_whole(self, layout: Layout, root: Root) -> bool:
        """Return whether the store has all files of a bundle that it lists."""
        return all(self._blobs.blob(digest).is_file() for digest in reached(layout, root))

    def targets_of(self, digest: str) -> frozenset[str]:
        """Return the digests of the manifests of a bundle's targets that are here."""
        with contextlib.suppress(StoreError, RejectError), Layout(self.directory(digest)) as layout:
            return frozenset(at.digest for at in read_root(layout).bundle.manifests)
        return frozenset()

    # ------------------------------------------------------------------ tags

    def remember(self, reference: Reference, digest: str) -> None:
        """Note which digest a tag has now."""
        path = self._tag_file(reference)
        with contextlib.suppress(OSError, StoreError):  # a store that is read-only
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps({"reference": str(reference), "digest": digest}).encode())

    def remembered(self, reference: Reference) -> str:
        """Return the digest that a tag had when it was last asked for; empty: nobody knows."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._tag_file(reference).read_bytes())
            digest = found["digest"] if isinstance(found, dict) else ""
            return digest if isinstance(digest, str) and is_digest(digest) else ""
        return ""

    def _tag_file(self, reference: Reference) -> Path:
        name = hashlib.sha256(str(reference.at("")).encode()).hexdigest()
        return self.path / "tags" / f"{name}.json"

    # ------------------------------------------------------------------ what is kept

    def note_use(self, digest: str) -> None:
        """Note that a bundle is used now."""
        with contextlib.suppress(OSError):  # a store that is read-only
            os.utime(self.directory(digest) / "index.json")

    def pin(self, digest: str, *, is_pinned: bool) -> None:
        """Let `collect` leave a bundle alone, or not any more. Raise StoreError where there is none."""
        if not is_digest(digest) or not self.directory(digest).is_dir():
            raise StoreError(
                f"{self.path}: expected a bundle {digest}, found none",
                hint="`prejit store` lists the bundles of this machine",
            )
        path = self.path / "pins" / digest.removeprefix("sha256:")
        with store_errors(path, "write"):
            path.parent.mkdir(exist_ok=True)
            path.touch() if is_pinned else path.unlink(missing_ok=True)

    def bundles(self) -> list[StoredBundle]:
        """Return all bundles, the last used first."""
        return [each for each, _ in self._bundles()]

    def _bundles(self) -> list[tuple[StoredBundle, set[str]]]:
        """Return all bundles that are sound, the last used first, each with the digests of its blobs."""
        found = []
        for directory in _entries(self.path / STORED):
            digest = f"sha256:{directory.name}"
            pinned = (self.path / "pins" / directory.name).exists()
            try:
                with Layout(directory) as layout:
                    root = read_root(layout)
                    needed = reached(layout, root)
            except RejectError as error:
                if pinned:
                    raise StoreError(
                        f"{error}", hint=f"fetch it again, or: prejit store --unpin {digest}"
                    ) from error
                continue
            used = (directory / "index.json").stat().st_mtime
            size = sum(map(self._size, needed))
            name = root.bundle.annotations[BUNDLE_NAME]
            count = len(root.bundle.manifests)
            found.append((StoredBundle(digest, name, count, size, used, pinned), needed))
        return sorted(found, key=lambda item: -item[0].used)

    def _size(self, digest: str) -> int:
        try:
            return self._blobs.blob(digest).stat().st_size
        except OSError:
            return 0

    def collect(self, max_bytes: int, max_age: float, *, dry_run: bool = False) -> Collected:
        """Remove bundles, the last used last, until the rest has at most so many bytes.

        What no bundle leads to goes too: blobs and parts of them that a killed transfer left. A process
        that has loaded a bundle keeps its files, which it has mapped.

        Args:
            max_bytes: size of what may stay. Pinned bundles stay whatever they have.
            max_age: bundles that were not used for so many seconds go.
            dry_run: whether to remove nothing.

        Raises:
            StoreError: the store cannot be written, or a bundle arrives at this moment, or one cannot be
                read. Nothing is removed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_directories()
            descriptor = lock_file(self.path / "lock", wait=False)
        except BlockingIOError as error:
            raise StoreError(
                f"{self.path}: a bundle is being fetched into this store", hint="try again later"
            ) from error
        except OSError as error:
            raise StoreError(f"{self.path}: cannot lock it: {error.strerror}") from error
        try:
            return self._collect(max_bytes, max_age, dry_run)
        finally:
            unlock(descriptor)

    def _check_directories(self) -> None:
        """Raise StoreError where another process has put a link into the store: it may lead anywhere."""
        for name in ("blobs", "blobs/sha256", STORED, ".partial", "tags", "pins"):
            path = self.path / name
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise StoreError(f"{path}: expected a directory, found something else")

    def _collect(self, max_bytes: int, max_age: float, dry_run: bool) -> Collected:
        kept, total = set[str](), 0
        every = (directory.name for directory in _entries(self.path / STORED))
        gone = {name for name in every if is_digest(f"sha256:{name}")}
        for each, needed in sorted(self._bundles(), key=lambda item: not item[0].is_pinned):
            size = sum(self._size(digest) for digest in needed - kept)
            is_young = time.time() - each.used <= max_age
            if each.is_pinned or (is_young and total + size <= max_bytes):
                total += size
                kept |= needed
                gone.discard(each.digest.removeprefix("sha256:"))
        names = {digest.removeprefix("sha256:") for digest in kept}
        blobs = [
            file
            for file in _entries(self.path / "blobs" / "sha256")
            if file.name not in names and is_digest(f"sha256:{file.name}")
        ]
        killed = [*self.path.glob("*/.*.tmp"), *self.path.glob("*/*/.*.tmp")]  # of `write_file`
        files = [*blobs, *_entries(self._blobs.partial), *killed]
        freed = sum(file.lstat().st_size for file in files)
        if not dry_run:
            for name in gone:  # first, so that no bundle is left without its blobs
                shutil.rmtree(self.path / STORED / name, ignore_errors=True)
            for file in files:
                file.unlink(missing_ok=True)
        return Collected(len(gone), len(files), freed)


def _entries(directory: Path) -> list[Path]:
    with store_errors(directory, "read it"), contextlib.suppress(FileNotFoundError):
        return sorted(directory.iterdir())
    return []
