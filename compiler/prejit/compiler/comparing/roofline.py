"""The cost of each program, and how near its speed comes to the limits of this machine: a roofline.

The limits are how fast the machine reads memory and multiplies. Williams, Waterman and Patterson, "Roofline:
an insightful visual performance model" (CACM 2009): a program takes at least the longer of the time to move
its bytes and the time to do its arithmetic.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from prejit.compiler.comparing.difference import ReadBundle, ReadTarget
from prejit.compiler.compile.stablehlo_contents import count_flops
from prejit.runtime.bundle import Bundle
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.names import PORTABLE_MEDIA_TYPE

_LEAST_RUNS, _PROGRAM_SECONDS = 3, 0.2


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """The cost of one run of a program.

    Attributes:
        program: its name.
        flops: floating-point operations of its portable program, by XLA's count: native kernels and fusions
            hide none of them. A loop counts as one turn.
        moved_bytes: bytes of its arguments, weights included, and of its results. A cache that it changes in
            place counts once. It moves at least these, unless it reads some rows of a table alone.
        temp_bytes: peak of the memory beside them.
    """

    program: str
    flops: float
    moved_bytes: int
    temp_bytes: int

    @property
    def flops_per_byte(self) -> float:
        """The arithmetic intensity."""
        return self.flops / max(1, self.moved_bytes)


@dataclass(frozen=True, slots=True)
class RooflineRow:
    """A program beside the limits of a machine.

    Attributes:
        cost: of one run.
        seconds: least time of a run.
        bound: `memory` or `arithmetic`: which limit is the nearer one.
        share: the least time that the limits allow, as a share of `seconds`. More than 1: the caches held
            what it read, or it multiplies numbers narrower than float32.
    """

    cost: ProgramCost
    seconds: float
    bound: str
    share: float

    @classmethod
    def of(cls, cost: ProgramCost, seconds: float, limits: MachineLimits) -> RooflineRow:
        """Compare a run with the limits."""
        moving = cost.moved_bytes / limits.read_bytes_per_second
        computing = cost.flops / limits.flops_per_second
        bound = "memory" if moving >= computing else "arithmetic"
        return cls(cost, seconds, bound, max(moving, computing) / seconds)


def costs(bundle: ReadBundle, target: ReadTarget) -> list[ProgramCost]:
    """Return the cost of each program of a target."""
    platform = target.requirement.platform
    known: dict[str, float] = {}

    def flops(entry: ProgramEntry) -> float:
        digest = entry.portable.raw_digest
        if digest not in known:
            content = bundle.frame(target, PORTABLE_MEDIA_TYPE, entry.portable)
            known[digest] = count_flops(content, entry.platforms or (), platform)
        return known[digest]

    return [
        ProgramCost(
            entry.name,
            flops(entry),
            entry.memory.argument_bytes + entry.memory.output_bytes - entry.memory.alias_bytes,
            entry.memory.temp_bytes,
        )
        for entry in target.contents.config.programs
    ]


def run_times(
    bundle: Bundle, programs: Sequence[str], say: Callable[[str], None]
) -> dict[str, float]:
    """Run programs on the arguments of their golden answers; return the least seconds of a run, by name."""
    least = {}
    for place, name in enumerate(programs, 1):
        say(f"running program {place} of {len(programs)}: {name}")
        run = bundle.timed_runner(name)
        run()  # the first run builds what XLA makes lazily
        times = [run() for _ in range(_LEAST_RUNS)]
        while sum(times) < _PROGRAM_SECONDS:
            times.append(run())
        least[name] = min(times)
    return least


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
