"""Private parts of jax, and those of jaxlib that a start on one CPU device does not need. See `_jaxlib`.

jax is imported inside the function that needs it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import io
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from prejit.runtime.base import process_facts
from prejit.runtime.base.process_memory import give_back
from prejit.runtime.device._jaxlib import (
    Avals,
    JaxlibArray,
    Run,
    import_jaxlib,
    importing,
    is_on_cpu,
    new_cpu_client,
    result_handler,
)
from prejit.runtime.errors import UsageError
from prejit.runtime.format.arrays import PACKED


def import_jax() -> None:
    """Import jax. Its modules import each other in circles, so `jax/__init__` must come first."""
    with importing:
        import jax  # noqa: F401


def uninterrupted(work: Callable[[], None]) -> None:
    """Run a function in a thread if this is the main thread, so that ctrl-C does not stop it half-way.

    A native module whose import was interrupted cannot be imported again.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="prejit-first-array")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def topology_of(devices: Sequence[Any]) -> bytes:
    """Return XLA's serialized description of devices: a PjRtTopologyDescriptionProto."""
    return bytes(import_jaxlib()[1].get_topology_for_devices(devices).serialize())


def compiles_for_topology() -> bool:
    """Return whether this jaxlib compiles for a serialized topology (0.11 and later)."""
    return hasattr(import_jaxlib()[1].DeviceTopology, "deserialize")


def single_sharding(device: Any) -> Any:
    """Return jax's sharding of arrays on one device."""
    with importing:
        with process_facts.importing():
            import jax  # noqa: F401
            from jax._src import sharding_impls

        return sharding_impls.SingleDeviceSharding(device)


def mesh_sharding(
    grid: np.ndarray[Any, Any], axis_names: Sequence[str], split: Sequence[str]
) -> Any:
    """Return jax's sharding of arrays over a mesh.

    `grid` holds the devices; `split` names for each dimension of an array the axis that splits it, `a+b` for
    two, or `""`.
    """
    with importing:
        with process_facts.importing():
            import jax  # noqa: F401
            from jax._src import mesh, partition_spec, sharding_impls

        dimensions = (tuple(axis.split("+")) if "+" in axis else axis or None for axis in split)
        spec = partition_spec.PartitionSpec(*dimensions)
        return sharding_impls.NamedSharding(mesh.Mesh(grid, axis_names), spec)


def put_with_jax(
    shape: tuple[int, ...], dtype: Any, sharding: Any, shards: list[Any], devices: list[Any]
) -> JaxlibArray:
    """Return an array made of its shards, one for each device of this process."""
    _, _jax = import_jaxlib()
    enable_x64, shaped_array = _jax_types()
    with enable_x64(True):  # or 64-bit values become 32-bit ones
        return _jax.batched_device_put(shaped_array(shape, dtype), sharding, shards, devices)


def as_result(array: JaxlibArray, *, weak: bool, committed: bool) -> JaxlibArray:
    """Return an array of jax on one device with the type and place of a result, in the same memory."""
    if array._committed == committed and array.aval.weak_type == weak:
        return array
    _, _jax = import_jaxlib()
    aval = _aval_of_jax(array.shape, array.dtype, weak)
    return _jax.ArrayImpl(aval, array.sharding, [array], committed=committed, _skip_checks=True)


@functools.lru_cache(1024)
def _aval_of_jax(shape: tuple[int, ...], dtype: Any, weak: bool) -> Any:
    """Return jax's type of an array. jax takes longer to make one than to make the array."""
    return _jax_types()[1](shape, dtype, weak_type=weak)


def mesh_runner(loaded: Any, avals: Avals, shardings: Sequence[Any]) -> Run:
    """Return a function that runs an executable on a mesh, whose results have these types."""
    _, _jax = import_jaxlib()
    _, shaped_array = _jax_types()
    outputs = [
        (shaped_array(*aval), sharding) for aval, sharding in zip(avals, shardings, strict=True)
    ]

    def run(arguments: Sequence[JaxlibArray]) -> list[JaxlibArray]:
        shards = loaded.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [
            _jax.ArrayImpl(aval, sharding, arrays, committed=True, _skip_checks=True)
            for (aval, sharding), arrays in zip(outputs, shards, strict=True)
        ]

    return run


