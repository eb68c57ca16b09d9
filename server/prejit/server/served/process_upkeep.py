"""A server's process: its heap, open files, threads for what takes long, messages to whoever started it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prejit.runtime.base.process_memory import give_back
from prejit.runtime.ship.reference import without_login

_M_ARENA_MAX = -8
_ARENAS = 2
"""How many arenas of glibc serve all threads, as MALLOC_ARENA_MAX says it. The default is 8 for each core:
what one thread frees then does not serve the others, and after minutes of mixed requests half of the heap was
free."""
_PR_SET_THP_DISABLE = 41
_LIBRARY = ctypes.CDLL(None)


def use_few_arenas() -> None:
    """Let the threads that begin from now on share two arenas of glibc (mallopt(3)).

    A number in the environment is left as it is.
    """
    chosen = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(_LIBRARY, "mallopt", None)  # musl has none
    if mallopt is not None and not chosen:
        mallopt(_M_ARENA_MAX, _ARENAS)


def use_small_pages() -> None:
    """Keep the kernel from joining pages of this process into huge ones (prctl(2), as Redis does).

    A huge page is resident as a whole. NumPy asks for them wherever an array of 4 MB lies, and keeps them for
    what the heap holds there later: a server had 82 MB in them after 5 minutes of requests, 6 before.
    """
    prctl = getattr(_LIBRARY, "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def trim() -> None:
    """Free garbage, and give free memory back to the system. It takes milliseconds.

    Python looks for garbage that old only after many requests. glibc itself only gives back the end of an
    arena: a server kept 80 MB of 10,000 connections.
    """
    gc.collect()
    give_back()


def free_young() -> None:
    """Free garbage that is young, as that of a closed bundle is, and give its memory back to the system.

    No other thread runs Python while all objects are looked at: 0.1 s, in which tokens wait.
    """
    gc.collect(1)
    give_back()


_MAX_FILES = 65_536


def allow_many_connections() -> None:
    """Raise the soft limit of open files, whose default is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def say(text: str) -> None:
    """Print a text to stderr; forget it if its reader is gone or the disk is full."""
    try:
        print(without_login(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        # The text stays in Python's buffer, whose flush at the end would fail and change the exit status.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
    except OSError:
        pass


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
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():  # the request was cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as found:
            error = found
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name=ADMIN, daemon=True).start()
    return await future
