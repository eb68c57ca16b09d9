"""Leases in a shared store: which machine makes a result now, so that no other one makes it too.

A lease is a file beside the results, under a name of its own, signed as results are. Its owner writes it
again every few seconds. Whoever watches a lease that has not changed for `LEASE_SECONDS` takes the next
generation of it: its owner was killed, or hangs. Only the watcher's own clock counts, so clocks may differ.

A result is never wrong by a lease that fails: in the worst case two machines make the same result.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

from prejit.compiler.sharing.remote import LEASES, RemoteError
from prejit.compiler.sharing.shared_result import (
    MAX_BYTES,
    SharedResult,
    Tier,
    UnusableError,
    decode,
    encode,
)
from prejit.compiler.store.build_cache_key import Key

LEASE_SECONDS = 30.0
"""A lease that its owner has not written for this time may be taken over."""
_BEATS = 5
"""How often an owner writes its lease in that time."""
_RELEASED = ""
"""The owner of a lease that nobody holds any more, in a store that deletes nothing."""


@dataclass
class Lease:
    """The right to make a result, until `Leases.release`.

    Attributes:
        of: key of the result.
        generation: how many leases of the same result were abandoned before.
        written: when it was last written, by the clock of this process.
        writing: held while it is written or given back.
    """

    of: Key
    generation: int
    written: float
    writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def key(self) -> Key:
        """The key under which the lease is in the store."""
        return _lease_key(self.of, self.generation)


@final
class Leases:
    """The leases of one machine in one shared store."""

    def __init__(self, tier: Tier, owner: str, seconds: float = LEASE_SECONDS) -> None:
        """Take none yet.

        Args:
            tier: the shared store, which must be one that we may write.
            owner: who we are, for people.
            seconds: how long a lease lasts that is not written again.
        """
        self.tier = tier
        self._owner = owner
        self._seconds = seconds
        self._lock = threading.Lock()  # guards what follows
        self._held: dict[str, Lease] = {}
        self._watched: dict[str, tuple[bytes, float]] = {}  # path: its content, and since when
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, key: Key) -> Lease | None:
        """Take the lease of a result; None: another machine has it.

        Raises:
            RemoteError: the store does not answer, or does not let us write.
        """
        generation = 0
        while True:
            lease = Lease(key, generation, time.monotonic())
            path = self._path_of(lease.key)
            if (content := self.tier.remote.read(path, MAX_BYTES)) is None:
                break
            if not self._is_over(path, lease.key, content):
                return None
            generation += 1
        if not self.tier.remote.create(path, self._encoded(lease)):
            return None
        with self._lock:
            self._held[path] = lease
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="leases", daemon=True)
                self._thread.start()
        return lease

    def release(self, lease: Lease) -> None:
        """Give a lease back, with those before it.

        Raises:
            RemoteError: the store does not answer. The lease ends by itself, later.
        """
        path = self._path_of(lease.key)
        with lease.writing:
            with self._lock:
                held = self._held.pop(path, None)
            if held is None or not self._is_ours(lease):
                return
            remote = self.tier.remote
            for generation in range(lease.generation, -1, -1):
                before = self._path_of(_lease_key(lease.of, generation))
                if not remote.remove(before):
                    remote.write(path, self._encoded(lease, _RELEASED))
                    break

    def close(self) -> None:
        """Give all leases back, as far as the store answers."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for lease in [*self._held.values()]:
            with suppress(RemoteError):
                self.release(lease)

    def _path_of(self, key: Key) -> str:
        path = self.tier.path_of(key)
        return LEASES + path[len(LEASES) :]

    def _is_over(self, path: str, key: Key, content: bytes) -> bool:
        """Return whether nobody makes a result whose lease has this content."""
        try:
            found = decode(content, key, self.tier.believed)
        except UnusableError:  # of somebody who may not write here, or damaged
            return True
        if found.result.get("owner") == _RELEASED:
            return True
        now = time.monotonic()
        with self._lock:
            seen, since = self._watched.get(path, (b"", now))
            if seen != content:
                self._watched[path] = (content, now)
                return False
        return now - since >= self._seconds

    def _is_ours(self, lease: Lease) -> bool:
        """Return whether nobody can have taken the lease over."""
        return time.monotonic() - lease.written < self._seconds

    def _beat(self) -> None:
        """Write all leases again and again."""
        while not self._stop.wait(self._seconds / _BEATS):
            with self._lock:
                held = [*self._held.items()]
            for path, lease in held:
                with lease.writing, suppress(RemoteError):
                    if path in self._held and self._is_ours(lease):
                        now = time.monotonic()
                        self.tier.remote.write(path, self._encoded(lease))
                        lease.written = now

    def _encoded(self, lease: Lease, owner: str | None = None) -> bytes:
        result = {"owner": self._owner if owner is None else owner, "beat": secrets.token_hex(16)}
        return encode(SharedResult(lease.key, result, {}), self.tier.signer)


def _lease_key(of: Key, generation: int) -> Key:
    return Key("lease", of.name, (("of", of.digest), ("generation", str(generation))))
