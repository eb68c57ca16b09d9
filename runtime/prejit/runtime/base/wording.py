"""Text for people: tables for a terminal, shortened lists, and the name that was probably meant."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from prejit.runtime.errors import printable


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are as wide as their widest cell. Line breaks in cells are escaped."""
    rows = [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return aligned([head, ["-" * width for width in widths], *rows])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells, whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def size(count: int) -> str:
    """Return a number of bytes as text: `12.3 MB`."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def few(items: Sequence[str], most: int = 3) -> str:
    """Return the first items and the number of further ones: `a, b, c and 2 more`."""
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more} more" if more > 0 else "")


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many characters; dots say that there were more."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that is most like another, or None where none is near. Case does not count."""
    import difflib  # takes a start 1 ms, and most input is right

    by_lower = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name[:80].lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def nearest_file(path: Path) -> Path | None:
    """Return the file beside a missing one whose name is most like it, or None where none is near."""
    try:
        near = nearest(path.name, {*os.listdir(path.parent)} - {path.name})
    except OSError:
        return None
    return None if near is None else path.with_name(near)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the nearest name as an insertion, ` (did you mean 'x'?)`, or an empty text."""
    guess = nearest(name, names)
    return f" (did you mean {guess!r}?)" if guess is not None else ""


def nearest_path(path: Path, pattern: str) -> Path | None:
    """Return the path that is most like one that leads nowhere, or None where none is near.

    Its directories may be wrong, too. `pattern` is what its last part must match: `*/` is any directory.
    """
    parent = path.parent if os.path.isdir(path.parent) else nearest_path(path.parent, "*/")
    if parent is None:
        return None
    try:
        guess = nearest(path.name, [each.name for each in parent.glob(pattern)])
    except OSError:
        return None
    return None if guess is None else parent / guess