@functools.cache
def _jax_types() -> tuple[Any, Any]:
    with importing:
        import jax  # noqa: F401
        from jax._src import config, core

        return config.enable_x64, core.ShapedArray


_UNKEYED = ("jax_default_prng_impl", "jax_enable_custom_prng", "jax_legacy_prng_key")
"""Settings that traces depend on, although jax does not key them by these."""


def trace_context() -> tuple[Any, Any, bool] | None:
    """Return jax's settings of this thread, to be compared; None: the process has not imported jax.

    They are jax's key of traces, the kind of random keys, and whether it looks for NaNs or infinities.
    """
    config: Any = sys.modules.get("jax._src.config")
    try:
        looks_for_nans = config.debug_nans.value or config.debug_infs.value
        return config.trace_context(), config.default_prng_impl.value, looks_for_nans
    except AttributeError:  # not imported, or another thread is importing it just now
        return None


def trace_settings() -> dict[str, Any]:
    """Return the settings that traces of this thread depend on, by name; jax must be imported.

    Several contexts of the user are `user_context`, `user_context 2` and so on.
    """
    from jax._src import config

    found: dict[str, Any] = {}
    for name, value in zip(config.trace_context_names(), config.trace_context(), strict=True):
        same = sum(each.partition(" ")[0] == name for each in found)
        found[f"{name} {same + 1}" if same else name] = value
    values = config.config.values
    return found | {name: values[name] for name in _UNKEYED}


def looks_for_nans() -> bool:
    """Return whether jax_debug_nans or jax_debug_infs is on in this thread."""
    context = trace_context()
    return context is not None and context[2]


def is_tracing() -> bool:
    """Return whether jax traces a function in this thread, so that nothing may run now."""
    from jax._src import core

    return not core.trace_state_clean()


def runner_for_jax(loaded: Any, avals: Avals, device: Any, committed: bool) -> Run:
    """Return a function that runs an executable on one device of jax's client, whose results are jax's.

    `committed`: whether they are committed to the device.
    """
    sharding = single_sharding(device)
    _, shaped_array = _jax_types()
    handlers = [result_handler(shaped_array(*aval), sharding, committed) for aval in avals]

    def run(arguments: Sequence[JaxlibArray]) -> list[JaxlibArray]:
        arrays: list[JaxlibArray] = loaded.execute_sharded(arguments).consume_with_handlers(
            handlers
        )
        return arrays

    return run


def collect_garbage() -> None:
    """Drop what XLA's threads have given back: arrays of NumPy whose memory programs have read."""
    import_jaxlib()[1].collect_garbage()


def imported_array_class() -> type[Any] | None:
    """Return the class of jax's arrays; None: this process has not imported jaxlib yet."""
    core = sys.modules.get("jaxlib._jax")
    return None if core is None else core.ArrayImpl


def device_count(array: JaxlibArray) -> int:
    """Return the number of devices that hold an array, those of other processes included."""
    return len(array._sharding.device_set)


def local_shards(array: JaxlibArray) -> list[JaxlibArray]:
    """Return the parts of an array on this process's devices; none for an array on one device."""
    return array._arrays or []


def dlpack_capsule(array: JaxlibArray) -> Any:
    """Return a DLPack capsule of an array on one device."""
    return import_jaxlib()[1].buffer_to_dlpack_managed_tensor(array)


def from_our_cpu(array: JaxlibArray, device: Any) -> JaxlibArray:
    """Return an array of our CPU device as one of jax's first CPU device, in the same memory.

    `jax.dlpack.from_dlpack` does it too, and then canonicalizes the dtype, which takes long and
    changes only those of 64 bits.
    """
    return import_jaxlib()[1].dlpack_managed_tensor_to_buffer(dlpack_capsule(array), device, None)


def compile_options(devices: Sequence[Any]) -> Any:
    """Return options for one program over devices, split as its shardings say (SPMD, by Shardy)."""
    xla_client, _ = import_jaxlib()
    options = xla_client.CompileOptions()
    if len(devices) > 1:
        options.num_partitions = len(devices)
        build = options.executable_build_options
        build.num_partitions = len(devices)
        build.use_spmd_partitioning = True
        build.use_shardy_partitioner = True
    if len(devices) > 1 or devices[0].id:
        ids = np.array([[device.id for device in devices]], np.int32)
        assignment = xla_client.DeviceAssignment.create(ids)
        options.device_assignment = assignment
        options.executable_build_options.device_assignment = assignment
    return options


