"""Measure how fast two threads read the weights that a bundle maps: the limit of decoding at batch 1.

    peers/bandwidth_child.py WEIGHTS_BLOB

The same file, mapped in the same way (private, pages of 4 KB, page cache warm), read whole again and again
by two threads at once, each its half. `bitwise_or` over 64-bit words is as fast as a loop that gcc vectorizes
(33 GB/s of CPU time on one core, AVX-512) and needs no compiler; NumPy releases the GIL in it.
"""

from __future__ import annotations

import mmap
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.harness import workload

THREADS = 2
SECONDS = 0.5
"""Time of the probe in seconds: some 30 passes over the weights of GPT-2. It runs before every process."""
LEAST_PASSES = 5


def read_rates(words: np.ndarray) -> list[float]:
    """Return the bytes per second of each pass over all words."""
    halves = np.array_split(words, THREADS)
    rates: list[float] = []
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(np.bitwise_or.reduce, halves))  # maps the pages and starts the threads
        end = time.perf_counter() + SECONDS
        while (started := time.perf_counter()) < end or len(rates) < LEAST_PASSES:
            list(pool.map(np.bitwise_or.reduce, halves))
            rates.append(words.nbytes / (time.perf_counter() - started))
    return rates


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    rates = read_rates(np.frombuffer(content, np.uint64, len(content) // 8))
    workload.say_last(bytes_per_second=statistics.median(rates), best=max(rates), passes=len(rates))
