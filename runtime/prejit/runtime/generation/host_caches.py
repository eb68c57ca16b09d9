"""Caches that lie in the memory of this process: the host copies rows of them, and wipes them.

A program would write all of a row, and so make pages for a whole context, of which a text fills a part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prejit.runtime.base.process_memory import zero
from prejit.runtime.device.transfer import DeviceArray, to_numpy
from prejit.runtime.generation.decoder_programs import DecoderPrograms


def copy_rows(
    decoder: DecoderPrograms,
    sources: Sequence[DeviceArray],
    targets: Sequence[DeviceArray],
    rows: Mapping[int, int],
    counts: Mapping[int, int] | None,
) -> list[DeviceArray]:
    """Write rows of a cache into another one, and return its arrays. Arguments as `KVCache.copy_rows`.

    The targets must belong to one cache alone, as those that programs take donated do.
    """
    made = []
    for array, source, target in zip(decoder.cache, sources, targets, strict=True):
        given, held = to_numpy(source), to_numpy(target)
        is_packed = _is_packed(target, held)
        written = held.copy() if is_packed else _writable(held)
        for row, taken in rows.items():
            region = [slice(size) for size in given.shape[1:]]
            if counts is not None and "context" in array.variables:
                region[array.variables.index("context") - 1] = slice(counts[row])
            written[row][tuple(region)] = given[taken][tuple(region)]
        made.append(decoder.device.copy(written) if is_packed else target)
    return made


def wipe(decoder: DecoderPrograms, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
    """Overwrite a cache that nothing uses with zeros, which take no memory, and return its arrays."""
    made = []
    for array in arrays:
        held = to_numpy(array)
        if is_packed := _is_packed(array, held):
            held = np.zeros_like(held)
        else:
            zero(held.ctypes.data, held.nbytes)
        made.append(decoder.device.copy(held) if is_packed else array)
    return made


def _is_packed(array: DeviceArray, held: np.ndarray[Any, Any]) -> bool:
    """Return whether the values are a copy, because two of them lie in a byte of the array: int4."""
    return bool(held.nbytes != array.on_device_size_in_bytes())


def _writable(held: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view of the same memory that may be written to; it does not keep the memory."""
    memory = (ctypes.c_uint8 * held.nbytes).from_address(held.ctypes.data)
    return np.frombuffer(memory, held.dtype).reshape(held.shape)
