"""Keys of the build cache: named ingredients, hashed in order, so that a miss explains itself.

An ingredient is a text that is the same on every machine and at every path: versions, flags, digests of
contents; never a time or an absolute path. What nobody else may learn is there in a sealed form
(`store_interface.Store.seal`), which is another one in every store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from prejit.runtime.base.files import digest_of

SEALED = "sealed:"
"""The values of ingredients that one store alone understands begin with this."""
_ABSENT = "absent"


@dataclass(frozen=True)  # no slots: cached_property needs a __dict__
class Key:
    """Everything that decides a result.

    Attributes:
        kind: kind of result: `compile`, `lower`, `weights`.
        name: name of the result, for people: `demo/cpu-host/decode/b1-c128`. It is no part of the digest:
            two names with the same ingredients share their result.
        ingredients: (name, value) pairs; each name once.
    """

    kind: str
    name: str
    ingredients: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.ingredients]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"expected each ingredient once, found {', '.join(repeated)} again")

    @cached_property
    def digest(self) -> str:
        """Digest of kind and ingredients as canonical JSON."""
        content = json.dumps(
            [self.kind, self.ingredients], separators=(",", ":"), ensure_ascii=True
        ).encode("ascii")
        return digest_of(content)

    @cached_property
    def is_sealed(self) -> bool:
        """True if an ingredient is sealed: the key means nothing outside of its store."""
        return any(value.startswith(SEALED) for _, value in self.ingredients)

    def digits_in(self, namespace: str) -> str:
        """Return 64 digits that name the result of this key in a namespace, and no result in another."""
        digits = self.digest.removeprefix("sha256:")
        if not namespace:
            return digits
        return hashlib.sha256(f"{namespace}\0{digits}".encode()).hexdigest()


def nearest(keys: Sequence[Key], new: Key) -> Key | None:
    """Return the key that differs from a new one in the fewest ingredients; None: there are no keys."""
    wanted = {*new.ingredients}
    return min(keys, key=lambda each: len(wanted ^ {*each.ingredients}), default=None)


def why(old: Key | None, new: Key) -> str:
    """Return why a result has to be made: the ingredients that differ from those of the last result."""
    if old is None:
        return "first build of this program"
    before, after = dict(old.ingredients), dict(new.ingredients)
    names = [*after, *(name for name in before if name not in after)]
    changes = [
        f"{name}: {_short(before.get(name, _ABSENT))} -> {_short(after.get(name, _ABSENT))}"
        for name in names
        if before.get(name) != after.get(name)
    ]
    if changes:
        return "; ".join(changes)
    if old.digest != new.digest:
        return "the order of its ingredients changed"
    return "its last result is gone from the cache, or was damaged"


def _short(value: str) -> str:
    """Return a short form of a value for people: a digest by 12 digits, an empty text in quotes."""
    head, separator, digits = value.partition(":")
    if f"{head}:" in ("sha256:", SEALED) and separator and len(digits) > 12:
        return f"{head}:{digits[:12]}"
    return value or "''"
