"""Fetch what the tags of a server's bundles lead to now, into this machine's store, beside what it serves."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from prejit.runtime.base.process_facts import policy_paths
from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.errors import ClosedError, printable
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.machine_store import machine_store
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.server.served.say import say
from prejit.server.served.served import Models, Served

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_SECONDS = 3600.0
"""Pauses double up to this one while a registry fails."""
_CLOSE_SECONDS = 2.0
"""How long a server that ends waits for a transfer to stop. What arrived is kept."""
_NICE = 19
"""The lowest priority of a thread on Linux, and of those that it starts: generations come first."""


class BundleFollowing:
    """A thread that asks at intervals what each tag leads to, and fetches it if a policy allows it.

    The server goes on with the bundle that it has. A restart finds the new one in the store.
    """

    def __init__(self, models: Models, every_seconds: float, *, must_match: bool) -> None:
        """Start it. `must_match`: fetch nothing of a bundle that this machine would have to compile."""
        self._models, self._every, self._must_match = models, every_seconds, must_match
        self._failures: dict[str, str] = {}
        self._ends = threading.Event()
        self._thread = start_thread(self._run, "prejit-follow")

    def close(self) -> bool:
        """End the thread and what it fetches; return whether it has ended. The network may keep it longer."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a system without priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        pause = self._every
        while not self._ends.wait(pause):
            is_well = all([self._fetch(served) for served in self._models])
            pause = self._every if is_well else max(pause, min(2 * pause, _LONGEST_PAUSE_SECONDS))

    def _fetch(self, served: Served) -> bool:
        """Fetch the bundle that a tag leads to now; return whether that is known and here."""
        name, fetched = served.name, self._models.fetched
        if served.follows is None:
            return True
        try:
            wanted = Wanted(Fingerprint.current(), must_match=self._must_match)
            found = pull(served.follows, machine_store(), wanted, policy_paths(), self._go_on)
        except Exception as error:  # whatever a registry sends, the server goes on
            text = f"{name}: cannot follow {served.follows}: {error}"
            if self._failures.get(name) != text and not self._ends.is_set():
                say(printable(text))
            self._failures[name] = text
            return False
        self._failures.pop(name, None)
        if found.digest == served.bundle.digest:
            fetched.pop(name, None)
        elif fetched.get(name) != found.digest:
            fetched[name] = found.digest
            count = 0 if found.moved is None else found.moved.moved_bytes
            _log.info("%s: fetched %d bytes of %s to %s", name, count, found.digest, found.path)
            say(f"{name}: fetched {served.follows.at(found.digest)}; a restart serves it")
        return True

    def _go_on(self, _: object) -> None:
        """Stop a transfer of a server that ends."""
        if self._ends.is_set():
            raise ClosedError("the server ends")
