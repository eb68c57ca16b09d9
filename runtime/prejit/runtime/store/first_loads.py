"""The outcomes of first loads in a child process, so that this machine tries each bundle once."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from prejit.runtime.base.digests import is_digest
from prejit.runtime.store.directory import cache_root, read_own, write_own

_MAX_BYTES = 1 << 12

LOADED = "loaded"
"""The outcome of a first load that went well; another outcome says how the child process ended."""


def first_load_outcome(key: str) -> str | None:
    """Return the outcome of a first load; None: there was none, or its file is damaged.

    Args:
        key: the digest that stands for a bundle on a machine.
    """
    with contextlib.suppress(ValueError, RecursionError):
        found: Any = json.loads(read_own(first_load_file(key), _MAX_BYTES) or b"")
        if isinstance(found, dict) and found.get("key") == key:
            outcome = found.get("outcome")
            return outcome if isinstance(outcome, str) and outcome else None
    return None


def remember_first_load(key: str, outcome: str) -> None:
    """Keep the outcome of a first load. Without a place to keep it, the next load tries again."""
    write_own(first_load_file(key), json.dumps({"key": key, "outcome": outcome}).encode())


def first_load_file(key: str) -> Path:
    """Return the file with the outcome of a first load."""
    assert is_digest(key)
    return cache_root() / "first-loads" / "v1" / f"{key.removeprefix('sha256:')}.json"
