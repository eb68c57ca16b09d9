"""API keys from a file: who may send requests, and under which name."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from typing import final

from prejit.runtime.errors import StoreError, UsageError

_MAX_BYTES = 1 << 20
"""The largest file of keys: 10,000 of them."""
_LINE = re.compile(r"(?:(?P<name>[A-Za-z0-9][\w.@-]{0,63})\s*:\s+)?(?P<key>[!-~]{8,256})")
"""`name: key`, or a key alone. Names go to logs and metrics."""


@final
class Keys:
    """The keys of a server. It keeps their digests only."""

    def __init__(self, named: dict[str, str]) -> None:
        """Accept these keys.

        Args:
            named: a key by the name of who has it.
        """
        self._named = [(name, _digest(key)) for name, key in named.items()]

    def __len__(self) -> int:
        return len(self._named)

    def name_of(self, authorization: str) -> str | None:
        """Return the name of who sends the value of an Authorization header; None: the key is unknown.

        Every key is compared, and in constant time, so that the time says nothing about the keys.
        """
        scheme, _, key = authorization.partition(" ")
        given, found = _digest(key.strip()), None
        for name, digest in self._named:
            if hmac.compare_digest(digest, given):
                found = name
        return found if scheme.lower() == "bearer" else None


def read_keys(path: str | os.PathLike[str]) -> Keys:
    """Read a file of keys: one in a line, `name: key` or a key alone. Empty lines and `#` lines are skipped.

    A key without a name gets the name `key-N` of its line.

    Raises:
        StoreError: the file cannot be read.
        UsageError: it has no key, a line is no key, or a name or a key comes twice.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{path}: cannot read the keys: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise UsageError(
            f"{path}: expected a file of keys of at most {_MAX_BYTES} bytes, found more"
        )
    named: dict[str, str] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if (match := _LINE.fullmatch(text)) is None:  # the line may be a key: it is not shown
            raise UsageError(
                f"{path}: line {number}: expected `name: key` or a key of 8 to 256 visible ASCII characters"
            )
        name = match["name"] or f"key-{number}"
        if name in named or match["key"] in named.values():
            raise UsageError(f"{path}: line {number}: expected each name and each key once")
        named[name] = match["key"]
    if not named:
        raise UsageError(
            f"{path}: expected at least one key, found none",
            hint="write one in a line, such as the output of: openssl rand -hex 24",
        )
    return Keys(named)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
