"""Threads that the interpreter waits for at exit."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_thread(target: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a thread that the interpreter waits for at exit, and return it.

    By default a thread is a daemon if the thread that starts it is one. The interpreter stops daemons at exit
    wherever they are, and inside XLA that aborts the process.

    Args:
        target: what the thread runs.
        name: of the thread.

    Returns:
        None if no thread can start: there are too many, or the interpreter is exiting.
    """
    if not threading.main_thread().is_alive():
        return None
    thread = threading.Thread(target=target, name=name, daemon=False)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
