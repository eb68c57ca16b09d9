"""Arrays between the host and devices: zeros that need no copy, values as NumPy arrays and as jax's."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from prejit.runtime.base.one_process import OneProcess
from prejit.runtime.device import _jaxlib
from prejit.runtime.errors import UsageError

DeviceArray = Any
"""A `jaxlib._jax.ArrayImpl`, the class of jax's arrays. An array on our one CPU device has no jax sharding,
because it is made without jax's Python; `to_jax` makes an array that jax can use."""

_PACKED = frozenset({"int2", "int4", "uint2", "uint4", "float4_e2m1fn"})
"""Dtypes of less than a byte. A device may hold several values in one byte; NumPy never does."""


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return zeros at a 64-byte boundary. A CPU device takes them without a copy."""
    size = dtype.itemsize * math.prod(shape)
    raw = np.zeros(size + 64, np.uint8)  # calloc: the system makes a page when it is first written
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class OnDevice(OneProcess):
    """A result that stays on the device, for another program of the same bundle. NumPy reads it too.

    Attributes:
        array: the array.
        dtype: its dtype.
        shape: the shape of the whole array.
        sharding: the mesh axis that splits each dimension, `""` for none; empty: no dimension is split.
        owner: the device that holds it.
    """

    array: DeviceArray
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    sharding: tuple[str, ...]
    owner: object

    @property
    def weak_type(self) -> bool:
        """Whether jax's type of it is weak."""
        return bool(self.array.aval.weak_type)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(to_numpy(self.array), dtype, copy=copy)


class _WeakArray(np.ndarray[Any, Any]):
    """A NumPy array that counts as weakly typed."""

    weak_type = True


def weakened(value: Any) -> Any:
    """Return a NumPy array as one that counts as weakly typed: requests and files hold no Python numbers."""
    return value.view(_WeakArray) if type(value) is np.ndarray else value


def is_number(value: Any) -> bool:
    """Return whether a value is a Python number, which jax takes as weakly typed.

    bool is a subclass of int, and some classes of NumPy's scalars are subclasses of Python's.
    """
    return isinstance(value, int | float | complex) and not isinstance(value, bool | np.generic)


def is_weak(value: Any) -> bool:
    """Return whether jax's type of an argument is weak."""
    return is_number(value) or bool(getattr(value, "weak_type", False))


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
        try:
            return np.asarray(memoryview(array))
        except BufferError:  # Python's buffers do not know the dtype, or the program failed
            array.block_until_ready()  # raises if the program failed
            if array.aval.dtype.name not in _PACKED:
                return _view(array)
            _jaxlib.uninterrupted(_jaxlib.import_jax)  # jaxlib unpacks with the help of jax
    elif not _jaxlib.is_whole(array):
        return _joined(array)
    elif len(shards := _jaxlib.local_shards(array)) > 1:
        array = shards[0]
    return _jaxlib.read(array)


def _joined(array: DeviceArray) -> np.ndarray[Any, Any]:
    """Return the values of an array that a mesh has split."""
    if not array.is_fully_addressable:
        held = len(_jaxlib.local_shards(array))
        raise UsageError(
            "expected an array that this process can read whole, found one that a mesh has split over "
            f"{_jaxlib.device_count(array)} devices, and only {held} of them belong to this process",
            hint="let the function return it whole, or call it in one process that has all devices",
        )
    whole: np.ndarray[Any, Any] = np.asarray(array)  # jax does it; a mesh has imported jax
    return whole


def _view(array: DeviceArray) -> np.ndarray[Any, Any]:
    """Return a view of an array on our one CPU device whose dtype Python's buffers do not know.

    NumPy refuses a DLPack capsule of such a dtype, so only the address is read from the capsule. jaxlib's
    other ways import jax in whichever thread reads first, which can deadlock with a host program that
    imports jax in another thread.
    """
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.argtypes, pointer_of.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    capsule = _jaxlib.dlpack_capsule(array)
    # A DLManagedTensor begins with the address of the data (dlpack.h).
    data = ctypes.c_void_p.from_address(pointer_of(capsule, b"dltensor")).value
    memory = (ctypes.c_uint8 * array.on_device_size_in_bytes()).from_address(data or 0)
    memory.array = array  # lives as long as the view
    view = np.frombuffer(memory, array.aval.dtype).reshape(array.aval.shape)
    view.flags.writeable = False
    return view


@dataclass(frozen=True, slots=True)
class _OnCpu:
    """An array on our CPU device, with DLPack's protocol."""

    array: DeviceArray

    def __dlpack__(self, **_: Any) -> Any:
        return _jaxlib.dlpack_capsule(self.array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU of dlpack.h


def is_jax_array(value: Any) -> bool:
    """Return whether a value is a jax.Array. Does not import jax to find out."""
    array_class = _jaxlib.imported_array_class()
    return array_class is not None and isinstance(value, array_class)


def is_tracer(value: Any) -> bool:
    """Return whether a value stands for an array while jax traces a function."""
    tracer = getattr(sys.modules.get("jax.core"), "Tracer", None)
    return tracer is not None and isinstance(value, tracer)


DELETED = "a call that donates an array deletes it: pass on what that call returned, or a copy"
"""The hint of errors about arrays whose memory is gone."""


def check_alive(name: str, value: Any) -> None:
    """Refuse an array of jax whose memory is gone.

    Raises:
        UsageError: it was deleted, or donated to a call.
    """
    if is_jax_array(value) and value.is_deleted():
        raise UsageError(
            f"{name}: expected an array, found {value.dtype}{list(value.shape)} that was deleted or donated",
            hint=DELETED,
        )


def to_jax(
    array: DeviceArray | np.ndarray[Any, Any], device: Any = None, *, committed: bool = False
) -> Any:
    """Return the array as one of the host program's jax client, which is another client than ours.

    Only arrays of NumPy, arrays that a mesh holds and dtypes that DLPack does not know are copied, and those
    that go to another device.

    Args:
        array: of a device, or of NumPy; one that is `weakened` becomes weakly typed.
        device: the device of jax where the result is; None: jax's default device.
        committed: whether it is committed to it.
    """
    import jax

    place = default_device() if device is None else device
    weak = is_weak(array) if isinstance(array, np.ndarray) else array.aval.weak_type
    with _jaxlib.guarding(False):
        if isinstance(array, np.ndarray):
            found = jax.device_put(np.asarray(array), place)
        elif array.dtype.kind == "V" or not (
            _jaxlib.is_on_cpu(array) or _jaxlib.device_count(array) == 1
        ):
            found = jax.device_put(to_numpy(array), place)
        else:
            found = jax.dlpack.from_dlpack(_OnCpu(array) if _jaxlib.is_on_cpu(array) else array)
            if found.sharding.device_set != {place}:
                found = jax.device_put(found, place)
    return _jaxlib.as_result(found, weak=weak, committed=committed)


def default_device() -> Any:
    """Return the device on which jax runs what is committed to none."""
    import jax

    device = jax.config.jax_default_device
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device
