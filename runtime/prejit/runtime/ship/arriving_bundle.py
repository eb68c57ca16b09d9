"""A bundle that is loaded while its weights arrive.

    policy -> all else, and a beginning of the weights -> `load` reads, checks and begins
           -> the rest of the weights, each chunk checked

What reads it waits for bytes as it waits for their verification. Once all is there, the bundle is one of the
store's, as if it had been pulled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import final

from prejit.runtime.base.files import Identity
from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.errors import PrejitError, RejectError, StoreError
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.ship.blob_directory import ArrivingBlob
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.repository import BundleFiles, Shipment
from prejit.runtime.ship.shipping import Counting

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 2.0
_AHEAD_BYTES = 16 << 20
"""How much of the weights arrives beside all else. To hash more of them would slow down the start."""
_LOOK_SECONDS = 0.05
"""How often a thread that waits looks whether there is still something to wait for."""


@final
class ArrivingBundle:
    """Implements `format.layout.TargetFiles` for a bundle whose weights are on the way to a store."""

    def __init__(
        self,
        files: BundleFiles,
        shipment: Shipment,
        arriving: Sequence[Descriptor],
        store: MachineStore,
        counting: Counting,
        held: contextlib.ExitStack,
    ) -> None:
        """Begin to fetch what arrives.

        Args:
            files: where the bundle comes from.
            shipment: the bundle.
            arriving: the blobs that arrive, in the order of need. More than a beginning of them is fetched
                after `go_on`.
            store: where they go.
            counting: counts their bytes.
            held: keeps the store from being collected; closed when all is there.
        """
        self.path = store.directory(shipment.digest)
        self.blobs_root, self.has_shared_blobs = store.path, True
        self._files, self._shipment, self._store = files, shipment, store
        self.file_path, self.blob_path = files.file_path, files.blob_path
        self.read_blob = files.read_blob
        self._arrivals = {at.digest: ArrivingBlob() for at in arriving}
        self._others_are_here = threading.Event()
        # The thread has no reference to this object: nobody waits for what nobody has.
        self._drop = weakref.finalize(self, setattr, counting, "is_over", True)
        what = files, shipment, arriving, self._arrivals, store, counting
        self._fetch = partial(_fetch, *what, held, self._others_are_here)
        self._thread = start_thread(self._fetch, "prejit-arrival")

    def go_on(self) -> None:
        """Fetch the rest: all blobs that do not arrive are in the store."""
        self._others_are_here.set()
        if self._thread is None:
            self._fetch()

    def close(self) -> None:
        """Fetch no more. What has arrived stays, and the next load goes on behind it."""
        self._drop()
        for each in self._arrivals.values():  # whoever verifies waits for them
            each.fail(
                StoreError("the bundle is closed", hint="load it again: what arrived is kept")
            )
        if self._thread is not None:  # a network that is silent may keep it longer
            self._thread.join(_CLOSE_SECONDS)

    def disown(self, reason: Exception) -> object:
        """Return what must not be freed in a forked process, which has no thread that fetches."""
        return self._arrivals

    # ------------------------------------------------------------------ what `load` reads

    def read(self, name: str, max_bytes: int) -> bytes:
        """See `LayoutFiles.read`."""
        if name != "index.json":
            return self._files.read(name, max_bytes)
        return self._shipment.index_file

    @contextlib.contextmanager
    def open_blob(self, digest: str, size: int) -> Iterator[tuple[int, Identity]]:
        """See `TargetFiles.open_blob`. One that arrives is opened as soon as it has a file."""
        arrival = self._arrivals.get(digest)
        descriptor = self._store.open_blob(digest) if arrival is None else arrival.open()
        try:
            status = os.fstat(descriptor)
            if status.st_size != size:
                raise RejectError(
                    self.blob_path(digest), f"expected {size} bytes, found {status.st_size}"
                )
            yield descriptor, Identity.of(status)
        finally:
            os.close(descriptor)

    def arrives(self, digest: str) -> ArrivingBlob | None:
        """See `TargetFiles.arrives`."""
        return self._arrivals.get(digest)


def _fetch(
    files: BundleFiles,
    shipment: Shipment,
    arriving: Sequence[Descriptor],
    arrivals: Mapping[str, ArrivingBlob],
    store: MachineStore,
    counting: Counting,
    held: contextlib.ExitStack,
    others_are_here: threading.Event,
) -> None:
    """Fetch what arrives, then write the bundle into the store. See `ArrivingBundle`."""

    def wait_for_others() -> bool:
        while not others_are_here.wait(_LOOK_SECONDS):
            if counting.is_over:
                return False
        return True

    def pieces(at: Descriptor, start: int) -> Iterator[bytes | memoryview]:
        ahead = 0
        for piece in counting.pieces(files, at, start):
            yield piece
            ahead += len(piece)
            if ahead >= _AHEAD_BYTES:
                wait_for_others()
            # At exit the interpreter waits for this thread.
            if not threading.main_thread().is_alive():
                raise StoreError("the process ends", hint="try again: what arrived is kept")

    with held:
        for at in arriving:
            try:
                store.write(at, partial(pieces, at), arrivals[at.digest])
            except Exception as error:  # whoever waits gets it
                _log.error("%s: %s did not arrive: %s", shipment.digest, at.digest, error)
                for each in arrivals.values():
                    each.fail(error)
                return
        if not wait_for_others():
            return
        try:
            store.publish(shipment)
        except PrejitError as error:  # what is loaded is right, and goes on
            _log.warning("%s: is not kept in the store: %s", shipment.digest, error)
        else:
            _log.info("%s: has arrived", shipment.digest)
