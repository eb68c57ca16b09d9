"""The client of a request: what its key may do, and whether it still waits for the answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

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
