"""How errors show a value, and suggest the name that was probably meant."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from prejit.runtime.base.nearest_name import nearest


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the nearest name as an insertion, ` (did you mean "x"?)`, or an empty text."""
    guess = nearest(name, names)
    return f" (did you mean {shown(guess)}?)" if guess is not None else ""


def shown(value: Any) -> str:
    """Return a value as TOML writes it, shortened."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode(
        errors="backslashreplace"
    ).decode()  # half a surrogate pair cannot be printed
    return text if len(text) <= 60 else f"{text[:57]}..."