@functools.cache
def import_mlir() -> Any:
    """Return jaxlib's module `ir` of the MLIR bindings."""
    import_jaxlib()  # first: it sets the level of XLA's log
    with importing:
        # jax imports `_mlir_libs` first too, and a host program may import jax in another thread.
        import jaxlib.mlir._mlir_libs  # noqa: F401
        from jaxlib.mlir import ir

    return ir


def parse_stablehlo(portable: bytes) -> Any:
    """Return the MLIR module of a versioned portable artifact. A context of `import_mlir` must be entered."""
    return import_jaxlib()[1].mlir.deserialize_portable_artifact(portable)


def stablehlo_version() -> str:
    """Return the version of StableHLO that this jaxlib has. Of later ones it reads what has not changed."""
    import_mlir()
    from jaxlib.mlir.dialects import stablehlo

    return str(stablehlo.get_current_version())


def serialized_portable(module: Any, version: str) -> bytes:
    """Return a module of StableHLO as a portable artifact of this version of StableHLO."""
    core = import_jaxlib()[1].mlir
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    return bytes(core.serialize_portable_artifact(bytecode.getvalue(), version, True))


def refined(module: Any, version: str) -> bytes:
    """Return a module as a portable artifact, with the sizes that follow from those of its arguments.

    jax does this when it compiles a call of a function with symbolic sizes (`refine_polymorphic_shapes` in
    jax/_src/interpreters/mlir.py). Raises whatever MLIR raises if sizes do not follow.
    """
    core = import_jaxlib()[1].mlir
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    static = core.refine_polymorphic_shapes(
        mlir_module=bytecode.getvalue(),
        enable_shape_assertions=True,
        validate_static_shapes=True,
        enable_shardy=True,
    )
    return bytes(core.serialize_portable_artifact(static, version, True))


def parse_hlo(serialized: bytes) -> Any:
    """Return XLA's module of a serialized HloModuleProto."""
    import_jaxlib()
    from jaxlib import _hlo

    return _hlo.HloModule.from_serialized_hlo_module_proto(serialized)


def kept_hlo(serialized: bytes) -> Any:
    """Return XLA's module that a build kept behind an executable (`lean_executable`); None: there is none."""
    end = len(serialized) - 10  # the last field: a tag, and the size of the one before
    if serialized[end : end + 2] != b"\xc9\x3e":
        return None
    return parse_hlo(serialized[end - int.from_bytes(serialized[end + 2 :], "little") : end])


def hlo_cost(module: Any) -> dict[str, float]:
    """Return what XLA's cost analysis counts in an MLIR module: `flops`, `bytes accessed` and others."""
    core = import_jaxlib()[1]
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    computation = core.mlir.mlir_module_to_xla_computation(bytecode.getvalue())
    return hlo_module_cost(computation.get_hlo_module())


def hlo_module_cost(module: Any) -> dict[str, float]:
    """Return what XLA's cost analysis counts in a module of its own."""
    module_cost: Callable[..., dict[str, float]] = import_jaxlib()[1].hlo_module_cost_analysis
    return module_cost(_counting_client(), module)


@functools.cache
def _counting_client() -> Any:
    """Return a client for cost analysis, which knows the sizes of shapes on a CPU."""
    return new_cpu_client(1)


def profiler_session() -> Any:
    """Return a running session of XLA's profiler. Its `stop` returns an XSpace, serialized.

    It records what XLA's threads run, kernel by kernel, and none of Python's calls.

    Raises:
        RuntimeError: the process has such a session already, of whoever.
    """
    import_jaxlib()
    from jaxlib import _profiler

    options = _profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2
    options.raise_error_on_start_failure = True
    return _profiler.ProfilerSession(options)


def read_xspace(serialized: bytes) -> Any:
    """Return the planes of an XSpace (tsl/profiler/protobuf/xplane.proto)."""
    import_jaxlib()
    from jaxlib import _profile_data

    return _profile_data.ProfileData.from_serialized_xspace(serialized)


