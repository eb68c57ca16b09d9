"""The client of a request: where it comes from, what its key may do, and if it still waits for the answer.

A server that asks for no key limits hosts and web pages: every page that a browser on its machine shows can
reach one on loopback, by a name that its owner points to 127.0.0.1 (DNS rebinding), and by requests that
browsers send without asking the server first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeVar, final
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from prejit.server.gate.http_errors import ApiError, field_error

if TYPE_CHECKING:
    from prejit.server.gate.api_keys import ApiKey


def priority(key: ApiKey, given: int | None) -> int:
    """Return the priority of a request: what it gives, else the one of the key's range that is nearest to 0.

    Raises:
        ApiError: the key may not have it.
    """
    least, most = key.priorities
    if given is None:
        return max(least, min(0, most))
    if least <= given <= most:
        return given
    raise field_error(
        "priority",
        f"expected {least} to {most}, which this client may have, found {given}",
        code="priority_not_allowed",
    )


def check_tokens(key: ApiKey) -> None:
    """Check that a key has tokens left.

    Raises:
        ApiError: it has used those of this minute.
    """
    if key.meter is not None and (seconds := key.meter.wait_seconds()):
        wait = math.ceil(seconds)
        raise ApiError(
            429,
            f"expected at most {key.meter.per_minute} tokens a minute with this key, found them used: try "
            f"again after {wait} seconds",
            type="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(wait)},
        )


T = TypeVar("T")


async def unless_gone(receive: Receive, wanted: Awaitable[T]) -> T:
    """Wait for a value, and stop waiting when the client is gone.

    Raises:
        ClientDisconnect: the client is gone. What was waited for is cancelled.
    """
    work = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        gone.cancel()
        work.add_done_callback(_seen)
        work.cancel()


def _seen(work: asyncio.Future[Any]) -> None:
    """Look at an outcome that nobody waits for: asyncio prints a failure that nobody has looked at."""
    if not work.cancelled():
        work.exception()


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone. The body of the request has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


_READING = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing. Browsers keep their answers from foreign pages."""


@final
@dataclass(frozen=True, slots=True)
class Origins:
    """The names of a server, and the origins of web pages that may use it beside its own.

    Attributes:
        host: the name or address that it listens at.
        allowed: origins such as `https://app.example`; `*`: all.
        hint: how the operator lets more in; errors end with it.
    """

    host: str
    allowed: tuple[str, ...] = ()
    hint: str = ""

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Check who a request addresses, and which page sends it.

        Raises:
            ApiError: another host, or a foreign page.
        """
        if "*" in self.allowed:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        name = _name("//" + host)
        names = {self.host.lower(), *map(_name, self.allowed)}
        # No web page gets at an address by a name of its own.
        if host and name not in names and not is_loopback(name) and not _is_address(name):
            raise self._refused("Host", "an address, localhost or the name of this server", host)
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or method in _READING or origin in self.allowed:
            return
        name = _name(origin)
        if not is_loopback(name) and origin.partition("://")[2] != host:
            raise self._refused("Origin", "a page of this server or of this machine", origin)

    def _refused(self, header: str, expected: str, found: str) -> ApiError:
        hint = f" ({self.hint})" if self.hint else ""
        return ApiError(
            403,
            f"{header}: expected {expected}, found {found!r:.200}{hint}",
            type="permission_error",
            code=f"foreign_{header.lower()}",
        )


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, whoever looks it up."""
    return f".{host}".endswith(".localhost") or (_is_address(host) and ip_address(host).is_loopback)


def _name(url: str) -> str:
    """Return the host of a URL; empty: it has none."""
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:  # brackets without an address
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
