"""Shardings of arrays as JSON, and back; the error that says what a recording cannot keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = Any


class NotKeptError(Exception):
    """A call cannot run without a trace; the text says why."""


def sharding_json(sharding: Any) -> Json:
    """Return a sharding as JSON.

    Raises:
        NotKeptError: it is of a kind that is not kept.
    """
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    if type(sharding) is SingleDeviceSharding:
        (device,) = sharding.device_set
        return ["device", device.id, sharding.memory_kind]
    if type(sharding) is NamedSharding and type(sharding.mesh) is Mesh:
        mesh, spec = sharding.mesh, sharding.spec
        entries = entries_of(spec)
        plain = all(each is None or isinstance(each, (str, list)) for each in entries)
        if plain and PartitionSpec(*map(axes_of, entries)) == spec:
            ids = [device.id for device in mesh.devices.flat]
            types = [str(each) for each in mesh.axis_types]
            shape = list(mesh.devices.shape)
            return ["mesh", [*mesh.axis_names], shape, ids, types, entries, sharding.memory_kind]
    if type(sharding).__name__ == "GSPMDSharding" and sharding.is_fully_replicated:
        devices = [device.id for device in sharding._device_assignment]
        return ["everywhere", devices, sharding.memory_kind]
    raise NotKeptError(f"an array of it has the sharding {sharding}")


def entries_of(spec: Any) -> list[Any]:
    """Return a PartitionSpec as JSON; the mesh's axes that split one axis of an array are a list."""
    return [list(each) if isinstance(each, tuple) else each for each in spec]


def sharding_of(described: Json, devices: dict[int, Any]) -> Any:
    """Return the sharding on a device or a mesh that `sharding_json` described."""
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    if described[0] == "device":
        return SingleDeviceSharding(devices[described[1]], memory_kind=described[2])
    _, names, shape, ids, types, entries, memory = described
    grid = np.array([devices[id_] for id_ in ids], dtype=object).reshape(shape)
    mesh = Mesh(grid, tuple(names), axis_types=axis_types(types))
    return NamedSharding(mesh, PartitionSpec(*map(axes_of, entries)), memory_kind=memory)


def axes_of(entry: Any) -> Any:
    """Return what splits one axis of an array: None, a name or a tuple of names."""
    return tuple(entry) if isinstance(entry, list) else entry


def axis_types(texts: Sequence[str]) -> tuple[Any, ...]:
    """Return the types of a mesh's axes by their texts."""
    from jax.sharding import AxisType

    kinds = {str(each): each for each in AxisType}
    return tuple(kinds[each] for each in texts)
