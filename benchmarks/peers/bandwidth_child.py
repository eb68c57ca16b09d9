"""Measure how fast two threads read the weights that a bundle maps: the limit of decoding at batch 1.

    peers/bandwidth_child.py WEIGHTS_BLOB

The same file, mapped in the same way (private, pages of 4 KB, page cache warm), read whole again and again
by two threads at once, each its half. It takes half a second, some 30 passes
over the weights of GPT-2, and runs before every process.
"""

from __future__ import annotations

import mmap
import statistics
import sys

import numpy as np

from benchmarks.harness import workload
from prejit.compiler.comparing.inspected_programs import read_rates

THREADS = 2


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    rates = read_rates(np.frombuffer(content, np.uint64, len(content) // 8), THREADS)
    workload.say_last(bytes_per_second=statistics.median(rates), best=max(rates), passes=len(rates))
