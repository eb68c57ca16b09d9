"""A client that goes away ends what it waits for, and leaves no line on stderr."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from prejit.server.gate.disconnect import unless_gone


async def gone() -> Message:
    await asyncio.sleep(0)
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("count", [1, 2])
def test_several_values_that_nobody_waits_for_any_more_are_no_news(count: int) -> None:
    reported: list[dict[str, Any]] = []

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        wanted = [loop.create_future() for _ in range(count)]
        with pytest.raises(ClientDisconnect):
            await unless_gone(gone, asyncio.gather(*wanted))
        assert all(each.cancelled() for each in wanted)
        await asyncio.sleep(0)

    asyncio.run(leave())
    gc.collect()
    assert reported == []
