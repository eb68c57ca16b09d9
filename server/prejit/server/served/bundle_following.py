"""Let a server follow tags and directories: another bundle there takes the place of the one it serves."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from prejit.runtime.base.process_facts import policy_paths
from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.errors import ClosedError, printable
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.machine_store import machine_store
from prejit.runtime.ship.pulling import Pulled, Wanted, pull
from prejit.runtime.ship.reference import Reference, is_reference, parse_reference
from prejit.server.engine.memory import NoRoomError
from prejit.server.served.bundle_swaps import BundleSwaps
from prejit.server.served.process_upkeep import say, yield_cpu
from prejit.server.served.served import Models, Served

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_SECONDS = 3600.0
"""Pauses double up to this one while a registry fails."""
_NO_ROOM_SECONDS = 300.0
"""How long a bundle without room is not loaded again, unless what is served changes or somebody asks."""
_CLOSE_SECONDS = 2.0
"""How long a server that ends waits for a transfer to stop. What arrived is kept."""


class BundleFollowing:
    """A thread that looks at intervals what each path leads to, fetches it if a policy allows it, and swaps.

    Whatever fails, the server goes on with the bundle that it has.
    """

    def __init__(
        self, models: Models, swaps: BundleSwaps, every_seconds: float, *, must_match: bool
    ) -> None:
        """Start it. `must_match`: fetch nothing of a bundle that this machine would have to compile."""
        self._models, self._swaps, self._every = models, swaps, every_seconds
        self._must_match = must_match
        self._failures: dict[str, str] = {}
        self._no_room: dict[str, _NoRoom] = {}
        self._ends = threading.Event()
        self._looks = threading.Event()
        # Generations come first. A thread of its own, because those that it starts have its priority, and
        # kernels' threads must not.
        self._fetching = ThreadPoolExecutor(1, "prejit-fetch", yield_cpu, (19,))
        self._thread = start_thread(self._run, "prejit-follow")

    def look(self) -> None:
        """Look now, without waiting for the end of the interval."""
        self._looks.set()

    def close(self) -> bool:
        """End the thread and what it fetches; return whether it has ended. The network may keep it longer."""
        self._ends.set()
        self._looks.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        pause = self._every
        while True:
            if self._looks.wait(pause):
                self._no_room.clear()
            self._looks.clear()
            if self._ends.is_set():
                return
            is_well = all([self._follow(served) for served in self._models])
            pause = self._every if is_well else max(pause, min(2 * pause, _LONGEST_PAUSE_SECONDS))

    def _follow(self, served: Served) -> bool:
        """Serve what a path leads to now; return whether that is so."""
        try:
            path, digest = self._found(served)
            if digest != served.bundle.digest:
                self._swap(served, path, digest)
        except Exception as error:  # whatever a registry sends, the server goes on
            text = f"{served.name}: cannot follow {served.path}: {error}"
            if self._failures.get(served.name) != text and not self._ends.is_set():
                say(printable(text))
            self._failures[served.name] = text
            return False
        self._failures.pop(served.name, None)
        return True

    def _swap(self, served: Served, path: str, digest: str) -> None:
        """Swap, unless this bundle had no room a moment ago. That it has none is no failure of its place."""
        name, changes, now = served.name, self._models.changes, time.monotonic()
        before = self._no_room.get(name)
        if before is not None and before[:2] == (digest, changes) and now < before.until:
            return
        try:
            self._swaps.swap(name, path, followed=served.path, only=served)
        except NoRoomError as error:
            self._no_room[name] = _NoRoom(digest, changes, now + _NO_ROOM_SECONDS)
            if before is None or before.digest != digest:
                text = f"{name}: no room for {digest} of {served.path}: {error}; {error.hint}"
                say(printable(text))

    def _found(self, served: Served) -> tuple[str, str]:
        """Return where the bundle is that a path leads to now, and its digest. One elsewhere is fetched."""
        path = served.path
        if not is_reference(path):
            with Layout(path) as layout:
                return path, read_root(layout).digest
        reference = parse_reference(path)
        if reference.digest or not reference.is_remote:  # it leads to one bundle for ever
            return path, served.bundle.digest
        found = self._fetching.submit(self._pull, reference).result()
        return str(reference.at(found.digest)), found.digest

    def _pull(self, reference: Reference) -> Pulled:
        wanted = Wanted(Fingerprint.current(), must_match=self._must_match)
        found = pull(reference, machine_store(), wanted, policy_paths(), self._go_on)
        if found.moved is not None:
            _log.info(
                "fetched %d bytes of %s to %s", found.moved.moved_bytes, found.digest, found.path
            )
        return found

    def _go_on(self, _: object) -> None:
        """Stop a transfer of a server that ends."""
        if self._ends.is_set():
            raise ClosedError("the server ends")


class _NoRoom(NamedTuple):
    """A bundle that did not fit.

    Attributes:
        digest: of the bundle.
        changes: `Models.changes` then.
        until: it is not loaded again before this time, by time.monotonic.
    """

    digest: str
    changes: int
    until: float
