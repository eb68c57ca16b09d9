"""The outcomes of first loads in a child process, so that this machine tries each bundle once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from prejit.runtime.base.files import is_digest
from prejit.runtime.store.runtime_cache import cache_root, read_own, write_own

_MAX_BYTES = 1 << 16

LOADED = "loaded"
"""The outcome of a first load that went well; another outcome says how the child process ended."""


def first_load_outcome(key: str) -> str | None:
    """Return the outcome of a first load; None: there was none, or its file is damaged.

    Args:
        key: the digest that stands for a bundle on a machine.
    """
    outcome = _kept(first_load_file(key)).get("outcome")
    return outcome if isinstance(outcome, str) and outcome else None


def remember_first_load(key: str, outcome: str, manifests: Sequence[str]) -> None:
    """Keep the outcome of a first load. Without a place to keep it, the next load tries again.

    Args:
        key: the digest that stands for a bundle on a machine.
        outcome: how it ended.
        manifests: the digests of the manifests of the targets that were loaded.
    """
    kept = {"key": key, "outcome": outcome, "manifests": list(manifests)}
    write_own(first_load_file(key), json.dumps(kept).encode())


def forget_failed_loads(manifests: Collection[str]) -> list[Path]:
    """Remove the outcomes of first loads that failed. Return the files.

    Args:
        manifests: the digests of the manifests of a bundle's targets.

    Raises:
        OSError: a file cannot be removed.
    """
    found = []
    for file in sorted(_directory().glob("*.json")):
        kept = _kept(file)
        loaded = kept.get("manifests")
        about = isinstance(loaded, list) and any(each in manifests for each in loaded)
        if about and kept.get("outcome") != LOADED:
            file.unlink(missing_ok=True)
            found.append(file)
    return found


def first_load_file(key: str) -> Path:
    """Return the file with the outcome of a first load."""
    assert is_digest(key)
    return _directory() / f"{key.removeprefix('sha256:')}.json"


def _directory() -> Path:
    return cache_root() / "first-loads" / "v1"


def _kept(file: Path) -> dict[str, Any]:
    """Return the content of a file; an empty one if it is missing, damaged or another's."""
    with contextlib.suppress(ValueError, RecursionError):
        found: Any = json.loads(read_own(file, _MAX_BYTES) or b"")
        if isinstance(found, dict) and found.get("key") == f"sha256:{file.stem}":
            return found
    return {}
