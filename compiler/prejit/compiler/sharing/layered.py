"""The store of a build that shares results: this machine's store in front of those of many machines.

A result that this machine lacks is fetched with its contents, checked, and kept here. A result that is made
here is sent in the background. A shared store that does not answer, or refuses, is told once; the build goes
on without it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from prejit.compiler.sharing.remote import Remote, RemoteError
from prejit.compiler.sharing.shared_result import (
    MAX_BYTES,
    SharedResult,
    UnusableError,
    decode,
    encode,
)
from prejit.compiler.signing.private_key import PrivateKey
from prejit.compiler.store.directory import DirectoryStore
from prejit.compiler.store.interface import BlobWriter
from prejit.compiler.store.key import Key
from prejit.runtime.trust.keys import PublicKey

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

_TRANSFERS = 16
"""How many files are read or written at the same time."""
LOCAL_KINDS = frozenset({"weights", "measure"})
"""Results that are not shared: to convert a checkpoint takes less time than to fetch what comes of it."""


@dataclass(frozen=True)
class Tier:
    """A shared store, and what a build does with it.

    Attributes:
        remote: where its files are.
        namespace: separates the results of those who may write it from others in the same remote store.
        believed: keys; one of them must have signed a result. None: anyone may have written it.
        writes: whether results that are made here go there.
        signer: signs them; None: nobody does.
    """

    remote: Remote
    namespace: str = ""
    believed: tuple[PublicKey, ...] = ()
    writes: bool = True
    signer: PrivateKey | None = None

    @property
    def label(self) -> str:
        """Name of the remote store and namespace, for people."""
        return f"{self.remote.name} ({self.namespace})" if self.namespace else self.remote.name

    def path_of(self, key: Key) -> str:
        """Return the name of the file with a key's result."""
        return f"ac/{key.digits_in(self.namespace)}"


@dataclass
class Traffic:
    """The results and bytes that a build exchanged with a shared store.

    Attributes:
        found: number of results that came from there.
        read_bytes, written_bytes: of contents.
        sent: number of results that went there.
        down: why the build goes on without it; empty: it works.
    """

    found: int = 0
    read_bytes: int = 0
    sent: int = 0
    written_bytes: int = 0
    down: str = ""

    def __str__(self) -> str:
        read, written = self.read_bytes / 1e6, self.written_bytes / 1e6
        return f"{self.found} results read ({read:.1f} MB), {self.sent} written ({written:.1f} MB)"


def _content_path(digest: str) -> str:
    return f"cas/{digest.removeprefix('sha256:')}"


@final
class LayeredStore:
    """A `Store` on this machine with shared stores behind it."""

    def __init__(
        self, local: DirectoryStore, tiers: Sequence[Tier], note: Callable[[str], object]
    ) -> None:
        """Connect to nothing yet.

        Args:
            local: the store of this machine.
            tiers: the shared stores, the first to ask first.
            note: shows people a line.
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
        self._sending: list[Future[None]] = []

    @property
    def root(self) -> Path:
        """See `Store.root`."""
        return self._local.root

    def get(self, key: Key, *, verify: bool = False) -> Mapping[str, Any] | None:
        """See `Store.get`."""
        found = self._local.get(key, verify=verify)
        if found is None and self._fetch(key):
            found = self._local.get(key)
        return found

    def map(self, ask: Callable[[_Item], _Answer], items: Iterable[_Item]) -> Iterator[_Answer]:
        """See `Store.map`."""
        return self._pool.map(ask, items)

    def where(self, key: Key) -> str | None:
        """See `Store.where`."""
        if (found := self._local.where(key)) is not None:
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
        if key.kind in LOCAL_KINDS:
            return
        for tier, traffic in zip(self._tiers, self.traffic, strict=True):
            if tier.writes and not traffic.down:
                self._sending.append(
                    self._pool.submit(self._send, tier, traffic, key, result, needed)
                )

    def making(
        self, key: Key, *, give_up: Callable[[], bool] = lambda: False
    ) -> AbstractContextManager[bool]:
        """See `Store.making`."""
        return self._local.making(key, give_up=give_up)

    def last_key(self, kind: str, name: str) -> Key | None:
        """See `Store.last_key`."""
        return self._local.last_key(kind, name)

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
        for each in self._sending:
            each.result()
        self._pool.shutdown()
        for tier, traffic in zip(self._tiers, self.traffic, strict=True):
            if traffic.found or traffic.sent:
                self._note(f"{tier.label}: {traffic}")

    def abandon(self) -> None:
        """Send nothing more."""
        self._pool.shutdown(cancel_futures=True)

    # ------------------------------------------------------------------ reading

    def _fetch(self, key: Key) -> bool:
        """Bring a result with its contents to this machine; return whether a shared store has it."""
        if key.kind in LOCAL_KINDS or key.digest in self._absent:
            return False
        for tier, traffic in zip(self._tiers, self.traffic, strict=True):
            entry = self._look(tier, traffic, key)
            if entry is not None and self._bring(tier, traffic, entry):
                with self._lock:
                    traffic.found += 1
                    self.fetched[key.digest] = tier.label
                return True
        self._absent.add(key.digest)
        return False

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
            self._refuse(tier, key, str(error))
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
            except UnusableError as error:
                self._refuse(tier, entry.key, str(error))
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
                raise UnusableError(f"expected {digest}, found none")
            if blob.digest != digest:
                raise UnusableError(f"{digest}: expected this digest, found {blob.digest}")

    # ------------------------------------------------------------------ writing

    def _send(
        self,
        tier: Tier,
        traffic: Traffic,
        key: Key,
        result: Mapping[str, Any],
        blobs: Sequence[str],
    ) -> None:
        """Write a result, after its contents: whoever finds it finds them."""
        if traffic.down:
            return
        sizes: dict[str, int] = {}
        try:
            for digest in blobs:
                if (file := self._local.open_blob(digest)) is None:
                    return  # another program deletes files here; the build will say so
                with file:
                    sizes[digest] = os.fstat(file.fileno()).st_size
                    if not tier.remote.has(_content_path(digest)):
                        tier.remote.write(_content_path(digest), file)
                        with self._lock:
                            traffic.written_bytes += sizes[digest]
            tier.remote.write(
                tier.path_of(key), encode(SharedResult(key, result, sizes), tier.signer)
            )
            with self._lock:
                traffic.sent += 1
        except RemoteError as error:
            self._lose(traffic, error)

    # ------------------------------------------------------------------ what goes wrong

    def _lose(self, traffic: Traffic, error: RemoteError) -> None:
        with self._lock:
            if traffic.down:
                return
            traffic.down = str(error)
        self._note(f"{error}; this build goes on without it")

    def _refuse(self, tier: Tier, key: Key, reason: str) -> None:
        self._note(f"{tier.label}: the result of {key.kind} {key.name} is not used: {reason}")
