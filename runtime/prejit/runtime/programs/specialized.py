"""Programs of the user for sizes that no bucket has, from a program with symbolic sizes in the bundle."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from prejit.runtime.base.files import digest_of
from prejit.runtime.device.portable import specialize
from prejit.runtime.errors import FallbackWarning
from prejit.runtime.fallback import count_axis
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry, Segment

SIZE_AXIS = "bucket"
"""What `fallback_counts` calls a program that is compiled because no bucket has its sizes."""


def specialized(
    program: ProgramEntry,
    symbolic: bytes,
    sizes: Mapping[str, int],
    weights: Sequence[Array],
    takes: Sequence[Array],
    gives: Sequence[Array],
    platform: str,
) -> tuple[ProgramEntry, bytes]:
    """Return the row of the program table and the StableHLO of a program for the sizes of a call.

    `symbolic` is StableHLO of the same program for any size; `takes` are the arguments without the weights.

    Raises:
        BuildError: the program does not work for these sizes.
    """
    arguments = [replace(array, shape=_resized(array, sizes)) for array in takes]
    shapes = [array.shape for array in (*weights, *arguments)]
    portable, found = specialize(symbolic, program.platforms or (), platform, shapes)
    results = [replace(array, shape=shape) for array, shape in zip(gives, found, strict=True)]
    bucket = {**program.bucket, **sizes}
    section, _, rest = program.name.partition("/")
    old = "-".join(f"{name}{size}" for name, size in program.bucket.items())
    new = "-".join(f"{name}{size}" for name, size in bucket.items())
    entry = replace(
        program,
        name=f"{section}/{new}{rest.removeprefix(old)}",
        bucket=bucket,
        arguments=tuple(map(str, arguments)),
        results=tuple(map(str, results)),
        portable=Segment(0, 0, "", len(portable), digest_of(portable)),
        platforms=(platform,),
    )
    return entry, portable


def count_open_size(bundle: str, name: str) -> None:
    """Warn that a program is compiled here because no bucket has its sizes, and count it."""
    count_axis(SIZE_AXIS)
    warnings.warn(
        f"{bundle}: no bucket has the sizes of {name}, so it is compiled here, once; add them to the "
        "manifest's buckets to compile it ahead of time",
        FallbackWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """Return the stack level, as the function that calls this one sees it, of the code that called prejit."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("prejit."):
        level, frame = level + 1, frame.f_back
    return level


def _resized(array: Array, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if not array.variables:
        return array.shape
    return tuple(
        sizes.get(name, extent) for name, extent in zip(array.variables, array.shape, strict=True)
    )
