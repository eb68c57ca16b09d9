"""Run one program again and again on the same arguments, for those who measure it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prejit.runtime.device.transfer import aligned_zeros, dtype_of, to_numpy
from prejit.runtime.programs.golden_inputs import Values, golden_inputs

if TYPE_CHECKING:
    from prejit.runtime.programs.ready_programs import Programs

_SEED = 1
"""The seed of the arguments."""


def timed_runner(programs: Programs, name: str) -> Callable[[], float]:
    """Return a function that runs a program on the arguments of a golden answer, and returns the seconds."""
    model = programs.config.decoder or programs.config.encoder
    vocabulary = 0 if model is None else model.vocab_size
    values = golden_inputs(programs.table[name], programs.arguments(name), vocabulary, _SEED)
    run = _runner(programs, name, values)
    return lambda: run()[0]


def runner_with_zeros(programs: Programs, name: str) -> Callable[[], Values]:
    """Return a function that runs a program on zeros, waits for it, and returns its first result."""
    arguments = programs.arguments(name)
    zeros = [aligned_zeros(array.shape, dtype_of(array.dtype)) for array in arguments]
    run = _runner(programs, name, zeros)
    return lambda: run()[1]


def _runner(
    programs: Programs, name: str, values: Sequence[Values]
) -> Callable[[], tuple[float, Values]]:
    """Return a function that runs a program, and returns seconds and its first result.

    Arguments that it donates are placed anew for each run, which is not counted.
    """
    device, arguments = programs.device, programs.arguments(name)
    executable, weights = programs[name], programs.weights(programs.table[name].weights)
    pairs = [*zip(arguments, values, strict=True)]
    kept = [None if array.donated else device.put(value, array.sharding) for array, value in pairs]

    def run() -> tuple[float, Values]:
        given = [
            device.copy(value, array.sharding) if placed is None else placed
            for (array, value), placed in zip(pairs, kept, strict=True)
        ]
        started = time.perf_counter()
        first = to_numpy(executable.run([*weights, *given])[0])
        return time.perf_counter() - started, first

    return run
