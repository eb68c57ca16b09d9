"""The names of the programs that a process used first: the next start loads them ahead of the first call."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from prejit.runtime.base.files import write_file
from prejit.runtime.base.process import is_plain_start
from prejit.runtime.errors import StoreError
from prejit.runtime.store.directory import cache_root, read_own

_MAX_BYTES = 1 << 16


def first_programs(digest: str) -> tuple[str, ...]:
    """The programs that an earlier start of a bundle wanted first, so that this one loads them at once.

    It is a guess, and costs nothing but time where it is wrong. Who starts again mostly starts alike.

    Args:
        digest: of the bundle.
    """
    if is_plain_start():
        return ()
    with contextlib.suppress(ValueError, RecursionError):
        names = json.loads(read_own(_first_programs_file(digest), _MAX_BYTES) or b"")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()


def remember_first_programs(digest: str, names: Sequence[str]) -> None:
    """Keeps what the next start shall load at once. Where nothing can be written, that costs only time."""
    path = _first_programs_file(digest)
    with contextlib.suppress(OSError, StoreError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path, json.dumps(list(names)).encode())
        path.chmod(0o600)


def _first_programs_file(digest: str) -> Path:
    return cache_root() / "starts" / "v1" / f"{digest.removeprefix('sha256:')}.json"
