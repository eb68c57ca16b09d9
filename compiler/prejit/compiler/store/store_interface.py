"""The interface of a store of results.

`directory_store.DirectoryStore` keeps results in a directory; `sharing.layered.LayeredStore` has stores that
many machines share behind it.

A result is JSON under the key of everything that decides it. Large contents (programs, executables, weights)
are blobs, named by their digest; a result names its blobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.cached_files import BlobWriter

_Named = TypeVar("_Named")
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class Store(Protocol):
    """Results by key and blobs by digest. Safe for many processes and threads.

    Every method raises a StoreError if the store on this machine cannot be read or written.
    """

    @property
    def root(self) -> Path:
        """Local directory of the store. Worker processes open it as a `DirectoryStore`."""

    @property
    def namespace(self) -> str:
        """A text that separates the results of this store from those of others in the same directory."""

    def get(self, key: Key, *, verify: bool = False) -> Mapping[str, Any] | None:
        """Return the result of a key; None: the store has none, or one of its blobs is missing.

        Args:
            key: everything that decides the result.
            verify: whether to compare the digests of its blobs too, not only their sizes.
        """

    def map(self, ask: Callable[[_Item], _Answer], items: Iterable[_Item]) -> Iterator[_Answer]:
        """Yield what a function that asks this store returns for each item, in order.

        Many calls run at the same time where answers come over a network.
        """

    def where(self, key: Key) -> str | None:
        """Return the name of the store that has the result of a key; None: none has it."""

    def put(self, key: Key, result: Mapping[str, Any], *, blobs: Iterable[str] = ()) -> None:
        """Store the result of a key, and remember the key as the last one of its kind and name.

        Args:
            key: everything that decides the result.
            result: JSON.
            blobs: digests of the blobs that the result needs, which the store must have.
        """

    def making(
        self, key: Key, *, give_up: Callable[[], bool] = lambda: False
    ) -> AbstractContextManager[bool]:
        """Hold the right to make the result of a key: several builds that need it make it once.

        The others wait, and then find it in the store. The right ends with its process.

        Args:
            key: key of the result.
            give_up: called while waiting; true ends the wait.

        Returns:
            A context manager that gives whether the right is held: always, unless `give_up` ended the wait.
        """

    def last_result(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """Return the last result of a kind and name, whatever its key, from here or else from elsewhere.

        It says what happened then. Its blobs may be missing, and none is fetched.
        """

    def last_keys(self, kind: str, name: str) -> tuple[Key, ...]:
        """Return the last keys of a kind and name, here and elsewhere, which explain a miss."""

    def seal(self, text: str) -> str:
        """Return a text that stands for another one in keys of this store, and shows nothing of it.

        Without the store's secret nobody can try which text it stands for. `Key.is_sealed` keys stay here.
        """

    def put_blob(self, content: bytes) -> str:
        """Store a blob and return its digest."""

    def blob_writer(self) -> BlobWriter:
        """Return a context manager that writes one blob, which need not fit into memory."""

    def read_blob(self, digest: str) -> bytes | None:
        """Return the content of a blob; None: there is none, or it was damaged and is deleted now."""

    def blob_path(self, digest: str) -> Path | None:
        """Return the local file of a blob, unchecked; None: there is none."""


def kept_values(store: Store, keys: Mapping[_Named, Key], field: str) -> dict[_Named, Any]:
    """Return one field of the result of each key, without the keys whose result the store does not have."""
    found = {name: store.get(key) for name, key in keys.items()}
    return {name: result[field] for name, result in found.items() if result is not None}
