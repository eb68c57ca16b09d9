"""The store as a process that lowers sees it: a directory, with a list of what was put there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.key import Key


@final
class ChildStore(DirectoryStore):
    """Notes the keys of results, which the build sends to shared stores. Makes all at once.

    The build holds the right to make a result (`Store.making`) for its processes: it shares it with other
    machines, and it looks in shared stores before.
    """

    def __init__(self, root: Path, namespace: str) -> None:
        """Note nothing yet."""
        super().__init__(root, namespace)
        self._keys: list[Key] = []

    def taken(self) -> list[list[Any]]:
        """Return the keys of the results since the last call, as lists of kind, name and ingredients."""
        found, self._keys = self._keys, []
        return [[key.kind, key.name, [*map(list, key.ingredients)]] for key in found]

    def put(self, key: Key, result: Mapping[str, Any], *, blobs: Iterable[str] = ()) -> None:
        """See `Store.put`."""
        super().put(key, result, blobs=blobs)
        self._keys.append(key)

    @contextmanager
    def making(self, key: Key, *, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """See `Store.making`."""
        del key, give_up
        yield True
