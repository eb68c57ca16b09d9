"""Describe jax's executables, for `load_executable` of the runtime's hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prejit.runtime.recorded.hook.jax_calls import Json, aval_of
from prejit.runtime.recorded.hook.kept_shardings import NotKeptError, entries_of, sharding_json


def executable_json(executable: Any) -> Json:
    """Return a MeshExecutable without its code, as JSON.

    Raises:
        NotKeptError: it has parts that another process cannot have.
    """
    import jax

    if executable is None or getattr(executable, "_unloaded_executable", None) is None:
        raise NotKeptError("jax kept no executable of it")
    found = executable._unloaded_executable
    if found.host_callbacks or found.keepalive:
        raise NotKeptError("it calls Python")
    if found.unordered_effects or found.ordered_effects:
        raise NotKeptError("it has effects")
    if found.mut is not None and (found.mut.in_mut or found.mut.out_mut):
        raise NotKeptError("it changes a reference of jax")
    if jax.process_count() > 1:
        raise NotKeptError("it runs in several processes")
    return {
        "name": found.name,
        "platform": found.backend.platform,
        "devices": [device.id for device in found.device_list],
        "inputs": [_aval_json(aval) for aval in found.input_avals],
        "input_shardings": [sharding_json(each) for each in found.input_shardings],
        "outputs": [_aval_json(aval) for aval in found.output_avals],
        "output_shardings": [sharding_json(each) for each in found.output_shardings],
        "committed": bool(found.committed),
        "kept": sorted(found.kept_var_idx),
        "plain_layouts": _no_layouts(found.dispatch_in_layouts),
    }


def _no_layouts(layouts: Sequence[Any]) -> bool:
    if any(each is not None for each in layouts):
        raise NotKeptError("it was given layouts of arguments")
    return True


def _aval_json(aval: Any) -> Json:
    import jax

    if type(aval) is not jax.core.ShapedArray:
        raise NotKeptError(f"it takes or returns a {type(aval).__name__}")
    mesh = aval.sharding.mesh
    on_mesh = [] if mesh.empty else [[*_abstract_mesh_json(mesh), entries_of(aval.sharding.spec)]]
    implementation = getattr(aval.dtype, "_impl", None)
    if implementation is not None:
        described = [implementation.name, list(aval.shape), "key", *on_mesh]
    elif hasattr(aval.dtype, "_rules"):
        raise NotKeptError(f"it takes or returns {aval}")
    else:
        kind = "weak" if aval.weak_type else ""
        described = [aval.dtype.name, list(aval.shape), kind, *on_mesh]
    made = aval_of(described)
    if made != aval or str(made) != str(aval):
        raise NotKeptError(f"it takes or returns {aval}")
    return described


def _abstract_mesh_json(mesh: Any) -> Json:
    device = mesh.abstract_device
    return [
        list(mesh.axis_names),
        list(mesh.axis_sizes),
        [str(each) for each in mesh.axis_types],
        None if device is None else [device.device_kind, device.num_cores, device.platform],
    ]
