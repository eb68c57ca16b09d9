"""The store of a build that shares results: this machine's store in front of those of many machines.

A result that this machine lacks is fetched with its contents, checked, and kept here. A result that is made
here, or that a shared store turns out to lack, is sent in the background. A shared store that does not
answer, or refuses, is told once; the build goes on without it.

Machines that share one build (`share_with`) also hold a lease in the store while they make a result.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, final

from prejit.compiler.sharing.leases import Lease, Leases
from prejit.compiler.sharing.remote import RemoteError
from prejit.compiler.sharing.shared_result import (
    MAX_BYTES,
    SharedResult,
    UnusableError,
    decode,
    encode,
)
from prejit.compiler.sharing.tier import Tier
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.interface import BlobWriter
from prejit.compiler.store.key import Key
from prejit.runtime.errors import StoreError

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

_log = logging.getLogger(__name__)
_TRANSFERS = 16
"""How many files are read or written at the same time."""
LOCAL_KINDS = frozenset({"weights", "measure", "pack"})
"""Results that are not shared: it takes less time to convert a checkpoint, or to pack, than to fetch that."""

_POLL_SECONDS = 0.5
"""Interval at which a build looks whether another machine has made a result."""


@dataclass
class Traffic:
    """The results and bytes that a build exchanged with a shared store.

    Attributes:
        found: number of results that came from there.
        read_bytes, written_bytes: of contents.
        sent: number of results that went there.
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


class _GoneError(Exception):
    """A shared store has a result, and not its contents any more."""


