"""The name that was probably meant, for hints of errors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


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

    Args:
        path: its directories may be wrong, too.
        pattern: what its last part must match: `*/` is any directory.
    """
    parent = path.parent if os.path.isdir(path.parent) else nearest_path(path.parent, "*/")
    if parent is None:
        return None
    try:
        guess = nearest(path.name, [each.name for each in parent.glob(pattern)])
    except OSError:
        return None
    return None if guess is None else parent / guess
