"""Tests that do the same in several threads at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call a function in so many threads, each with its number; raise the first error of one."""
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))
