"""One build by several machines without a scheduler: each is a shard, and one of them packs the bundle.

Every shard plans the same programs. It begins with its own part of them and goes on with the parts of
others; `Store.making` lets one shard at a time make a result. In the end every shard has all executables of
a bundle, and the first one packs it. The store then has a mark of it, which says to the others that they are
done.

Marks have numbers: a shard looks which ones are there when it begins, and counts only later ones. So another
build of the same programs, a day later, packs its own bundle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, final

from prejit.compiler.progress import Progress
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store
from prejit.runtime.errors import UsageError

_Item = TypeVar("_Item")

MAX_SHARDS = 10_000
"""Maximum number of shards of a build."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a build: its number, from 1, and the number of shards."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that `2/4` names.

        Raises:
            UsageError: the text names none.
        """
        found = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]) <= MAX_SHARDS:
            raise UsageError(
                f"--shard: expected i/N with i from 1 to N, found {text!r:.40}",
                hint='a job that counts from 0 says --shard "$((INDEX + 1))/$COUNT"',
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def ordered(self, items: Sequence[_Item]) -> list[_Item]:
        """Return all items: this shard's own, then those of others, whose own order is the reverse."""
        parts = [
            items[(self.number - 1 + step) % self.count :: self.count] for step in range(self.count)
        ]
        return [*parts[0], *(each for part in parts[1:] for each in reversed(part))]


@dataclass(frozen=True, slots=True)
class Packed:
    """The result of a shard: its number, and the digest of the bundle that it packed."""

    shard: int
    digest: str


class Turn(Enum):
    """The answers to whether it is this shard's turn to pack."""

    NOW = "pack now"
    LATER = "another shard packs, and may fail"


@final
class Packing:
    """Lets one shard pack. A context manager, which lets another one try if this one fails."""

    def __init__(self, shard: Shard, bundle: str, store: Store) -> None:
        """Look which marks of a bundle there are."""
        self.shard = shard
        self._bundle = bundle
        self._store = store
        self._number = self._count_marks()
        self._stack = ExitStack()
        self._executables = ""

    def wait(
        self, executables: str, progress: Progress, *, give_up: Callable[[], bool] = lambda: False
    ) -> Packed | Turn:
        """Wait while another shard packs; return what it has packed, or whose turn it is.

        `executables` is the digest of the keys of all executables. If `give_up`, which is called during the
        wait, returns true, the turn is LATER.
        """
        self._executables = executables
        with progress.phase("waiting for the shard that packs"):
            while True:
                key = self._mark(self._number)
                with ExitStack() as making:
                    if not making.enter_context(self._store.making(key, give_up=give_up)):
                        return Turn.LATER
                    if (mark := self._store.get(key)) is None:
                        self._stack = making.pop_all()
                        return Turn.NOW
                if mark["executables"] == executables:
                    return Packed(mark["shard"], mark["digest"])
                self._number += 1  # that of another build with the same name

    def finish(self, digest: str) -> None:
        """Say to the other shards that the bundle is packed."""
        mark: Mapping[str, Any] = {
            "executables": self._executables,
            "shard": self.shard.number,
            "digest": digest,
        }
        self._store.put(self._mark(self._number), mark)
        self._stack.close()

    def __enter__(self) -> Packing:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _mark(self, number: int) -> Key:
        return Key("packed", self._bundle, (("bundle", self._bundle), ("number", str(number))))

    def _count_marks(self) -> int:
        """Return the number of the first mark that is not there, with few questions."""
        step = 1
        while self._store.get(self._mark(step - 1)) is not None:
            step *= 2
        low, high = step // 2, step - 1  # the mark below `low` is there, and `high` is not
        while low < high:
            middle = (low + high) // 2
            if self._store.get(self._mark(middle)) is None:
                high = middle
            else:
                low = middle + 1
        return low
