"""The need of a compile job, from the last compile of the same program in the store."""

from __future__ import annotations

import math

from prejit.compiler.compile.jobs import Compiled, CompileJob
from prejit.compiler.compile.schedule import Need
from prejit.compiler.store.interface import Store
from prejit.runtime.errors import RejectError

_BASE_SECONDS, _SECONDS_A_BYTE = 0.1, 100e-6
_BASE_BYTES, _BYTES_A_BYTE = 300 << 20, 1000
"""Need of a program that was never compiled: a constant, and a part that grows with its StableHLO."""
_RESERVE = 1.25
"""Memory that is reserved for a job, in times of what it needed last."""
WORKER_BYTES = 200 << 20
"""Memory of a worker process and of what runs it, beside the job's own."""


def need_of(store: Store, job: CompileJob) -> Need:
    """Return what a job is expected to need.

    It is what the last compile of this name took, whatever its key; for a program without one, an estimate by
    the size of its StableHLO.
    """
    path = store.blob_path(job.source.program)
    guess = size_need(0 if path is None else path.stat().st_size)
    last = store.last_result(job.key.kind, job.key.name)
    try:
        known = None if last is None else Compiled.from_plain(last)
    except RejectError:  # another version of prejit wrote it, with other fields
        known = None
    if known is None:
        return guess
    milliseconds = max(known.milliseconds, 1)
    cores = max(1, math.floor(known.cpu_milliseconds / milliseconds + 0.5))
    memory = math.ceil(_RESERVE * known.peak_bytes) + WORKER_BYTES
    return Need(milliseconds / 1000, memory, cores)


def size_need(stablehlo_bytes: int) -> Need:
    """Return what a program that was never compiled is expected to need, by the size of its StableHLO."""
    memory = _BASE_BYTES + _BYTES_A_BYTE * stablehlo_bytes
    seconds = _BASE_SECONDS + _SECONDS_A_BYTE * stablehlo_bytes
    return Need(seconds, math.ceil(_RESERVE * memory) + WORKER_BYTES)
