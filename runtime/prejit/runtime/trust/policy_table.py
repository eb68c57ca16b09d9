"""Read `trust.toml` strictly: a table of it, whose errors name their place, and patterns of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from prejit.runtime.base.typed_json import shown
from prejit.runtime.base.wording import nearest
from prejit.runtime.errors import PolicyError

HINT = "docs/how-to/trust.md shows a policy"
"""The hint of errors in a policy."""

_T = TypeVar("_T")
_Word = TypeVar("_Word", bound=str)


def fits(pattern: str, name: str) -> bool:
    """Return whether a name fits a pattern, in linear time: whoever made the bundle chose its name."""
    first, *others = pattern.split("*")
    if not others:
        return name == pattern
    *middle, last = others
    if len(name) < len(first) + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


class Table:
    """A table of the policy and its place, which every error names."""

    def __init__(self, found: Mapping[str, Any], path: str, at: str) -> None:
        self._found = found
        self._path = path
        self._at = at

    def place(self, key: str = "") -> str:
        """Return where a key is, as text."""
        at = ".".join(part for part in (self._at, key) if part)
        return f"{self._path}: {at}" if at else self._path

    def error(self, text: str, key: str = "", known: Iterable[str] = ()) -> PolicyError:
        """Return the error about a key, with the nearest of the known names as its hint."""
        word = text.rpartition("found ")[2].strip("'")
        near = nearest(word, known)
        hint = f"did you mean {near!r}?" if near else HINT
        return PolicyError(f"{self.place(key)}: {text}", hint=hint)

    def only(self, *known: str) -> None:
        """Check that there are no other keys."""
        for key in self._found:
            if key not in known:
                names = ", ".join(known)
                raise self.error(f"expected only {names}, found {key!r:.80}", "", known)

    def has(self, key: str) -> bool:
        """Return whether a key is there."""
        return key in self._found

    def _value(self, key: str, kind: type[_T], expected: str) -> _T:
        value = self._found.get(key)
        if type(value) is not kind:
            found = "nothing" if value is None else shown(value)
            raise self.error(f"expected {expected}, found {found}", key)
        return value

    def text(self, key: str) -> str:
        """Return text, which must be there, not be empty, and have no NUL, which no path may have."""
        text = self._value(key, str, "text")
        if not text or "\0" in text:
            found = "one with a NUL" if text else "an empty one"
            raise self.error(f"expected text, found {found}", key)
        return text

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return a list of text."""
        if default is not None and not self.has(key):
            return default
        listed: list[Any] = self._value(key, list, "a list of text")
        for each in listed:
            if type(each) is not str:
                raise self.error(f"expected text, found {shown(each)}", key)
        return tuple(listed)

    def integer(self, key: str, default: int, least: int) -> int:
        """Return an integer of at least `least`."""
        if not self.has(key):
            return default
        value = self._value(key, int, "an integer")
        if not least <= value < 1 << 53:
            raise self.error(f"expected {least} or more, found {shown(value)}", key)
        return value

    def flag(self, key: str) -> bool:
        """Return true or false, which is what a missing key means."""
        return self.has(key) and self._value(key, bool, "true or false")

    def choice(self, key: str, known: tuple[_Word, ...], default: _Word) -> _Word:
        """Return one of some words."""
        if not self.has(key):
            return default
        text = self.text(key)
        for word in known:
            if text == word:
                return word
        raise self.error(f"expected {', '.join(known)}, found {text!r:.80}", key, known)

    def moment(self, key: str) -> float | None:
        """Return a date (its first moment, UTC) or a time, in seconds; None: it is not there."""
        if not self.has(key):
            return None
        from datetime import UTC, date, datetime

        value = self._found[key]
        if type(value) is date:
            value = datetime(value.year, value.month, value.day, tzinfo=UTC)
        if type(value) is not datetime or value.tzinfo is None:
            raise self.error(
                "expected a date such as 2027-06-30 or a time with its offset such as "
                f"2027-06-30T12:00:00Z, found {shown(value)}",
                key,
            )
        return value.timestamp()

    def table(self, key: str) -> Table:
        """Return a table; an empty one if it is not there."""
        found: dict[str, Any] = self._value(key, dict, "a table") if self.has(key) else {}
        return Table(found, self._path, ".".join(filter(None, (self._at, key))))

    def tables(self, key: str) -> dict[str, Table]:
        """Return the tables in a table, by name."""
        outer = self.table(key)
        return {
            name: Table(outer._value(name, dict, "a table"), self._path, f"{key}.{name}")
            for name in outer._found
        }

    def list_of_tables(self, key: str) -> list[Table]:
        """Return a list of tables; none if it is not there."""
        listed: list[Any] = self._value(key, list, f"[[{key}]]") if self.has(key) else []
        for each in listed:
            if type(each) is not dict:
                raise self.error(f"expected a table, found {shown(each)}", key)
        return [Table(each, self._path, f"{key}[{place}]") for place, each in enumerate(listed)]
