"""The split of a plan's lowering into units of work, and the number of processes that it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from prejit.compiler.pipeline.plan import PlannedProgram

Unit = tuple[PlannedProgram, ...]
"""Programs that one process lowers in a row. All are of one section."""

_PROCESS_SECONDS = 3.0
"""CPU time of lowering that makes another process worth its start, which takes 1.5 s."""
_SECONDS = {"call": 0.1, "copy": 0.1, "embed": 0.1, "pool": 0.1}
"""Estimated CPU time of lowering by kind of program: small ones."""
_MODEL_SECONDS = 1.0
"""Estimated CPU time of lowering any other program of a model."""
_LEAST, _MOST = 4, 16
"""Numbers of programs of code of the user in a unit: for each unit one of them is traced a second time."""


def process_count(programs: Sequence[PlannedProgram], limit: int) -> int:
    """Return how many processes lower programs; 0: the build's process does it as fast.

    Args:
        programs: those that have to be lowered.
        limit: largest number of processes.
    """
    if any(_is_of_python(each) for each in programs):
        return 0
    seconds = sum(_SECONDS.get(each.spec.kind, _MODEL_SECONDS) for each in programs)
    count = min(limit, int(seconds / _PROCESS_SECONDS), len(split(programs, limit)))
    return count if count > 1 else 0


def split(programs: Sequence[PlannedProgram], processes: int) -> list[Unit]:
    """Return units that processes lower in any order, so that no two do the same work.

    Programs of a published model are units of their own, because several builds lower each once. The user's
    code is imported and observed by section, and a section with many buckets is several units.

    Args:
        programs: those that have to be lowered.
        processes: number of processes.
    """
    units: list[Unit] = []
    size = min(_MOST, max(_LEAST, len(programs) // (4 * max(1, processes))))
    for traced, found in groupby(programs, key=_section):
        of_section = tuple(found)
        step = 1 if traced is None else size
        units += [of_section[at : at + step] for at in range(0, len(of_section), step)]
    return units


def _section(program: PlannedProgram) -> str | None:
    """Return the section of a program of the user's code; None: it is of a published model."""
    return None if program.trace is None else program.spec.section


def _is_of_python(program: PlannedProgram) -> bool:
    """Return whether a program is of an object of Python, which no other process has."""
    return program.key is None and program.trace is None