def _content_path(digest: str) -> str:
    return f"cas/{digest.removeprefix('sha256:')}"


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
    ) -> None:
        """Connect to nothing yet.

        Args:
            local: the store of this machine.
            tiers: the shared stores, the first to ask first.
            note: shows people a line.
            offers: whether results of this machine that are used, and that a shared store lacks, go there.
        """
        self._local = local
        self._tiers = tiers
        self._note = note
        self.traffic = tuple(Traffic() for _ in tiers)
        self.fetched: dict[str, str] = {}
        """The name of the shared store that each result came from, by the digest of its key."""
        self._lock = threading.Lock()
        self._absent: set[str] = set()  # digests of keys that no shared store has
        self._pool = ThreadPoolExecutor(_TRANSFERS, "prejit-transfer")
        self._offers = offers
        self._offered: set[str] = set()  # digests of keys that are sent, or were looked for
        self._sending: dict[
            str, list[Future[None]]
        ] = {}  # by digest of the key, in the order of tiers
        self._leases: Leases | None = None
        self._leading = 0  # the place of the tier with the leases

    def share_with(self, leases: Leases, tier: Tier) -> None:
        """Hold a lease while a result is made: other machines share this build.

        Args:
            leases: those of this machine.
            tier: the one of this store's tiers in which they are.
        """
        self._leases = leases
        self._leading = self._tiers.index(tier)

    def why_down(self, tier: Tier) -> str:
        """Return why a tier is not asked any more; empty: it answers."""
        return self.traffic[self._tiers.index(tier)].down

    @property
    def root(self) -> Path:
        """See `Store.root`."""
        return self._local.root

    @property
    def namespace(self) -> str:
        """See `Store.namespace`."""
        return self._local.namespace

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
        for tier, traffic in zip(self._tiers, self.traffic, strict=True):
            entry = self._look(tier, traffic, key)
            if entry is not None and self._has_contents(tier, traffic, entry):
                return tier.label
        return None

    def put(self, key: Key, result: Mapping[str, Any], *, blobs: Iterable[str] = ()) -> None:
        """See `Store.put`."""
        needed = tuple(blobs)
        self._local.put(key, result, blobs=needed)
        if _stays_here(key):
            return
        with self._lock:
            self._offered.add(key.digest)
        self._send_soon(self._send, key, result, needed)

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
            while not self._fetch_anew(key) and (lease := self._take_lease(key)) is None:
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
        for tier, traffic in zip(self._tiers, self.traffic, strict=True):
            last = self._look(tier, traffic, _last_key(kind, name))
            key = None if last is None else _key_of(last, kind, name)
            entry = None if key is None else self._look(tier, traffic, key)
            if entry is not None:
                return entry.result
        return None

    def last_keys(self, kind: str, name: str) -> tuple[Key, ...]:
        """See `Store.last_keys`."""
        found = [*self._local.last_keys(kind, name)]
        for tier, traffic in zip(self._tiers, self.traffic, strict=True):
            entry = self._look(tier, traffic, _last_key(kind, name))
            if entry is not None and (key := _key_of(entry, kind, name)) is not None:
                found.append(key)
        return tuple(found)

    def seal(self, text: str) -> str:
        """See `Store.seal`."""
        return self._local.seal(text)

    def put_blob(self, content: bytes) -> str:
        """See `Store.put_blob`."""
        return self._local.put_blob(content)

    def blob_writer(self) -> BlobWriter:
        """See `Store.blob_writer`."""
        return self._local.blob_writer()

    def read_blob(self, digest: str) -> bytes | None:
        """See `Store.read_blob`."""
        return self._local.read_blob(digest)

    def blob_path(self, digest: str) -> Path | None:
        """See `Store.blob_path`."""
        return self._local.blob_path(digest)

    def finish(self) -> None:
        """Wait until everything is sent, and say what was exchanged."""
        for each in [future for some in self._sending.values() for future in some]:
            each.result()
        self._pool.shutdown()
        if self._leases is not None:
            self._leases.close()
        for tier, traffic in zip(self._tiers, self.traffic, strict=True):
            if traffic.found or traffic.sent:
                self._note(f"{tier.label}: {traffic}")

    def abandon(self) -> None:
        """Send nothing more than what is under way, and let others make what was not finished here."""
        self._pool.shutdown(cancel_futures=True)
        if self._leases is not None:
            self._leases.close()

    # ------------------------------------------------------------------ reading

    def _fetch(self, key: Key) -> bool:
        """Bring a result with its contents to this machine; return whether a shared store has it."""
        if _stays_here(key) or key.digest in self._absent:
            return False
        for tier, traffic in zip(self._tiers, self.traffic, strict=True):
            entry = self._look(tier, traffic, key)
            if entry is not None and self._bring(tier, traffic, entry):
                with self._lock:
                    traffic.found += 1
                    self.fetched[key.digest] = tier.label
                _log.info("%s %s: fetched from %s", key.kind, key.name, tier.label)
                return True
        _log.info("%s %s: no shared store has it", key.kind, key.name)
        self._absent.add(key.digest)
        return False

    def _fetch_anew(self, key: Key) -> bool:
        """Return whether this machine or a shared store has a result now."""
        with self._lock:
            self._absent.discard(key.digest)
        return self.get(key) is not None

    def _look(self, tier: Tier, traffic: Traffic, key: Key) -> SharedResult | None:
        """Return a result that may be used; None: the shared store has none."""
        if traffic.down:
            return None
        try:
            content = tier.remote.read(tier.path_of(key), MAX_BYTES)
            return None if content is None else decode(content, key, tier.believed)
        except RemoteError as error:
            self._lose(traffic, error)
        except UnusableError as error:
            self._refuse(tier, traffic, key, str(error))
        return None

    def _has_contents(self, tier: Tier, traffic: Traffic, entry: SharedResult) -> bool:
        """Return whether all contents of a result are on this machine or in the shared store."""
        missing = (digest for digest in entry.blobs if self._local.blob_path(digest) is None)
        try:
            return all(tier.remote.has(_content_path(digest)) for digest in missing)
        except RemoteError as error:
            self._lose(traffic, error)
            return False

    def _bring(self, tier: Tier, traffic: Traffic, entry: SharedResult) -> bool:
        """Fetch the contents of a result that this machine lacks, and keep it here."""
        for digest, size in entry.blobs.items():
            if self._local.blob_path(digest) is not None:
                continue
            try:
                self._download(tier, digest, size)
            except RemoteError as error:
                self._lose(traffic, error)
                return False
            except _GoneError:  # the store dropped it to make room
                return False
            except UnusableError as error:
                self._refuse(tier, traffic, entry.key, str(error))
                return False
            with self._lock:
                traffic.read_bytes += size
        self._local.put(entry.key, entry.result, blobs=entry.blobs)
        return True

    def _download(self, tier: Tier, digest: str, size: int) -> None:
        """Fetch contents. What is damaged is not kept."""
        with self._local.blob_writer() as blob:

            def take(piece: memoryview) -> None:
                if blob.size + piece.nbytes > size:
                    raise UnusableError(f"{digest}: expected {size} bytes, found more")
                blob.write(piece)

            if not tier.remote.download(_content_path(digest), take):
                raise _GoneError
            if blob.digest != digest:
                raise UnusableError(f"{digest}: expected this digest, found {blob.digest}")

    # ------------------------------------------------------------------ writing

    def _send_soon(
        self,
        send: Callable[[Tier, Traffic, Key, Mapping[str, Any], Sequence[str]], None],
        key: Key,
        result: Mapping[str, Any],
        blobs: Sequence[str],
    ) -> None:
        """Send a result to all shared stores that are written, in the background."""
        with self._lock:
            sending = self._sending.setdefault(key.digest, [])
            for tier, traffic in zip(self._tiers, self.traffic, strict=True):
                if tier.writes and not traffic.down:
                    sending.append(self._pool.submit(send, tier, traffic, key, result, blobs))

    def _offer(self, key: Key, result: Mapping[str, Any]) -> None:
        """Send a result that this machine has, if a shared store lacks it. Each is looked for once."""
        if not self._offers or _stays_here(key):
            return
        with self._lock:
            if key.digest in self._offered:
                return
            self._offered.add(key.digest)
        self._send_soon(self._send_missing, key, result, ())

    def _send_missing(
        self,
        tier: Tier,
        traffic: Traffic,
        key: Key,
        result: Mapping[str, Any],
        _: Sequence[str],
    ) -> None:
        """Send a result of this machine with its contents, unless it is there."""
        if traffic.down:
            return
        try:
            there = tier.remote.has(tier.path_of(key))
        except RemoteError as error:
            self._lose(traffic, error)
            return
        if not there and (blobs := self._local.blobs_of(key)) is not None:
            self._send(tier, traffic, key, result, blobs)

    def _send(
        self,
        tier: Tier,
        traffic: Traffic,
        key: Key,
        result: Mapping[str, Any],
        blobs: Sequence[str],
    ) -> None:
        """Write a result, after its contents: whoever finds it finds them.

        Contents that are there are sent again if the result was refused: any of them may be damaged.
        """
        if traffic.down:
            return
        sizes: dict[str, int] = {}
        replaces = key.digest in traffic.refused
        try:
            for digest in blobs:
                if (file := self._local.open_blob(digest)) is None:
                    return  # another program deletes files here; the build will say so
                with file:
                    sizes[digest] = os.fstat(file.fileno()).st_size
                    if replaces or not tier.remote.has(_content_path(digest)):
                        tier.remote.write(_content_path(digest), file)
                        with self._lock:
                            traffic.written_bytes += sizes[digest]
            tier.remote.write(
                tier.path_of(key), encode(SharedResult(key, result, sizes), tier.signer)
            )
            with self._lock:
                traffic.sent += 1
            last = _last_key(key.kind, key.name)
            named = {"ingredients": [list(pair) for pair in key.ingredients]}
            tier.remote.write(
                tier.path_of(last), encode(SharedResult(last, named, {}), tier.signer)
            )
        except RemoteError as error:
            self._lose(traffic, error)

    # ------------------------------------------------------------------ leases

    def _take_lease(self, key: Key) -> Lease | None:
        assert self._leases is not None
        traffic = self.traffic[self._leading]
        if not traffic.down:
            try:
                return self._leases.take(key)
            except RemoteError as error:
                self._lose(traffic, error)
        raise StoreError(
            f"the machines that share this build cannot agree any more: {traffic.down}",
            hint="run it again when the shared store answers; what was finished is not made again",
        )

    def _release_when_sent(self, lease: Lease) -> None:
        """Give a lease back once the others can find its result."""

        def release(_: object = None) -> None:
            assert self._leases is not None
            try:
                self._leases.release(lease)
            except RemoteError as error:
                self._lose(self.traffic[self._leading], error)

        with self._lock:
            sending = self._sending.get(lease.of.digest)
        if sending:
            # The tier with the leases is the first that is written.
            sending[0].add_done_callback(release)
        else:
            release()

    # ------------------------------------------------------------------ what goes wrong

    def _lose(self, traffic: Traffic, error: RemoteError) -> None:
        with self._lock:
            if traffic.down:
                return
            traffic.down = str(error)
        shares = self._leases is not None and traffic is self.traffic[self._leading]
        self._note(str(error) if shares else f"{error}; this build goes on without it")

    def _refuse(self, tier: Tier, traffic: Traffic, key: Key, reason: str) -> None:
        traffic.refused.add(key.digest)
        self._note(f"{tier.label}: the result of {key.kind} {key.name} is not used: {reason}")


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
