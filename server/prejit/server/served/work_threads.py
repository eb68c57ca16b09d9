"""Threads for what takes long: each kind of work has its own, so that none waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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


def yield_cpu(niceness: int) -> None:
    """Lower the priority of this thread and of those that it starts: 19 is the lowest on Linux."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


ADMIN = "prejit-admin"
"""The threads of the admin address. A load or a recording cannot be stopped: a server that ends leaves it."""


async def in_admin_thread(function: Callable[[], T]) -> T:
    """Return the result of a function that may take minutes, run in a thread that the process may leave."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a request that is cancelled does not end what runs

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=ADMIN, daemon=True).start()
    return await asyncio.wrap_future(future)
