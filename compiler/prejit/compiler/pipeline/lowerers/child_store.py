"""The store as a process that lowers sees it: a directory, with a list of what was put there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast, final

from prejit.compiler.store.directory import DirectoryStore
from prejit.compiler.store.interface import Store
from prejit.compiler.store.key import Key


@final
class ChildStore:
    """Notes the keys of results, which the build sends to shared stores. Makes all at once.

    The build holds the right to make a result (`Store.making`) for its processes: it shares it with other
    machines, and it looks in shared stores before.
    """

    def __init__(self, store: DirectoryStore) -> None:
        """Note nothing yet."""
        self._store = store
        self._keys: list[Key] = []

    def as_store(self) -> Store:
        """Return this store as a Store; the directory has all methods that are not here."""
        return cast("Store", self)

    def taken(self) -> list[list[Any]]:
        """Return the keys of the results since the last call, as lists of kind, name and ingredients."""
        found, self._keys = self._keys, []
        return [[key.kind, key.name, [*map(list, key.ingredients)]] for key in found]

    def put(self, key: Key, result: Mapping[str, Any], *, blobs: Iterable[str] = ()) -> None:
        """See `Store.put`."""
        self._store.put(key, result, blobs=blobs)
        self._keys.append(key)

    @contextmanager
    def making(self, key: Key, *, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """See `Store.making`."""
        del key, give_up
        yield True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
