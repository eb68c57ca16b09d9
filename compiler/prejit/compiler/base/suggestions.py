"""How errors show values, and suggest the name that was probably meant."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prejit.runtime.base.wording import nearest, shortened


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the nearest name as an insertion, ` (did you mean "x"?)`, or an empty text."""
    guess = nearest(name, names)
    return f" (did you mean {shown(guess)}?)" if guess is not None else ""


def shown(value: Any) -> str:
    """Return a value as TOML writes it, shortened."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value, ensure_ascii=False, default=str)
    # Half a surrogate pair cannot be printed.
    text = text.encode(errors="backslashreplace").decode()
    return shortened(text, 60)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 program`, `2 programs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def no_such_path(kind: str, path: str, directory: Path) -> str:
    """Return the problem with a path that leads to no `kind` (`file`, `directory`)."""
    wanted = f"expected a {kind} at {shown(path)}, relative to the manifest"
    if not path:
        return f"{wanted}; found an empty path"
    if os.path.exists(directory / path):
        return f"{wanted}; found {_kind_of(directory / path)}"
    parent, _, last = path.rpartition("/")
    try:
        siblings = os.listdir(directory / parent)
    except (OSError, ValueError):
        siblings = []
    if last in siblings:
        return f"{wanted}; found a symbolic link that leads nowhere"
    guess = did_you_mean(last, siblings)
    if path.startswith("~"):
        guess = f" (write {shown(os.path.expanduser(path))}: nothing expands ~)"
    elif kind == "directory" and not siblings and re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        guess = f" (of the Hugging Face hub it is {shown(f'hf://{path}')})"
    return f"{wanted}; found none{guess}"


def _kind_of(path: Path) -> str:
    """Return in words what a path leads to."""
    if path.is_dir():
        return "a directory"
    if path.is_file():
        return "a file"
    return "a FIFO" if path.is_fifo() else "a device or a socket"
