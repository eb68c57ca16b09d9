"""Private parts of jax and jaxlib, behind functions. No other module of prejit touches them.

jaxlib's client (PJRT) loads and runs executables without jax's Python, whose import takes as long as
everything else in a start. Where jax's Python is needed (a mesh, an accelerator, values that DLPack does
not describe), it is imported inside the function that needs it. tests/unit/runtime/device run on every
version of jax that prejit supports.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from prejit.runtime.base import process_facts
from prejit.runtime.device.start import set_log_level
from prejit.runtime.errors import KernelError

_Array = Any
"""A `jaxlib._jax.ArrayImpl`; `transfer.DeviceArray` says more about it."""

Avals = Sequence[tuple[tuple[int, ...], np.dtype[Any], bool]]
"""Shape and dtype of several arrays, and whether their types are weak."""

importing = threading.RLock()
"""Held while modules of jax or of jaxlib's MLIR are imported. Two threads that import
`jaxlib.mlir._mlir_libs` and its `_mlir`, which import each other, deadlock: Python notices and one import
fails. One thread may compile a program while another puts the first array."""


# Imports


@functools.cache
def import_jaxlib() -> tuple[Any, Any]:
    """Return jaxlib's client module and its C++ core; neither imports jax. Starts no thread."""
    set_log_level()
    with process_facts.importing():
        from jaxlib import _jax, xla_client

    return xla_client, _jax


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


# Clients and devices


def new_cpu_client(device_count: int) -> Any:
    """Return a new CPU client.

    Without the count, XLA takes that of --xla_force_host_platform_device_count.
    """
    return import_jaxlib()[0].make_cpu_client(num_devices=device_count)


def device_list(devices: Sequence[Any]) -> Any:
    """Return devices as jaxlib's compilers and loaders take them."""
    return import_jaxlib()[1].DeviceList(tuple(devices))


def in_cluster() -> bool:
    """Return whether the host program called `jax.distributed.initialize`."""
    module = sys.modules.get("jax._src.distributed")
    state = getattr(module, "global_state", None)  # None: another thread is importing it just now
    return state is not None and state.client is not None


def topology_of(devices: Sequence[Any]) -> bytes:
    """Return XLA's serialized description of devices: a PjRtTopologyDescriptionProto."""
    return bytes(import_jaxlib()[1].get_topology_for_devices(devices).serialize())


def compiles_for_topology() -> bool:
    """Return whether this jaxlib compiles for a serialized topology (0.11 and later)."""
    return hasattr(import_jaxlib()[1].DeviceTopology, "deserialize")


# Arrays on one CPU device, without jax's Python


@dataclass(frozen=True, slots=True)
class _Aval:
    """The attributes of an abstract value that jaxlib reads, in place of `jax._src.core.ShapedArray`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False


@functools.lru_cache(maxsize=4096)
def _aval(shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Aval:
    return _Aval(shape, dtype)


@functools.cache
def _cpu_sharding() -> type[Any]:
    """Return a class of shardings on one device that needs no jax, unlike jaxlib's own before 0.12."""
    xla_client, _jax = import_jaxlib()

    class CpuSharding(_jax.SingleDeviceSharding):  # type: ignore[misc, name-defined]
        memory_kind = None

        def _to_xla_hlo_sharding(self, num_dimensions: int) -> Any:
            return xla_client.HloSharding.replicate()

    return CpuSharding


def cpu_sharding(device: Any) -> Any:
    """Return the sharding of arrays on one CPU device."""
    return _cpu_sharding()(device)


def is_on_cpu(array: _Array) -> bool:
    """Return whether `put_on_cpu` or a program with `cpu_handlers` made an array."""
    return isinstance(array._sharding, _cpu_sharding())


def put_on_cpu(array: np.ndarray[Any, Any], sharding: Any, device: Any) -> _Array:
    """Return an array on a CPU device; a C-contiguous one aligned to 64 bytes is not copied."""
    put = import_jaxlib()[1].batched_device_put
    return put(_aval(array.shape, array.dtype), sharding, [array], [device], enable_x64=True)


def copy_to_cpu(array: np.ndarray[Any, Any], sharding: Any, device: Any) -> _Array:
    """Return a copy of an array on a CPU device, in memory of the device's own."""
    _, _jax = import_jaxlib()
    return _jax.batched_device_put(
        _aval(array.shape, array.dtype),
        sharding,
        [array],
        [device],
        force_copy=True,
        host_buffer_semantics=_jax.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL,
        enable_x64=True,
    )


