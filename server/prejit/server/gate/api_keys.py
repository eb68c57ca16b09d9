"""API keys from a file: who may send requests, under which name, and how many."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from prejit.runtime.base.files import store_errors
from prejit.runtime.base.wording import nearest
from prejit.runtime.errors import StoreError, UsageError
from prejit.server.engine.fair_queue import NO_LIMITS, Limits
from prejit.server.served.process_upkeep import say

_log = logging.getLogger(__name__)
_MAX_BYTES = 1 << 20
"""The largest file of keys: 10,000 of them."""
_LINE = re.compile(
    r"(?:(?P<name>[A-Za-z0-9][\w.@-]{0,63})\s*:\s+)?(?P<key>[!-~]{8,256})(?P<limits>(?:\s+\w+=\S+)*)"
)
"""`name: key`, or a key alone, and limits behind it. Names go to logs and metrics."""
_COUNT = re.compile(r"[1-9][0-9]{0,11}")
_RANGE = re.compile(r"(?P<least>-?[0-9]{1,9})\.\.(?P<most>-?[0-9]{1,9})?")
_LIMITS = ("waiting", "running", "tokens_per_minute", "priority")
_MOST_PRIORITY = 2**31 - 1
_PRIORITIES = 0, _MOST_PRIORITY
"""The least and the largest priority of a key that has no range: nobody goes before all others unasked."""
_LOOK_SECONDS = 1.0
"""How long a change of the file may go unseen."""
_SETTLED_SECONDS = 2.0
"""A file that changed more recently may change again without another time: it is read once more."""


@final
class TokenMeter:
    """The tokens of a key. Safe to use from many threads.

    A minute's tokens are there at first, and come back evenly. Requests may take more than are left, because
    nobody knows before how long an answer is. Then the next one waits until that has come back.
    """

    def __init__(self, per_minute: int) -> None:
        """Begin with the tokens of a minute."""
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at = time.monotonic()
        self._lock = threading.Lock()

    def spend(self, tokens: int) -> None:
        """Take tokens."""
        with self._lock:
            self._fill()
            self._left -= tokens

    def wait_seconds(self) -> float:
        """Return how long a request has to wait; 0: it may come."""
        with self._lock:
            self._fill()
            return 0.0 if self._left > 0 else (1 - self._left) * 60 / self.per_minute

    def _fill(self) -> None:
        now = time.monotonic()
        come = (now - self._at) * self.per_minute / 60
        self._left, self._at = min(self.per_minute, self._left + come), now


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The sender of a request, and its limits.

    Attributes:
        name: of the key; empty: the server has no keys, and everybody is one client.
        limits: for each engine.
        priorities: the least and the largest that its requests may have.
        meter: counts its tokens; None: it may use any number.
    """

    name: str = ""
    limits: Limits = NO_LIMITS
    priorities: tuple[int, int] = _PRIORITIES
    meter: TokenMeter | None = None


ANYBODY = ApiKey()


