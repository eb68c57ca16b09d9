"""The hosts and web pages that may use a server that asks for no key.

A server on loopback can be reached by every web page that a browser on its machine shows: by a name that its
owner points to 127.0.0.1 (DNS rebinding), and by requests that browsers send without asking the server first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import final
from urllib.parse import urlsplit

from prejit.server.gate.http_errors import ApiError

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
