"""Tests that do the same in several threads at once."""

import threading
from concurrent.futures import ThreadPoolExecutor


def in_threads(count, work):
    """Call a function in so many threads at once, each with its number; raise the first error of one."""
    together = threading.Barrier(count)

    def begin(number):
        together.wait(60)
        work(number)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(begin, range(count)))
