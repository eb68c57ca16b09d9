"""The store of a build that shares results: this machine's store in front of those of many machines.

A result that this machine lacks is fetched with its contents, checked, and kept here. A result that is made
here, or that a shared store turns out to lack, is sent in the background. A shared store that does not
answer, or refuses, is told once; the build goes on without it.

Machines that share one build also hold a lease in the store while they make a result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from prejit.compiler.sharing.leases import Lease, Leases
from prejit.compiler.sharing.remote import RemoteError
from prejit.compiler.sharing.shared_result import (
    SharedResult,
    Tier,
    UnusableError,
    content_path,
    fetch_content,
    send_content,
)
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.errors import StoreError

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

_log = logging.getLogger(__name__)
_TRANSFERS = 16
"""How many files are read or written at the same time."""
LOCAL_KINDS = frozenset({"weights", "weights-outline", "measure", "pack"})
"""Results that are not shared: it takes less time to convert a checkpoint, or to pack, than to fetch that."""

_POLL_SECONDS = 0.5
"""Interval at which a build looks whether another machine has made a result."""


@dataclass
class Traffic:
    """The results and bytes that a build exchanged with a shared store.

    Attributes:
        found, sent: number of results that came from there, and that went there.
        read_bytes, written_bytes: of contents.
        down: why the build goes on without it; empty: it works.
        refused: digests of the keys whose results there are damaged, or signed by nobody whom we believe.
    """

    found: int = 0
    read_bytes: int = 0
    sent: int = 0
    written_bytes: int = 0
    down: str = ""
    refused: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        read, written = self.read_bytes / 1e6, self.written_bytes / 1e6
        return f"{self.found} results read ({read:.1f} MB), {self.sent} written ({written:.1f} MB)"


@final
class _Behind:
    """A shared store behind that of this machine. Once it fails, it is not asked any more."""

    def __init__(
        self, tier: Tier, local: DirectoryStore, note: Callable[[str], object], leads: bool
    ) -> None:
        self.tier, self.traffic, self.leads = tier, Traffic(), leads
        self._local, self._note = local, note
        self._lock = threading.Lock()

    @contextmanager
    def asking(self, key: Key) -> Iterator[None]:
        """Note what goes wrong in the block with the result of a key, and end the block."""
        try:
            yield
        except RemoteError as error:
            with self._lock:
                if self.traffic.down:
                    return
                self.traffic.down = str(error)
            self._note(str(error) if self.leads else f"{error}; this build goes on without it")
        except UnusableError as error:
            self.traffic.refused.add(key.digest)
            self._note(
                f"{self.tier.label}: the result of {key.kind} {key.name} is not used: {error}"
            )

    def look(self, key: Key) -> SharedResult | None:
        """Return a result that may be used; None: there is none."""
        if not self.traffic.down:
            with self.asking(key):
                return self.tier.read(key)
        return None

    def has(self, key: Key) -> bool:
        """Return whether there is a result whose contents are all there or on this machine."""
        if (entry := self.look(key)) is not None:
            missing = (each for each in entry.blobs if self._local.blob_path(each) is None)
            with self.asking(key):
                return all(self.tier.remote.has(content_path(each)) for each in missing)
        return False

    def fetch(self, key: Key) -> bool:
        """Bring a result with the contents that this machine lacks; return whether it is here now."""
        if (entry := self.look(key)) is None:
            return False
        with self.asking(key):
            for digest, size in entry.blobs.items():
                if self._local.blob_path(digest) is not None:
                    continue
                if not fetch_content(self.tier.remote, self._local, digest, size):
                    return False  # the store dropped it to make room
                with self._lock:
                    self.traffic.read_bytes += size
            self._local.put(key, entry.result, blobs=entry.blobs)
            with self._lock:
                self.traffic.found += 1
            return True
        return False

    def send(self, key: Key, result: Mapping[str, Any], blobs: Iterable[str]) -> None:
        """Write a result, after its contents: whoever finds it finds them.

        Contents that are there are sent again if the result was refused: any of them may be damaged.
        """
        if self.traffic.down:
            return
        sizes: dict[str, int] = {}
        replace = key.digest in self.traffic.refused
        with self.asking(key):
            for digest in blobs:
                sent = send_content(self.tier.remote, self._local, digest, replace=replace)
                if sent is None:
                    return  # another program deletes files here; the build will say so
                sizes[digest], is_new = sent
                with self._lock:
                    self.traffic.written_bytes += sizes[digest] if is_new else 0
            self.tier.write(key, result, sizes)
            with self._lock:
                self.traffic.sent += 1
            named = {"ingredients": [list(pair) for pair in key.ingredients]}
            self.tier.write(_last_key(key.kind, key.name), named, {})

    def send_missing(self, key: Key, result: Mapping[str, Any]) -> None:
        """Send a result of this machine with its contents, unless it is there."""
        there = True
        if not self.traffic.down:
            with self.asking(key):
                there = self.tier.remote.has(self.tier.path_of(key))
        if not there and (blobs := self._local.blobs_of(key)) is not None:
            self.send(key, result, blobs)


@final
class LayeredStore:
    """A `Store` on this machine with shared stores behind it."""

    def __init__(
        self,
        local: DirectoryStore,
        tiers: Sequence[Tier],
        note: Callable[[str], object],
        *,
        offers: bool = True,
        leases: Leases | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            local: the store of this machine.
            tiers: the shared stores, the first to ask first.
            note: shows people a line.
            offers: whether results of this machine that are used, and that a shared store lacks, go there.
            leases: held while a result is made, in the first tier that is written: other machines share this
                build. None: they do not.
        """
        self._behind = [
            _Behind(tier, local, note, leases is not None and tier is leases.tier) for tier in tiers
        ]
        self.traffic = tuple(each.traffic for each in self._behind)
        self.fetched = dict[str, str]()
        """The name of the shared store that each result came from, by the digest of its key."""
        self._local, self._note = local, note
        self.root, self.namespace = local.root, local.namespace
        self.seal, self.put_blob, self.blob_writer = local.seal, local.put_blob, local.blob_writer
        self.read_blob, self.blob_path = local.read_blob, local.blob_path
        self._lock = threading.Lock()
        self._absent: set[str] = set()  # digests of keys that no shared store has
        self._pool = ThreadPoolExecutor(_TRANSFERS, "prejit-transfer")
        self._offers = offers
        self._offered: set[str] = set()  # digests of keys that are sent, or were looked for
        self._sending: dict[str, list[Future[None]]] = {}  # by digest of the key
        self._leases = leases
        self._leading = next((each for each in self._behind if each.leads), None)

    @property
    def disagreement(self) -> str:
        """Why the machines that share this build cannot agree any more; empty: they can."""
        return "" if self._leading is None else self._leading.traffic.down

    def get(self, key: Key, *, verify: bool = False) -> Mapping[str, Any] | None:
        """See `Store.get`."""
        found = self._local.get(key, verify=verify)
        if found is not None:
            self._offer(key, found)
        elif self._fetch(key):
            found = self._local.get(key)
        return found

    def map(self, ask: Callable[[_Item], _Answer], items: Iterable[_Item]) -> Iterator[_Answer]:
        """See `Store.map`."""
        return self._pool.map(ask, items)

    def where(self, key: Key) -> str | None:
        """See `Store.where`."""
        if (found := self._local.where(key)) is not None or _stays_here(key):
            return found
        return next((each.tier.label for each in self._behind if each.has(key)), None)

    def put(self, key: Key, result: Mapping[str, Any], *, blobs: Iterable[str] = ()) -> None:
        """See `Store.put`."""
        needed = tuple(blobs)
        self._local.put(key, result, blobs=needed)
        if not _stays_here(key):
            with self._lock:
                self._offered.add(key.digest)
            self._send_soon(key, lambda each: each.send(key, result, needed))

    @contextmanager
    def making(self, key: Key, *, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """See `Store.making`. Where machines share a build, the right counts for all of them.

        Raises:
            StoreError: machines share this build, and their store does not answer any more.
        """
        with self._local.making(key, give_up=give_up) as held:
            if not held or self._leases is None or _stays_here(key):
                yield held
                return
            lease: Lease | None = None
            while True:
                self._absent.discard(key.digest)
                if self.get(key) is not None or (lease := self._take_lease(key)) is not None:
                    break
                if give_up():
                    yield False
                    return
                time.sleep(_POLL_SECONDS)
            # The result may have come between the look and the lease: the caller looks again.
            self._absent.discard(key.digest)
            try:
                yield True
            finally:
                if lease is not None:
                    self._release_when_sent(lease)

    def last_result(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """See `Store.last_result`."""
        if (found := self._local.last_result(kind, name)) is not None:
            return found
        entries = (each.look(key) for each, key in self._last(kind, name))
        return next((each.result for each in entries if each is not None), None)

    def last_keys(self, kind: str, name: str) -> tuple[Key, ...]:
        """See `Store.last_keys`."""
        return (*self._local.last_keys(kind, name), *(key for _, key in self._last(kind, name)))

    def finish(self) -> None:
        """Wait until everything is sent, and say what was exchanged."""
        for each in [future for some in self._sending.values() for future in some]:
            each.result()
        self._pool.shutdown()
        if self._leases is not None:
            self._leases.close()
        for behind in self._behind:
            if behind.traffic.found or behind.traffic.sent:
                self._note(f"{behind.tier.label}: {behind.traffic}")

    def abandon(self) -> None:
        """Send nothing more than what is under way, and let others make what was not finished here."""
        self._pool.shutdown(cancel_futures=True)
        if self._leases is not None:
            self._leases.close()

    def _fetch(self, key: Key) -> bool:
        """Bring a result with its contents to this machine; return whether a shared store has it."""
        if _stays_here(key) or key.digest in self._absent:
            return False
        label = next((each.tier.label for each in self._behind if each.fetch(key)), None)
        if label is None:
            self._absent.add(key.digest)
            _log.info("%s %s: no shared store has it", key.kind, key.name)
            return False
        self.fetched[key.digest] = label
        _log.info("%s %s: fetched from %s", key.kind, key.name, label)
        return True

    def _last(self, kind: str, name: str) -> Iterator[tuple[_Behind, Key]]:
        """Yield the last key of a name in each shared store that has one."""
        for each in self._behind:
            entry = each.look(_last_key(kind, name))
            if entry is not None and (key := _key_of(entry, kind, name)) is not None:
                yield each, key

    def _send_soon(self, key: Key, send: Callable[[_Behind], None]) -> None:
        """Send a result to all shared stores that are written, in the background."""
        with self._lock:
            self._sending.setdefault(key.digest, []).extend(
                self._pool.submit(send, each)
                for each in self._behind
                if each.tier.writes and not each.traffic.down
            )

    def _offer(self, key: Key, result: Mapping[str, Any]) -> None:
        """Send a result that this machine has, if a shared store lacks it. Each is looked for once."""
        if not self._offers or _stays_here(key):
            return
        with self._lock:
            if key.digest in self._offered:
                return
            self._offered.add(key.digest)
        self._send_soon(key, lambda each: each.send_missing(key, result))

    def _take_lease(self, key: Key) -> Lease | None:
        assert self._leases is not None
        assert self._leading is not None
        if not self.disagreement:
            with self._leading.asking(key):
                return self._leases.take(key)
        raise StoreError(
            f"the machines that share this build cannot agree any more: {self.disagreement}",
            hint="run it again when the shared store answers; what was finished is not made again",
        )

    def _release_when_sent(self, lease: Lease) -> None:
        """Give a lease back once the others can find its result."""

        def release(_: object = None) -> None:
            assert self._leases is not None
            assert self._leading is not None
            with self._leading.asking(lease.of):
                self._leases.release(lease)

        with self._lock:
            sending = self._sending.get(lease.of.digest)
        if sending:
            # The tier with the leases is the first that is written.
            sending[0].add_done_callback(release)
        else:
            release()


def _stays_here(key: Key) -> bool:
    """Return whether shared stores have nothing to do with a result."""
    return key.kind in LOCAL_KINDS or key.is_sealed


def _last_key(kind: str, name: str) -> Key:
    """Return the key under which a shared store has the last key of a name."""
    return Key("last", f"{kind} {name}", (("kind", kind), ("name", name)))


def _key_of(entry: SharedResult, kind: str, name: str) -> Key | None:
    """Return the key that a shared store has as the last one of a name; None: it is none."""
    listed: Any = entry.result.get("ingredients")
    try:
        return Key(kind, name, tuple((str(one), str(other)) for one, other in listed))
    except (TypeError, ValueError):
        return None
