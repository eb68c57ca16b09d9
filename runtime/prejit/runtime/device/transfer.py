"""Arrays between the host and devices: zeros that need no copy, values as NumPy arrays and as jax's."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import numpy as np

from prejit.runtime.device import _jaxlib
from prejit.runtime.errors import MismatchError

DeviceArray = Any
"""A `jaxlib._jax.ArrayImpl`, the class of jax's arrays. An array on our one CPU device has no jax sharding,
because it is made without jax's Python; `to_jax` makes an array that jax can use."""


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return zeros at a 64-byte boundary. A CPU device takes them without a copy."""
    size = dtype.itemsize * math.prod(shape)
    raw = np.zeros(size + 64, np.uint8)  # calloc: the system makes a page when it is first written
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


@functools.lru_cache(maxsize=4)
def shared_zeros(size: int) -> np.ndarray[Any, Any]:
    """Return zero bytes, read-only. Nobody writes to them, so they take one page of memory in all."""
    zeros = np.zeros(size, np.uint8)
    zeros.flags.writeable = False
    return zeros


def to_numpy(array: DeviceArray) -> np.ndarray[Any, Any]:
    """Return the array's values, once they are there; on a CPU a read-only view, not a copy.

    An array that a mesh has split is joined, which copies it.

    Raises:
        UsageError: a mesh of several processes has split it, and this process holds a part only.
    """
    if _jaxlib.is_on_cpu(array):
        # Python's buffers do not know the dtype, or it failed.
        with contextlib.suppress(BufferError):
            return np.asarray(memoryview(array))
    from prejit.runtime.device._jax_parts import read_array

    return read_array(array)


def is_whole(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype, which may be one of ml_dtypes, has whole numbers or booleans."""
    return dtype.kind in "biu" or dtype.name.startswith(("int", "uint"))


def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype for a name in `format.arrays.DTYPES`; bfloat16, int4 and others are ml_dtypes's.

    Raises:
        MismatchError: the installed ml_dtypes does not have it.
    """
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        if (scalar := getattr(ml_dtypes, name, None)) is None:
            raise MismatchError(
                f"expected a version of ml_dtypes that has {name}, found {ml_dtypes.__version__}",
                hint="pip install --upgrade ml_dtypes",
            ) from None
        dtype: np.dtype[Any] = np.dtype(scalar)
        return dtype
