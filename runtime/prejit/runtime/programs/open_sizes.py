"""Programs for sizes that no bucket has, made from a program with symbolic sizes in the bundle."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from prejit.runtime.base import arguments
from prejit.runtime.base.files import digest_of
from prejit.runtime.device import portable as portable_programs
from prejit.runtime.errors import FallbackWarning
from prejit.runtime.fallback_reporting import count_axis
from prejit.runtime.format.bundle_schema import ProgramEntry, Segment

if TYPE_CHECKING:
    from prejit.runtime.programs.ready_programs import Programs

_log = logging.getLogger(__name__)

SIZE_AXIS = "bucket"
"""The name in `fallback_counts` of a program that is compiled because no bucket has its sizes."""


def specialize(programs: Programs, program: ProgramEntry, sizes: Mapping[str, int]) -> ProgramEntry:
    """Return a program of the user for sizes that no bucket has, and say that it is compiled here.

    `program` is a bucket whose manifest leaves these sizes open.

    Raises:
        RejectError: the program with symbolic sizes is damaged.
        BuildError: it does not work for these sizes.
    """
    assert program.symbolic is not None
    symbolic, platform = programs._portable.unpack(program.symbolic), programs.device.platform
    arguments = [
        replace(each, shape=each.shape_at(sizes)) for each in programs.arguments(program.name)
    ]
    weights = programs._weight_arguments(program.weights)
    shapes = [array.shape for array in (*weights, *arguments)]
    portable, found = portable_programs.specialize(
        symbolic, program.platforms or (), platform, shapes
    )
    gives = programs.results(program.name)
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
    with programs._lock:
        if entry.name not in programs.table:
            programs._specialized[entry.name] = portable
            programs._locks[entry.name] = threading.Lock()
            programs.table[entry.name] = entry
            count_open_size(programs.bundle, entry.name)
            _log.info("%s: %s: no bucket has these sizes", programs.bundle, entry.name)
    return entry


def count_open_size(bundle: str, name: str) -> None:
    """Warn that a program is compiled here because no bucket has its sizes, and count it."""
    count_axis(SIZE_AXIS)
    warnings.warn(
        f"{bundle}: no bucket has the sizes of {name}, so it is compiled here, once; add them to the "
        "manifest's buckets to compile it ahead of time",
        FallbackWarning,
        stacklevel=arguments.callers_level(),
    )
