"""Arrays of jax beside those of our one CPU device: what callers give and get, and the slow ways to read."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from prejit.runtime.base.threads_and_forks import OneProcess
from prejit.runtime.device import _jax_parts, _jaxlib
from prejit.runtime.device.transfer import DeviceArray, to_numpy
from prejit.runtime.errors import UsageError


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
        """True if jax's type of the array is weak."""
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


@dataclass(frozen=True, slots=True)
class _OnCpu:
    """An array on our CPU device, with DLPack's protocol."""

    array: DeviceArray

    def __dlpack__(self, **_: Any) -> Any:
        return _jax_parts.dlpack_capsule(self.array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU of dlpack.h


def is_jax_array(value: Any) -> bool:
    """Return whether a value is a jax.Array. Does not import jax to find out."""
    array_class = _jax_parts.imported_array_class()
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


def misplaced(array: Any, device: Any) -> str:
    """Return why an array of jax is not on a device of jax as jax lays it out; empty: it is."""
    import jax

    sharding, kind = array.sharding, device.default_memory().kind
    is_on_one = isinstance(sharding, jax.sharding.SingleDeviceSharding)
    if not is_on_one or sharding.device_set != {device}:
        return f"expected it on {device}, found {sharding}"
    if sharding.memory_kind not in (None, kind):
        return f"expected it in the memory {kind}, found {sharding.memory_kind}"
    layout = array.format.layout
    if layout is not None and layout.major_to_minor != tuple(range(array.ndim)):
        return f"expected jax's own layout, found {layout}"
    return ""


def is_key(shape: Any) -> bool:
    """Return whether an array, or the shape of one, is of random keys (jax.random.key)."""
    import jax
    import jax.numpy as jnp

    return bool(jnp.issubdtype(shape.dtype, jax.dtypes.prng_key))


def data_shape(shape: Any) -> Any:
    """Return the shape that a program takes for an argument: that of the data of random keys."""
    import jax

    return jax.eval_shape(jax.random.key_data, shape) if is_key(shape) else shape


def key_name(shape: Any) -> str:
    """Return the name of the implementation of random keys: `threefry2x32`."""
    import jax

    names: list[str] = []
    jax.eval_shape(lambda key: names.append(str(jax.random.key_impl(key))), shape)
    return names[0]


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
            _jaxlib.is_on_cpu(array) or _jax_parts.device_count(array) == 1
        ):
            found = jax.device_put(to_numpy(array), place)
        elif _jaxlib.is_on_cpu(array) and _is_first_cpu(place) and array.dtype.itemsize < 8:
            found = _jax_parts.from_our_cpu(array, place)
        else:
            found = jax.dlpack.from_dlpack(_OnCpu(array) if _jaxlib.is_on_cpu(array) else array)
            if found.sharding.device_set != {place}:
                found = jax.device_put(found, place)
    return _jax_parts.as_result(found, weak=weak, committed=committed)


def _is_first_cpu(device: Any) -> bool:
    return bool(device.platform == "cpu" and device.local_hardware_id == 0)


def default_device() -> Any:
    """Return the device on which jax runs what is committed to none."""
    import jax

    device = jax.config.jax_default_device
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device
