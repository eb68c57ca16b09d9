"""Make results of the kind that a caller uses, where `jax.jit` would leave them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from prejit.runtime.device.jax_arrays import default_device, is_jax_array, to_jax
from prejit.runtime.device.transfer import to_numpy
from prejit.runtime.errors import UsageError
from prejit.runtime.format.arrays import Array
from prejit.runtime.programs.pytree import spell

Convert = Callable[[Any], Any]
"""Makes a result for a caller from an array of the device or of NumPy."""


def converter(arrays: Sequence[Array], given: Sequence[Any]) -> Convert:
    """Return what makes results: jax.Arrays where the arguments lie if one of them is, else NumPy arrays.

    Raises:
        UsageError: only jax's compiler knows where results of these arguments would lie.
    """
    of_jax = {
        spell(array.path): value
        for array, value in zip(arrays, given, strict=True)
        if is_jax_array(value) or is_random_key(value)
    }
    if not of_jax:
        return to_numpy
    places: dict[Any, str] = {}
    for at, value in of_jax.items():
        device = _device_of(at, value)
        if value.committed:
            places.setdefault(device, at)
    if len(places) > 1:
        found = ", ".join(f"{at} on {device}" for device, at in places.items())
        raise UsageError(
            f"expected arrays of jax that are committed to one device, found {found}",
            hint="put them on one device: `jax.device_put(array, device)`",
        )
    device = next(iter(places), None)
    # The default is that of this call: results may be made later, in another thread.
    return partial(to_jax, device=device or default_device(), committed=device is not None)


def is_random_key(value: Any) -> bool:
    """Return whether a value is a random key of jax. Does not import jax to find out."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):  # the usual case; to spell one takes 3 us
        return False
    return str(dtype).startswith("key<")


def _device_of(at: str, value: Any) -> Any:
    """Return the device that has an array of jax."""
    import jax

    sharding = value.sharding
    if not isinstance(sharding, jax.sharding.SingleDeviceSharding):
        raise UsageError(
            f"{at}: expected an array on one device, found it over {sharding}",
            hint="pass `numpy.asarray(array)`, or put it on one device: `jax.device_put(array, device)`; "
            "`prejit.runtime.jit` takes arrays that are split as the bundle's mesh",
        )
    (device,) = sharding.device_set
    if sharding.memory_kind not in (None, own := device.default_memory().kind):
        raise UsageError(
            f"{at}: expected an array in the memory {own} of its device, found it in {sharding.memory_kind}",
            hint="pass `numpy.asarray(array)`, or put it there: `jax.device_put(array, device)`",
        )
    return device
