"""Runs of loaded programs that somebody watches, checks for NaN and infinity, or measures.

Nothing of it is on the way of a run while nobody does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from prejit.runtime.device.device import Executable
from prejit.runtime.device.transfer import DeviceArray, aligned_zeros, dtype_of, is_whole, to_numpy
from prejit.runtime.errors import NumbersError
from prejit.runtime.programs.golden_inputs import Values, golden_inputs
from prejit.runtime.programs.pytree import spell

if TYPE_CHECKING:
    from prejit.runtime.device._jaxlib import Run
    from prejit.runtime.format.trees import Path
    from prejit.runtime.programs.ready_programs import Programs

Wrap = Callable[[str, "Run"], "Run"]
"""Returns what runs in place of a program, from the program's name and its own run."""


def watch(programs: Programs, wrap: Wrap | None) -> Wrap | None:
    """Let programs run through what `wrap` returns; None: as they are again. Return the one before.

    Calls that jaxlib dispatches by itself (`dispatched_calls`) do not come by.
    """
    ready = programs._ready
    before, plain = (ready.wrap, ready.plain) if isinstance(ready, _Watched) else (None, ready)
    programs._ready = dict(plain) if wrap is None else _Watched(wrap, plain)
    return before


@final
class _Watched(dict[str, Executable]):
    """Ready programs that run through `wrap`, also those that become ready later."""

    def __init__(self, wrap: Wrap, plain: dict[str, Executable]) -> None:
        super().__init__()
        self.wrap = wrap
        self.plain: dict[str, Executable] = {}
        for name, executable in list(plain.items()):
            self[name] = executable

    def __setitem__(self, name: str, executable: Executable) -> None:
        self.plain[name] = executable
        super().__setitem__(name, executable._replace(run=self.wrap(name, executable.run)))

    def popitem(self) -> tuple[str, Executable]:
        name, _ = super().popitem()
        return name, self.plain.pop(name)


_LOGARITHMS = ("logprobs", "top_logprobs")
"""Results of decode programs that are minus infinity for tokens that cannot come."""


def check_finite(
    programs: Programs, report: Callable[[str, NumbersError], object] | None = None
) -> None:
    """Look at the results of every run of a program from now on. It waits for each run.

    A run raises NumbersError at the first NaN or infinity, or gives it to `report` and goes on.
    """
    runs = 0

    def wrap(name: str, run: Run) -> Run:
        paths = [array.path for array in programs.results(name)]

        def checked(arguments: Sequence[DeviceArray]) -> list[DeviceArray]:
            nonlocal runs
            results = run(arguments)
            runs += 1
            where = f"{programs.bundle}: {name}, run {runs} of all programs"
            try:
                for path, result in zip(paths, results, strict=False):
                    refuse_odd(where, path, result)
            except NumbersError as error:
                if report is None:
                    raise
                report(name, error)
            return results

        return checked

    watch(programs, wrap)


def refuse_odd(where: str, path: Path, result: DeviceArray | np.ndarray[Any, Any]) -> None:
    """Look at one result of a program. `where` names the program, for the error.

    Raises:
        NumbersError: it has a NaN or an infinity; the error has the index of the first one.
    """
    value = result if isinstance(result, np.ndarray) else to_numpy(result)
    if is_whole(value.dtype):
        return
    wide = value if value.dtype.kind in "fc" else value.astype(np.float32)  # as bfloat16
    odd = np.isnan(wide) if path and path[0] in _LOGARITHMS else ~np.isfinite(wide)
    if not odd.any():
        return
    index = tuple(int(place) for place in np.unravel_index(int(odd.argmax()), odd.shape))
    at = f"{spell(path)}[{', '.join(map(str, index))}]" if index else spell(path)
    raise NumbersError(
        f"{where}: expected numbers, found {wide[index]} at {at}, the first of {int(odd.sum())} in it",
        hint="programs before it returned numbers: look at this one's arguments and weights; "
        "`prejit inspect --hlo` shows what it computes, and `prejit verify --run` its golden answer",
    )


_SEED = 1
"""The seed of the arguments."""


def timed_runner(programs: Programs, name: str) -> Callable[[], float]:
    """Return a function that runs a program on the arguments of a golden answer, and returns the seconds."""
    model = programs.config.decoder or programs.config.encoder
    vocabulary = 0 if model is None else model.vocab_size
    values = golden_inputs(programs.table[name], programs.arguments(name), vocabulary, _SEED)
    run = _runner(programs, name, [*values])
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
