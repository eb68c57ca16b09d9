"""Finalizers that take no lock: another thread does the work.

The garbage collector runs a finalizer in any thread, between any two lines of it: also in one that holds the
lock that the finalizer wants, or that goes through the collection that the finalizer changes.
"""

from __future__ import annotations

import atexit
import threading
import traceback
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
"""The calls of finalizers; None ends the thread. Its `put` is made for finalizers: it takes no lock that
its own thread may hold."""
_starting = threading.Lock()
_thread: threading.Thread | None = None


def when_dropped(owner: object, call: Callable[[], object]) -> weakref.finalize[..., object]:
    """Call something, in a thread of its own, after nobody refers to an object any more.

    At exit it is not called for objects that are still there, nor after `detach` of what is returned.

    Args:
        owner: the object.
        call: must not refer to it.
    """
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():  # a forked process has none
            _thread = threading.Thread(target=_work, name="prejit finalizers", daemon=True)
            _thread.start()
            # What it drops frees arrays of XLA. The interpreter stops daemons wherever they are, and there
            # that aborts the process.
            atexit.register(_end, _thread)
    finalizer = weakref.finalize(owner, _calls.put, call)
    finalizer.atexit = False
    return finalizer


def _work() -> None:
    while (call := _calls.get()) is not None:
        try:
            call()
        except Exception:  # as finalizers do: nobody is there to catch it
            traceback.print_exc()
        del call  # it would stay alive until the next one comes


def _end(thread: threading.Thread) -> None:
    _calls.put(None)
    thread.join()
