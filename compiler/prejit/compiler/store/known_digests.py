"""Digests of prejit's own code that an earlier process found. They hold while no source file has changed.

Parsing the sources takes nearly half a second of CPU time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import final

from prejit.runtime.base.files import Identity, is_digest
from prejit.runtime.machine.kept_files import SETTLED_SECONDS, cache_root, read_own, write_own

_MAX_BYTES = 1 << 20


@final
class KnownDigests:
    """The digests of code in some directories, by what each is the digest of.

    A source that is written, replaced, added or removed ends them: the kernel changes its ctime, which no
    program can set back (`prejit.runtime.machine.kept_files` relies on the same).
    """

    def __init__(self, directories: Mapping[str, Path]) -> None:
        """Read the digests that an earlier process kept.

        Args:
            directories: the directory of each root package.
        """
        places = "\0".join(os.path.abspath(each) for each in directories.values())
        name = hashlib.sha256(os.fsencode(places)).hexdigest()
        self._path = cache_root() / "code" / "v1" / f"{name}.json"
        sources = sorted(each for root in directories.values() for each in _sources(str(root)))
        self._state = hashlib.sha256(repr(sources).encode()).hexdigest()
        # A change within the same tick of the clock as the last one would leave the same ctime.
        changed = max((identity.ctime_ns for _, identity in sources), default=0)
        self._settled = time.time() - changed / 1e9 > SETTLED_SECONDS
        self._digests = self._read()

    def _read(self) -> dict[str, str]:
        with suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
            held = json.loads(read_own(self._path, _MAX_BYTES) or b"")
            if held["sources"] == self._state:
                return {
                    name: digest for name, digest in held["digests"].items() if is_digest(digest)
                }
        return {}

    def get(self, name: str) -> str | None:
        """Return the digest that is kept under a name; None: none is."""
        return self._digests.get(name)

    def keep(self, name: str, digest: str) -> None:
        """Keep a digest for later processes, where a cache directory can be written."""
        self._digests[name] = digest
        if self._settled:
            held = {"sources": self._state, "digests": self._digests}
            write_own(self._path, json.dumps(held).encode())


def _sources(directory: str) -> Iterator[tuple[str, Identity]]:
    """Yield path and identity of each source file below a directory."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path, Identity.of(entry.stat())
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _sources(entry.path)
