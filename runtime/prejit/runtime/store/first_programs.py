"""The names of the programs that a process used first: the next start loads them ahead of the first call."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from prejit.runtime.base.process_facts import is_plain_start
from prejit.runtime.store.runtime_cache import cache_root, read_own, write_own

_MAX_BYTES = 1 << 16


def first_programs(digest: str) -> tuple[str, ...]:
    """Return the names of the programs that an earlier start of a bundle used first.

    A start loads them at once, because most starts of a bundle are alike. A wrong guess costs only time.

    Args:
        digest: the bundle's digest.
    """
    if is_plain_start():
        return ()
    with contextlib.suppress(ValueError, RecursionError):
        names = json.loads(read_own(_first_programs_file(digest), _MAX_BYTES) or b"")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()


def remember_first_programs(digest: str, names: Sequence[str]) -> None:
    """Keep the names of the programs that a start used first, for the next start."""
    write_own(_first_programs_file(digest), json.dumps(list(names)).encode())


def _first_programs_file(digest: str) -> Path:
    return cache_root() / "starts" / "v1" / f"{digest.removeprefix('sha256:')}.json"
