"""Caches that lie in the memory of this process: the host copies rows of them, and wipes them.

A text fills a part of its row. A program that copies it writes the whole row, so all of it takes memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prejit.runtime.base.process_memory import zero
from prejit.runtime.device.transfer import DeviceArray, to_numpy
from prejit.runtime.format.arrays import Array


def copy_rows(
    layout: Sequence[Array],
    sources: Sequence[DeviceArray],
    targets: Sequence[DeviceArray],
    rows: Mapping[int, int],
    counts: Mapping[int, int] | None,
) -> None:
    """Write rows of a cache into another one. Arguments as `KVCache.copy_rows`, and the arrays of both.

    The targets must belong to one cache alone, as those that programs take donated do.
    """
    for array, source, target in zip(layout, sources, targets, strict=True):
        given, held = to_numpy(source), to_numpy(target)
        written = _writable(held)
        for row, taken in rows.items():
            region: list[Any] = [slice(size) for size in given.shape[1:]]
            if counts is not None and "context" in array.variables:
                region[array.variables.index("context") - 1] = slice(counts[row])
            written[row, *region] = given[taken, *region]


def wipe(arrays: Sequence[DeviceArray]) -> None:
    """Overwrite a cache that nothing uses with zeros, which take no memory."""
    for array in arrays:
        held = to_numpy(array)
        zero(held.ctypes.data, held.nbytes)


def _writable(held: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view of the same memory that may be written to; it does not keep the memory."""
    memory = (ctypes.c_uint8 * held.nbytes).from_address(held.ctypes.data)
    return np.frombuffer(memory, held.dtype).reshape(held.shape)