def deserialize_topology(serialized: bytes) -> Any:
    """Return the topology that `topology_of` serialized (jaxlib 0.11 and later)."""
    return import_jaxlib()[1].DeviceTopology.deserialize(serialized)


def any_handler() -> Any:
    """Return the handler of some custom call, for names that must exist while XLA compiles."""
    import_jaxlib()
    from jaxlib.cpu import _sparse  # the only one that loads no other library

    return next(iter(_sparse.registrations().values()))


def read_array(array: JaxlibArray) -> np.ndarray[Any, Any]:
    """Return the values of an array that is no buffer of Python's. Raises as `to_numpy`."""
    if is_on_cpu(array):
        array.block_until_ready()  # raises if the program failed
        if array.aval.dtype.name not in PACKED:
            return _view(array)
        uninterrupted(import_jax)  # jaxlib unpacks with the help of jax
    elif not array._sharding.is_fully_replicated:  # no device has all of it
        return _joined(array)
    elif len(shards := local_shards(array)) > 1:
        array = shards[0]
    value: np.ndarray[Any, Any] = array._single_device_array_to_np_array_did_copy()[0]
    return value  # on a CPU without a copy


def _joined(array: JaxlibArray) -> np.ndarray[Any, Any]:
    """Return the values of an array that a mesh has split."""
    if not array.is_fully_addressable:
        held = len(local_shards(array))
        raise UsageError(
            "expected an array that this process can read whole, found one that a mesh has split over "
            f"{device_count(array)} devices, and only {held} of them belong to this process",
            hint="let the function return it whole, or call it in one process that has all devices",
        )
    whole: np.ndarray[Any, Any] = np.asarray(array)  # jax does it; a mesh has imported jax
    return whole


def _view(array: JaxlibArray) -> np.ndarray[Any, Any]:
    """Return a view of an array on our one CPU device whose dtype Python's buffers do not know.

    NumPy refuses a DLPack capsule of such a dtype, so only the address is read from the capsule. jaxlib's
    other ways import jax in whichever thread reads first, which can deadlock with a host program that
    imports jax in another thread.
    """
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.argtypes, pointer_of.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    capsule = dlpack_capsule(array)
    # A DLManagedTensor begins with the address of the data (dlpack.h).
    data = ctypes.c_void_p.from_address(pointer_of(capsule, b"dltensor")).value
    memory = (ctypes.c_uint8 * array.on_device_size_in_bytes()).from_address(data or 0)
    memory.array = array  # lives as long as the view
    view = np.frombuffer(memory, array.aval.dtype).reshape(array.aval.shape)
    view.flags.writeable = False
    return view


def free_dropped(held: list[Any]) -> None:
    """Free what nobody refers to any more: arrays, mapped files, and a client.

    `held` is emptied; it has the client. A client and its devices refer to each other, so only Python's
    garbage collector frees them, and a client has a dozen threads. To look at all objects of the process may
    take 0.1 s, in which no other thread runs Python. So these few become young again, and it looks at young
    ones alone.
    """
    client = held.pop()
    parts = [client, *client.devices()]
    parts += [memory for one in client.local_devices() for memory in one.addressable_memories()]
    del client
    collect_garbage()
    while parts:
        part = ctypes.py_object(parts.pop())
        ctypes.pythonapi.PyObject_GC_UnTrack(part)
        ctypes.pythonapi.PyObject_GC_Track(part)
        del part
    gc.collect(0)
    collect_garbage()
    give_back()


def client_of_jax(platform: str) -> Any:
    """Return jax's own client of a platform.

    Its memory on a GPU grows as it is needed, unless the process has jax already or the environment says
    otherwise: jax would take three quarters of the memory first, 1.2 of the 2.6 s of a start on an H200.
    """
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    ours = name not in os.environ and "jax" not in sys.modules
    with process_facts.importing():
        import jax  # the whole of it: a plugin registers its custom calls with it

    if ours:
        os.environ[name] = "false"
    try:
        return jax.devices(platform)[0].client
    except RuntimeError as error:
        raise UsageError(
            f"expected a {platform} device, found none: {error}",
            hint="install jax for it, such as pip install 'jax[cuda13]', or set JAX_PLATFORMS=cpu",
        ) from error
    finally:
        if ours:
            del os.environ[name]  # processes that this one starts are not ours