def cpu_assembler(avals: Avals, sharding: Any) -> Callable[[Any], list[_Array]]:
    """Return a function that makes arrays of what `execute_sharded` gives on one CPU device."""
    handlers = [_result_handler(_Aval(*aval), sharding) for aval in avals]

    def assemble(ran: Any) -> list[_Array]:
        arrays: list[_Array] = ran.consume_with_handlers(handlers)
        return arrays

    return assemble


def _result_handler(aval: Any, sharding: Any, committed: bool = True) -> Any:
    _, _jax = import_jaxlib()
    try:
        return _jax.array_result_handler(aval, sharding, committed, _skip_checks=True)
    except TypeError:  # jaxlib 0.12 has no such argument, because it has no checks to skip
        return _jax.array_result_handler(aval, sharding, committed)


# Arrays on other devices and on meshes, with jax's Python


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

    Args:
        grid: the devices, in rows and columns.
        axis_names: the names of the grid's axes.
        split: for each dimension of an array, the axis that splits it, or `""`.
    """
    with importing:
        with process_facts.importing():
            import jax  # noqa: F401
            from jax._src import mesh, partition_spec, sharding_impls

        spec = partition_spec.PartitionSpec(*(axis or None for axis in split))
        return sharding_impls.NamedSharding(mesh.Mesh(grid, axis_names), spec)


def put_with_jax(
    shape: tuple[int, ...], dtype: Any, sharding: Any, shards: list[Any], devices: list[Any]
) -> _Array:
    """Return an array made of its shards, one for each device of this process."""
    _, _jax = import_jaxlib()
    enable_x64, shaped_array = _jax_types()
    with enable_x64(True):  # or 64-bit values become 32-bit ones
        return _jax.batched_device_put(shaped_array(shape, dtype), sharding, shards, devices)


def as_result(array: _Array, *, weak: bool, committed: bool) -> _Array:
    """Return an array of jax on one device with the type and place of a result, in the same memory."""
    if array._committed == committed and array.aval.weak_type == weak:
        return array
    _, _jax = import_jaxlib()
    _, shaped_array = _jax_types()
    aval = shaped_array(array.shape, array.dtype, weak_type=weak)
    return _jax.ArrayImpl(aval, array.sharding, [array], committed=committed, _skip_checks=True)


def mesh_assembler(avals: Avals, shardings: Sequence[Any]) -> Callable[[Any], list[_Array]]:
    """Return a function that makes arrays over a mesh of what `execute_sharded` gives."""
    _, _jax = import_jaxlib()
    _, shaped_array = _jax_types()
    outputs = [
        (shaped_array(*aval), sharding) for aval, sharding in zip(avals, shardings, strict=True)
    ]

    def assemble(ran: Any) -> list[_Array]:
        shards = ran.disassemble_into_single_device_arrays()
        return [
            _jax.ArrayImpl(aval, sharding, arrays, committed=True, _skip_checks=True)
            for (aval, sharding), arrays in zip(outputs, shards, strict=True)
        ]

    return assemble


@functools.cache
def _jax_types() -> tuple[Any, Any]:
    with importing:
        import jax  # noqa: F401
        from jax._src import config, core

        return config.enable_x64, core.ShapedArray


# Settings of jax


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


def unguarded() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which jax's transfer guards let pass what is not the caller's transfer."""
    jax = sys.modules.get("jax")
    guard = getattr(jax, "transfer_guard", None)  # None: another thread is importing it just now
    return contextlib.nullcontext() if guard is None else guard("allow")


