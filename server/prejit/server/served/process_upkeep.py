"""A server's process: its heap, its open files, and messages to the person who started it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys

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
