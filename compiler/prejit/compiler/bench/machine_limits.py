"""The limits of this machine that bound every program: how fast it reads memory and multiplies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

_BYTES = 512 << 20
"""Size of the array that is read: larger than the caches of most machines."""
_SIDE = 2048
"""Rows and columns of the matrices that are multiplied."""
_SECONDS, _LEAST_PASSES = 0.5, 5


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The most that the CPUs of this process can do together.

    Attributes:
        read_bytes_per_second: reading an array that no cache holds.
        flops_per_second: multiplying square matrices of float32 with XLA; an addition and a multiplication
            count as two.
    """

    read_bytes_per_second: float
    flops_per_second: float

    def best_of(self, other: MachineLimits) -> MachineLimits:
        """Return the better of two measurements."""
        return MachineLimits(
            max(self.read_bytes_per_second, other.read_bytes_per_second),
            max(self.flops_per_second, other.flops_per_second),
        )


def measure_limits() -> MachineLimits:
    """Measure the limits of this machine, in about two seconds: the best pass of each counts."""
    return MachineLimits(measure_reading(), 2 * _SIDE**3 * max(_product_rates()))


def measure_reading() -> float:
    """Return the bytes per second at which this process reads memory, in about a second."""
    words = np.ones(_BYTES // 8, np.uint64)
    return max(read_rates(words, len(os.sched_getaffinity(0))))


def read_rates(words: np.ndarray[Any, np.dtype[np.uint64]], threads: int) -> list[float]:
    """Return the bytes per second of each pass over all words, by so many threads at once.

    `bitwise_or` over 64-bit words is as fast as a loop that gcc vectorizes (33 GB/s of CPU time on one core,
    AVX-512) and needs no compiler; NumPy releases the GIL in it.
    """
    parts = np.array_split(words, threads)
    with ThreadPoolExecutor(threads) as pool:
        rates = _passes(lambda: list(pool.map(np.bitwise_or.reduce, parts)))
    return [words.nbytes * rate for rate in rates]


def _product_rates() -> list[float]:
    """Return the products of two matrices per second, of each product."""
    import jax

    one = np.ones((_SIDE, _SIDE), np.float32)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        multiply, placed = jax.jit(jax.numpy.matmul), jax.numpy.asarray(one)
        return _passes(lambda: multiply(placed, placed).block_until_ready())


def _passes(work: Callable[[], object]) -> list[float]:
    """Do the work again and again; return passes per second, a value for each but the first."""
    rates: list[float] = []
    work()  # maps pages, starts threads, compiles
    end = time.perf_counter() + _SECONDS
    while (started := time.perf_counter()) < end or len(rates) < _LEAST_PASSES:
        work()
        rates.append(1 / (time.perf_counter() - started))
    return rates
