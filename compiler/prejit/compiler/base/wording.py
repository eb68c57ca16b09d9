"""How errors say a value, and the name that somebody may have meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of names that is most like name, or None where none is near.

    Upper and lower case count as the same, so that `V3` finds `v3`.
    """
    by_lower = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The nearest name as an insertion, ` (did you mean "x"?)`, or nothing."""
    guess = nearest(name, names)
    return f" (did you mean {shown(guess)}?)" if guess is not None else ""


def shown(value: Any) -> str:
    """A value as TOML says it, shortened."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode(
        errors="backslashreplace"
    ).decode()  # half a surrogate pair cannot be printed
    return text if len(text) <= 60 else f"{text[:57]}..."
