"""Private parts of jaxlib, behind functions. Only `_jax_parts` and `_jit_dispatch` touch others.

jaxlib's client (PJRT) loads and runs executables without jax's Python, whose import takes as long as
everything else in a start. `_jax_parts` has what needs jax's Python (a mesh, an accelerator, values that
DLPack does not describe), and what a start on one CPU device does not need. tests/unit/runtime/device run on
every version of jax that prejit supports.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from prejit.runtime.base import process_facts
from prejit.runtime.device.quick_start import set_log_level
from prejit.runtime.errors import KernelError
from prejit.runtime.records import dataclass

JaxlibArray = Any
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


# Arrays on one CPU device, without jax's Python


@dataclass(frozen=True, slots=True)
class Aval:
    """The attributes of an abstract value that jaxlib reads, in place of `jax._src.core.ShapedArray`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False


@functools.lru_cache(maxsize=4096)
def _aval_without_jax(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Aval:
    return Aval(shape, dtype)


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


def is_on_cpu(array: JaxlibArray) -> bool:
    """Return whether `put_on_cpu` or a program with `cpu_handlers` made an array."""
    return isinstance(array._sharding, _cpu_sharding())


def put_on_cpu(array: np.ndarray[Any, Any], sharding: Any, device: Any) -> JaxlibArray:
    """Return an array on a CPU device; a C-contiguous one aligned to 64 bytes is not copied."""
    put = import_jaxlib()[1].batched_device_put
    return put(
        _aval_without_jax(array.shape, array.dtype), sharding, [array], [device], enable_x64=True
    )


def copy_to_cpu(array: np.ndarray[Any, Any], sharding: Any, device: Any) -> JaxlibArray:
    """Return a copy of an array on a CPU device, in memory of the device's own."""
    _, _jax = import_jaxlib()
    return _jax.batched_device_put(
        _aval_without_jax(array.shape, array.dtype),
        sharding,
        [array],
        [device],
        force_copy=True,
        host_buffer_semantics=_jax.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL,
        enable_x64=True,
    )


Run = Callable[[Sequence[JaxlibArray]], list[JaxlibArray]]
"""Runs an executable on arrays of its device, asynchronously. Donated ones are deleted."""


def cpu_runner(loaded: Any, avals: Avals, sharding: Any) -> Run:
    """Return a function that runs an executable on one CPU device, whose results have these types."""
    execute = loaded.execute_sharded
    handlers = [result_handler(Aval(*aval), sharding) for aval in avals]

    def run(arguments: Sequence[JaxlibArray]) -> list[JaxlibArray]:
        arrays: list[JaxlibArray] = execute(arguments).consume_with_handlers(handlers)
        return arrays

    return run


def result_handler(aval: Any, sharding: Any, committed: bool = True) -> Any:
    """Return what makes an array of a result of `execute_sharded`."""
    _, _jax = import_jaxlib()
    try:
        return _jax.array_result_handler(aval, sharding, committed, _skip_checks=True)
    except TypeError:  # jaxlib 0.12 has no such argument, because it has no checks to skip
        return _jax.array_result_handler(aval, sharding, committed)


# Settings of jax


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


# Programs


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