def guarding(guards: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context with jax's transfer guards as they are set, or without them."""
    config: Any = sys.modules.get("jax._src.config")
    if guards or not hasattr(config, "transfer_guard_device_to_device"):
        return _AS_IT_IS  # without jax, or another thread is importing it just now
    levels = (
        config.transfer_guard_host_to_device.value,
        config.transfer_guard_device_to_device.value,
    )
    return _AS_IT_IS if levels == (None, None) else unguarded()


_AS_IT_IS = contextlib.nullcontext()


# Calls of a jitted function, dispatched by jaxlib


def is_tracing() -> bool:
    """Return whether jax traces a function in this thread, so that nothing may run now."""
    from jax._src import core

    return not core.trace_state_clean()


def assembler_for_jax(avals: Avals, device: Any, committed: bool) -> Callable[[Any], list[_Array]]:
    """Return a function that makes jax's arrays of what `execute_sharded` gives on one device.

    Args:
        avals: the type of each.
        device: of jax's client.
        committed: whether they are committed to the device.
    """
    sharding = single_sharding(device)
    _, shaped_array = _jax_types()
    handlers = [_result_handler(shaped_array(*aval), sharding, committed) for aval in avals]

    def assemble(ran: Any) -> list[_Array]:
        arrays: list[_Array] = ran.consume_with_handlers(handlers)
        return arrays

    return assemble


Missed = tuple[Any, Any, bool]
"""What jaxlib takes from the function that it calls for a new signature: the results of the call, how to
dispatch later calls (None: call that function again), and False."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """jaxlib's C++ dispatch of a jitted function.

    It keeps an executable for each signature of a call: structure, shapes, dtypes and shardings of the
    arguments, static values, settings of jax. It calls a Python function for a signature that is new.

    Attributes:
        jax_miss: that function of jax, which traces and compiles.
    """

    jax_miss: Callable[..., Missed]
    _state: Mapping[str, Any]

    @classmethod
    def of(cls, jitted: Any) -> Dispatch | None:
        """Return the dispatch of what jax.jit returned; None: this version of jax has other parts."""
        try:
            from jax._src.interpreters.pxla import MeshExecutableFastpathData

            state = jitted.__getstate__()
            known = MeshExecutableFastpathData._fields == _PATH_FIELDS
            known = known and state.keys() >= _STATE_KEYS
            return cls(state["cache_miss"], state) if known else None
        except (AttributeError, ImportError, TypeError):
            return None

    @property
    def static(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The places and the names of static arguments, which jax completed."""
        return tuple(self._state["static_argnums"]), tuple(self._state["static_argnames"])

    @property
    def donated(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The places and the names of donated arguments, which jax completed."""
        key = self._state["global_cache_key"]
        return tuple(key.donate_argnums or ()), tuple(key.donate_argnames or ())

    def function(self, jitted: Any, miss: Callable[..., Missed]) -> Any:
        """Return a function as the jitted one that calls another function for a new signature."""
        _, _jax = import_jaxlib()
        state = self._state
        made = _jax.pjit(
            state["function_name"],
            state["fun"],
            miss,
            state["static_argnums"],
            state["static_argnames"],
            state["global_cache_key"],
            state["pytree_registry"],
            state["shard_arg_fallback"],
            _jax.PjitFunctionCache(capacity=_SIGNATURES),
        )
        vars(made).update(vars(jitted))  # `lower`, `trace` and `eval_shape` of its class need them
        return made

    def path(self, loaded: Any, given: Sequence[Any], result: Any, returned: Sequence[Any]) -> Any:
        """Return how jaxlib dispatches later calls to an executable.

        Args:
            loaded: jaxlib's executable, which takes every array of the arguments.
            given: the shardings of these arrays.
            result: what the first call returned.
            returned: the shardings of its arrays.
        """
        arrays, structure = self._state["pytree_registry"].flatten(result, None)
        return _Path(
            xla_executable=loaded,
            out_pytree_def=structure,
            in_shardings=list(given),
            out_shardings=list(returned),
            out_avals=[array.aval for array in arrays],
            out_committed=[array._committed for array in arrays],
            kept_var_bitvec=[True] * len(given),
            in_device_local_layouts=[None] * len(given),
            const_args=[],
        )


class _Results:
    """The results of a program on their way out of jaxlib's dispatch, and a function that nests them."""

    def __init__(self, arrays: list[Any], nest: Callable[[list[Any]], Any]) -> None:
        self.arrays = arrays
        self.nest = nest


@functools.cache
def _registry() -> Any:
    """Return a registry of pytrees that has Python's containers, OrderedDict and `_Results`."""
    registry = import_jaxlib()[1].pytree.PyTreeRegistry()
    registry.register_node(
        _Results,
        lambda results: (results.arrays, results.nest),
        lambda nest, arrays: nest(list(arrays)),
    )
    registry.register_node(
        OrderedDict,
        lambda given: (tuple(given.values()), tuple(given)),
        lambda keys, parts: OrderedDict(zip(keys, parts, strict=True)),
    )
    return registry


@functools.cache
def _has_jit_state() -> bool:
    """Give jaxlib's dispatch the settings that it lacks before `import jax`, which replaces them by its own.

    Raises:
        ValueError, TypeError, AttributeError: this jaxlib needs others.
    """
    _, _jax = import_jaxlib()
    probe = _jax.pjit(
        *("probe", lambda: None, lambda: (None, None, False), [], [], "probe", _registry()),
        *(lambda *_: None, _jax.PjitFunctionCache(capacity=1)),
    )
    try:
        probe()
    except ValueError:  # they are not set
        make, state = _jax.config.Config, _jax.jax_jit
        state.set_disable_jit_state(make("prejit_disable_jit", False))
        state.set_enable_x64_state(make("prejit_enable_x64", True))
        state.set_post_hook_state(make("prejit_post_hook", None))
        probe()
    return True


def cpu_function(
    call: Callable[..., Any], miss: Callable[..., Missed], put: Callable[[Any], _Array]
) -> Callable[..., Any] | None:
    """Return a function that jaxlib dispatches, without jax; None: this jaxlib cannot.

    Its arguments must be NumPy arrays in the machine's byte order, which jaxlib does not look at, and of at
    most 32 bits, because jaxlib takes float64 for float32 where jax_enable_x64 is off.

    Args:
        call: what it does while jax.disable_jit holds.
        miss: what it does for a new signature; returns `cpu_path` if jaxlib may dispatch later calls.
        put: puts one array on the device.
    """
    _, _jax = import_jaxlib()
    try:
        _has_jit_state()
        cache = _jax.PjitFunctionCache(capacity=_SIGNATURES)
        function: Callable[..., Any] = _jax.pjit(
            *("call", call, miss, [], [], "prejit", _registry()),
            *(lambda array, *_: put(array), cache),
        )
        return function
    except (AttributeError, TypeError, ValueError):
        return None


def cpu_path(
    loaded: Any,
    constants: Sequence[_Array],
    argument_count: int,
    results: Avals,
    sharding: Any,
    nest: Callable[[list[_Array]], Any],
) -> Any:
    """Return how jaxlib dispatches later calls to an executable on one CPU device.

    Args:
        loaded: jaxlib's executable.
        constants: its first arguments, the weights.
        argument_count: how many others there are.
        results: the type of each.
        sharding: as `cpu_sharding`.
        nest: makes what the caller gets of the arrays.
    """
    _, structure = _registry().flatten(_Results([0] * len(results), nest), None)
    count = len(constants) + argument_count
    return _Path(
        xla_executable=loaded,
        out_pytree_def=structure,
        in_shardings=[sharding] * count,
        out_shardings=[sharding] * len(results),
        out_avals=[_Aval(*aval) for aval in results],
        out_committed=[True] * len(results),
        kept_var_bitvec=[True] * count,
        in_device_local_layouts=[None] * count,
        const_args=list(constants),
    )


def flattened(values: Any) -> tuple[list[Any], Any] | None:
    """Return the leaves of arguments, in the order in which `cpu_function` passes them, and their structure.

    None: jaxlib cannot flatten them, such as a dict whose keys have no order, or what is nested too deeply.
    """
    try:
        found: tuple[list[Any], Any] = _registry().flatten(values, None)
    except (RecursionError, SystemError, ValueError, Warning):
        return None  # nanobind turns the first into the second
    return found


_SIGNATURES = 4096
"""Maximum number of signatures that the dispatch of one function keeps."""


class _Path(NamedTuple):
    """How jaxlib dispatches calls of a signature: the fields of jax's MeshExecutableFastpathData."""

    xla_executable: Any
    out_pytree_def: Any
    in_shardings: Sequence[Any]
    out_shardings: Sequence[Any]
    out_avals: Sequence[Any]
    out_committed: Sequence[bool]
    kept_var_bitvec: Sequence[bool]
    in_device_local_layouts: Sequence[Any]
    const_args: Sequence[Any]


_PATH_FIELDS = _Path._fields
_STATE_KEYS = {
    *("function_name", "fun", "cache_miss", "static_argnums", "static_argnames"),
    *("global_cache_key", "pytree_registry", "shard_arg_fallback"),
}


def collect_garbage() -> None:
    """Drop what XLA's threads have given back: arrays of NumPy whose memory programs have read."""
    import_jaxlib()[1].collect_garbage()


# Reading arrays


def imported_array_class() -> type[Any] | None:
    """Return the class of jax's arrays; None: this process has not imported jaxlib yet."""
    core = sys.modules.get("jaxlib._jax")
    return None if core is None else core.ArrayImpl


def is_whole(array: _Array) -> bool:
    """Return whether every device of an array holds all of it."""
    return bool(array._sharding.is_fully_replicated)


def device_count(array: _Array) -> int:
    """Return the number of devices that hold an array, those of other processes included."""
    return len(array._sharding.device_set)


def local_shards(array: _Array) -> list[_Array]:
    """Return the parts of an array on this process's devices; none for an array on one device."""
    return array._arrays or []


def read(array: _Array) -> np.ndarray[Any, Any]:
    """Return the values of an array on one device, once they are there; on a CPU without a copy."""
    value: np.ndarray[Any, Any] = array._single_device_array_to_np_array_did_copy()[0]
    return value


def dlpack_capsule(array: _Array) -> Any:
    """Return a DLPack capsule of an array on one device."""
    return import_jaxlib()[1].buffer_to_dlpack_managed_tensor(array)


# Programs


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
    with importing:
        # jax imports `_mlir_libs` first too, and a host program may import jax in another thread.
        import jaxlib.mlir._mlir_libs  # noqa: F401
        from jaxlib.mlir import ir

    return ir


def parse_stablehlo(portable: bytes) -> Any:
    """Return the MLIR module of a versioned portable artifact. A context of `import_mlir` must be entered."""
    return import_jaxlib()[1].mlir.deserialize_portable_artifact(portable)


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

    Args:
        module: StableHLO whose main function has arguments of static sizes.
        version: the version of StableHLO to write.
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


def deserialize_topology(serialized: bytes) -> Any:
    """Return the topology that `topology_of` serialized (jaxlib 0.11 and later)."""
    return import_jaxlib()[1].DeviceTopology.deserialize(serialized)


_UNWANTED = (
    *("print_metadata", "print_backend_config", "print_large_constants", "print_operand_names"),
    *("print_operand_shape", "print_result_shape", "print_program_shape", "print_extra_attributes"),
    *("print_control_dependencies", "print_percent", "include_layout_in_shapes", "print_ids"),
)
"""Options of HloPrintOptions that are turned off. The fewer are on, the sooner the text is written."""


def hlo_head(loaded: Any) -> str | None:
    """Return the first line of a loaded executable's HLO text; None: its plugin does not have the text."""
    import_jaxlib()
    from jaxlib import _hlo

    options = _hlo.HloPrintOptions.short_parsable()
    for name in _UNWANTED:
        if hasattr(options, name):
            setattr(options, name, False)
    try:
        module, *others = loaded.hlo_modules()
        head: str = module.to_string(options).partition("\n")[0]
    except Exception:  # a plugin need not implement it
        return None
    return None if others else head


# Custom calls

_registered: set[str] = set()
_registering = threading.Lock()


def register_handlers(handlers: Mapping[str, Any]) -> None:
    """Register handlers of custom calls on CPUs, by name; names that this process has registered are left.

    XLA looks a handler up when it compiles or loads a program that calls it.

    Raises:
        KernelError: this jaxlib does not take a handler.
    """
    xla_client, _jax = import_jaxlib()
    # Making a client does this too. Without it jaxlib delays registrations, and their errors.
    xla_client.register_custom_call_handler("cpu", _jax.register_custom_call_target)
    with _registering:
        for name, handler in handlers.items():
            if name in _registered:
                continue
            try:
                xla_client.register_custom_call_target(name, handler, "cpu", api_version=1)
            except Exception as error:
                raise KernelError(
                    f"XLA does not take the handler {name}: {error}",
                    hint="build it with the FFI headers of this jaxlib (jax.ffi.include_dir())",
                ) from error
            _registered.add(name)


def any_handler() -> Any:
    """Return the handler of some custom call, for names that must exist while XLA compiles."""
    import_jaxlib()
    from jaxlib.cpu import _sparse  # the only one that loads no other library

    return next(iter(_sparse.registrations().values()))


def register_library_calls(program: bytes) -> None:
    """Register the handlers of jaxlib's own CPU libraries that a program calls.

    `import jax` registers all of them and loads SciPy's LAPACK for them, which few programs need.
    """
    for library, mark in (("lapack", b"lapack_"), ("cpu_sparse", b"cpu_csr_")):
        if mark in program:
            _register_library(library)


@functools.cache
def _register_library(name: str) -> None:
    xla_client, _ = import_jaxlib()
    library = importlib.import_module(f"jaxlib.{name}")
    for platform, calls in library.registrations().items():
        for call, handler, api_version in calls:
            xla_client.register_custom_call_target(call, handler, platform, api_version=api_version)
    if name == "lapack":
        library._lapack.initialize()
