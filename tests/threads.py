"""Tests that do the same in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call a function in so many threads at once, each with its number; raise the first error of one."""
    together = threading.Barrier(count)

    def begin(number: int) -> None:
        together.wait(60)
        work(number)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(begin, range(count)))
