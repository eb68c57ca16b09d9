"""Look for NaN and infinity in what programs return, and name the first program that has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.runtime.device.transfer import DeviceArray, is_whole, to_numpy
from prejit.runtime.errors import NumbersError
from prejit.runtime.programs.pytree import spell
from prejit.runtime.programs.watched_runs import watch

if TYPE_CHECKING:
    from prejit.runtime.device._jaxlib import Run
    from prejit.runtime.format.trees import Path
    from prejit.runtime.programs.ready_programs import Programs

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