@final
class Keys:
    """The keys of a server. It keeps their digests only. For one thread.

    They are in a file: one in a line, `name: key` or a key alone, with limits behind it. Empty lines and `#`
    lines are skipped. A key without a name gets the name `key-N` of its line. The file is read again when it
    has changed. A file that cannot be used changes nothing then.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read a file.

        Raises:
            StoreError: the file cannot be read.
            UsageError: it has no key, a line is no key, a limit is wrong, or a name or a key comes twice.
        """
        self._path = Path(path)
        self._said = ""
        self._meters: dict[str, TokenMeter] = {}
        self._keys: list[tuple[ApiKey, bytes]] = []
        self._stamp = self._read()
        self._next_look = time.monotonic() + _LOOK_SECONDS

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, authorization: str) -> ApiKey | None:
        """Return the key in the value of an Authorization header; None: it is unknown.

        Every key is compared, and in constant time, so that the time says nothing about the keys.
        """
        self._look()
        scheme, _, key = authorization.partition(" ")
        given, found = _digest(key.strip()), None
        for known, digest in self._keys:
            if hmac.compare_digest(digest, given):
                found = known
        return found if scheme.lower() == "bearer" else None

    def _look(self) -> None:
        """Read the file again if it has changed."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        try:
            if self._stamp is not None and self._stamp == _stamp(self._path):
                return
            self._stamp, said = self._read(), ""
            _log.info("%s: read again: %d keys", self._path, len(self))
        except OSError as error:
            said = f"{self._path}: cannot read the keys: {error.strerror}"
        except (StoreError, UsageError) as error:
            said = error.describe()
        if said and said != self._said:
            say(f"{said}\nThe keys of before stay valid.")
        self._said = said

    def _read(self) -> tuple[int, ...] | None:
        """Read the file; return what changes when it does, or None if it must be read again."""
        content, stamp = _content(self._path)
        meters: dict[str, TokenMeter] = {}

        def meter(name: str, per_minute: int) -> TokenMeter:
            known = self._meters.get(name)
            if known is None or known.per_minute != per_minute:
                known = TokenMeter(per_minute)
            return meters.setdefault(name, known)

        self._keys = _parse(content, os.fspath(self._path), meter)
        self._meters = meters
        return stamp


def _content(path: Path) -> tuple[bytes, tuple[int, ...] | None]:
    """Return the content of a file of keys and its stamp; None: it may change without another one."""
    with store_errors(
        path,
        "read the keys",
        hint="give --keys a file with a key in each line, such as the output of: openssl rand -hex 24",
    ):
        with open(path, "rb") as file:
            stamp = _stamp(path)
            content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise UsageError(
            f"{path}: expected a file of keys of at most {_MAX_BYTES} bytes, found more"
        )
    is_settled = abs(time.time() - stamp[0] / 1e9) > _SETTLED_SECONDS
    return content, stamp if is_settled else None


def _stamp(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_ctime_ns, found.st_mtime_ns, found.st_ino, found.st_size


def _parse(
    content: bytes, path: str, meter: Callable[[str, int], TokenMeter]
) -> list[tuple[ApiKey, bytes]]:
    """Return the keys of a file with the digests of their secrets. Raises as `Keys`."""
    found: list[tuple[ApiKey, bytes]] = []
    seen: set[str | bytes] = set()
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        text, place = line.strip(), f"{path}: line {number}"
        if not text or text.startswith("#"):
            continue
        if (match := _LINE.fullmatch(text)) is None:  # the line may be a key: it is not shown
            raise UsageError(
                f"{place}: expected `name: key` or a key of 8 to 256 visible ASCII characters, and "
                f"behind it only limits ({', '.join(f'{each}=' for each in _LIMITS)})"
            )
        name, digest = match["name"] or f"key-{number}", _digest(match["key"])
        if name in seen or digest in seen:
            raise UsageError(f"{place}: expected each name and each key once")
        seen |= {name, digest}
        found.append((_limited(name, match["limits"].split(), place, meter), digest))
    if not found:
        raise UsageError(
            f"{path}: expected at least one key, found none",
            hint="write one in a line, such as the output of: openssl rand -hex 24",
        )
    return found


def _limited(
    name: str, words: list[str], place: str, meter: Callable[[str, int], TokenMeter]
) -> ApiKey:
    """Return a key with the limits of its line."""
    counts: dict[str, int] = {}
    priorities = _PRIORITIES
    seen: set[str] = set()
    for word in words:
        limit, _, value = word.partition("=")
        if limit not in _LIMITS or limit in seen:
            found = f"{limit} twice" if limit in seen else "another word"  # it may be of the key
            near = nearest(limit, _LIMITS)
            raise UsageError(
                f"{place}: expected each of {', '.join(_LIMITS)} once at most, found {found}",
                hint=f"did you mean {near}=?" if near not in (None, limit) else None,
            )
        seen.add(limit)
        if limit == "priority":
            priorities = _priorities(value, place)
        elif _COUNT.fullmatch(value) is None:
            raise UsageError(f"{place}: {limit}: expected a number from 1, found {value!r:.40}")
        else:
            counts[limit] = int(value)
    per_minute = counts.get("tokens_per_minute")
    own = None if per_minute is None else meter(name, per_minute)
    limits = Limits(
        counts.get("waiting"), counts.get("running"), None if own is None else own.spend
    )
    return ApiKey(name, limits, priorities, own)


def _priorities(value: str, place: str) -> tuple[int, int]:
    if (match := _RANGE.fullmatch(value)) is not None:
        least, most = int(match["least"]), int(match["most"] or _MOST_PRIORITY)
        if least <= most:
            return least, most
    raise UsageError(
        f"{place}: priority: expected LEAST..MOST, such as 0..10, or LEAST.., found {value!r:.40}"
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
