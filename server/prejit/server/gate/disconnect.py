"""Waiting for a value on behalf of a client, and for no longer than the client does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

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
