"""Threads for what takes long: each kind of work has its own, so that none waits for another."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

OPERATORS = ThreadPoolExecutor(2, "prejit-operator")
"""For metrics and the page: quick work, which never stands behind that of clients."""
TEXTS = ThreadPoolExecutor(4, "prejit-text")
"""For long texts: tokenizing, chat templates, large schemas."""


async def in_thread(pool: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    """Return the result of a function, run in a thread. It never runs if the caller is cancelled before."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, context.run, function)
