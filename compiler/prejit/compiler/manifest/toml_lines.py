"""Find the line of each key of a TOML file; tomllib does not return them."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from typing import final

KeyPath = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*'""")
_SCALAR = re.compile(
    r'''"""(?:\\.|[^\\])*?""""{0,2}'''  # up to two quotes may stand before the closing three
    r"""|\'\'\'.*?\'\'\''{0,2}"""
    r"""|"(?:\\.|[^"\\\n])*"|'[^'\n]*'"""
    r"""|\d{4}-\d\d-\d\d\ \d\d:[^\s,\]}\#]+|[^\s,\[\]{}\#]+""",
    re.DOTALL,
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, of every table, key and list item of a TOML document.

    Args:
        text: TOML that `tomllib.loads` accepts. Other texts give the lines up to the first mistake.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    with suppress(AttributeError, RecursionError):  # no match: not TOML; or nested without end
        scanner.document()
    return scanner.lines


@final
class _Scanner:
    """Reads as much of TOML as is needed to find where keys are."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._line_at = 0  # the offset up to which newlines are counted, and their number
        self._line = 1
        self._tables: dict[KeyPath, int] = {}  # how many [[tables]] of an array were seen

    def document(self) -> None:
        table: KeyPath = ()
        while True:
            self._take(_BLANK)
            if self._at == len(self._text):
                return
            if self._skip("[["):
                *parents, last = self._key()
                array = (*self._resolve(parents), last)
                count = self._tables[array] = self._tables.get(array, 0) + 1
                self.lines.setdefault(array, self._here())
                table = (*array, count - 1)
                self.lines[table] = self._here()
                self._skip("]]")
            elif self._skip("["):
                table = self._resolve(self._key())
                self.lines[table] = self._here()
                self._skip("]")
            else:
                self._pair(table)

    def _pair(self, table: KeyPath) -> None:
        line = self._here()
        path = table
        for part in self._key():
            path = (*path, part)
            self.lines.setdefault(path, line)
        self._skip("=")
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        self._take(_BLANK)
        if self._skip("["):
            index = 0
            while not self._skip("]"):
                self.lines[*path, index] = self._here()
                self._value((*path, index))
                self._skip(",")
                index += 1
        elif self._skip("{"):
            while not self._skip("}"):
                self._pair(path)
                self._skip(",")
        else:
            self._take(_SCALAR)

    def _key(self) -> list[str]:
        parts = [self._key_part()]
        while self._skip("."):
            parts.append(self._key_part())
        return parts

    def _key_part(self) -> str:
        self._take(_BLANK)
        part = self._take(_KEY)
        return tomllib.loads(f"key = {part}")["key"] if part[0] in "\"'" else part

    def _resolve(self, parts: list[str]) -> KeyPath:
        """Return a header's path; each array of tables in it stands for its last table."""
        path: KeyPath = ()
        for part in parts:
            path = (*path, part)
            if path in self._tables:
                path = (*path, self._tables[path] - 1)
        return path

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        self._at = match.end()  # type: ignore[union-attr]  # caught in key_lines
        return match.group()  # type: ignore[union-attr]

    def _skip(self, token: str) -> bool:
        self._take(_BLANK)
        found = self._text.startswith(token, self._at)
        self._at += len(token) if found else 0
        return found

    def _here(self) -> int:
        self._line += self._text.count("\n", self._line_at, self._at)
        self._line_at = self._at
        return self._line
