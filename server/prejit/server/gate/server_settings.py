"""The limits of a server. The options of `prejit serve` set them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prejit.server.gate.api_keys import ANYBODY, ApiKey

if TYPE_CHECKING:
    from prejit.server.gate.api_keys import Keys
    from prejit.server.gate.request_clients import Origins
    from prejit.server.telemetry.requestlog import Log


BACKLOG = 2048
"""Connections that may wait for being accepted; the kernel has a limit of its own."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The limits of a server.

    Attributes:
        body_bytes: the largest body of a request. A larger one is refused with status 413.
        max_tokens: the most new tokens that a request may ask for; None: what the context has room for.
        timeout_seconds: the longest time of a request, from its head to its last token. Engines end it then,
            with status 504 if nothing was sent yet.
        clients: the most requests at once, waiting ones included. More are refused with status 503.
        drain_seconds: how long running requests may go on after a signal to end.
        check_seconds: how often golden answers are asked for again; None: only after requests have failed.
        follow_seconds: how often the tags of bundles are asked for newer ones; None: only at the start.
        keys: who may send requests; None: everybody.
        ignore_unknown_fields: whether fields that no request has are left out; if not, they are an error.
        anybody: what is allowed without keys.
        log: where requests are recorded for `prejit replay`; None: nowhere.
        tap: returns what takes the records in place of the log while a canary runs; None: nothing does.
        cors: origins of web pages that may read answers; `*`: all.
        origins: the hosts and pages that may send requests; None: all.
    """

    body_bytes: int = 16 << 20
    max_tokens: int | None = None
    timeout_seconds: float = 600.0
    clients: int = 1024
    drain_seconds: float = 30.0
    check_seconds: float | None = None
    follow_seconds: float | None = None
    keys: Keys | None = None
    ignore_unknown_fields: bool = False
    anybody: ApiKey = ANYBODY
    log: Log | None = None
    tap: Callable[[], Log | None] | None = None
    cors: tuple[str, ...] = ()
    origins: Origins | None = None
