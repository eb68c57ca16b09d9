"""Executables on a device. The only module that touches the private parts of jax and jaxlib.

It is small on purpose: put arrays on a device, load or compile a program, run it, read a result. It
works on jaxlib's client (PJRT) directly, below `jax.jit`, so nothing is traced and nothing is dispatched
in Python; jax itself is deferred, see deferred_jax.py. tests/unit/runtime/test_executable.py runs on
every jax version that we support.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from prejit.runtime.bundle import Memory
from prejit.runtime.deferred_jax import defer_jax, imports_of_ours
from prejit.runtime.errors import BuildError, RejectError

DeviceArray = Any
"""A `jaxlib._jax.ArrayImpl`: what `isinstance(x, jax.Array)` accepts, without its Python methods while
jax is deferred."""


@functools.cache
def _jaxlib() -> tuple[Any, Any]:
    """jaxlib's client module and its C++ core, imported without running `jax/__init__.py`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as jax does: no INFO lines on stderr
    defer_jax()
    from jaxlib import _jax, xla_client

    return xla_client, _jax


@final
class Executable:
    """A program loaded on a device, ready to run."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self.run = loaded.execute
        """Runs the program: `run(list of DeviceArray) -> list of DeviceArray`, asynchronously.

        Donated arguments are deleted. The compiled program itself checks number and sizes.
        """

    def serialize(self) -> bytes:
        """The executable's bytes, for `Device.load` on the same kind of machine."""
        return bytes(self._loaded.serialize())


@final
class Device:
    """One device of this machine and the client that runs it."""

    def __init__(self, platform: str = "cpu") -> None:
        if platform != "cpu":
            raise NotImplementedError(platform)
        xla_client, _jax = _jaxlib()
        self._client = xla_client.make_cpu_client()
        self._device = self._client.devices()[0]
        self._devices = _jax.DeviceList((self._device,))
        self._sharding: Any = None  # made with the first array, of one of jax's 44 modules
        self._shaped_array: Any = None
        self._enable_x64: Any = None
        self.platform: str = self._device.platform

    def put(self, array: np.ndarray[Any, Any]) -> DeviceArray:
        """The array on this device.

        On a CPU nothing is copied where the data is C-contiguous and aligned to 64 bytes: the device then
        reads the caller's memory, which must not change while it is in use.

        Not through DLPack: XLA's threads drop the last reference to an array when a program ends, NumPy's
        DLPack deleter then takes the GIL, and while the interpreter shuts down that aborts the process.
        jaxlib's own references are dropped without the GIL.
        """
        if self._sharding is None:
            with imports_of_ours():  # of those modules
                from jax._src import config, core, sharding_impls

                self._shaped_array = core.ShapedArray
                self._enable_x64 = config.enable_x64
                self._sharding = sharding_impls.SingleDeviceSharding(self._device)
                to_numpy(self._put(np.zeros(1, np.uint8)))
        return self._put(array)

    def _put(self, array: np.ndarray[Any, Any]) -> DeviceArray:
        _, _jax = _jaxlib()
        aval = self._shaped_array(array.shape, array.dtype)
        with self._enable_x64(True):  # or 64-bit values become 32-bit ones
            return _jax.batched_device_put(aval, self._sharding, [array], [self._device])

    def load(self, serialized: bytes, path: str) -> Executable:
        """Deserializes an executable. The bytes must have been verified: XLA crashes on damaged ones.

        Args:
            serialized: as `Executable.serialize` gave them.
            path: the file that they came from, for errors.

        Raises:
            RejectError: XLA does not accept the bytes.
        """
        _register_library_calls(serialized)
        try:
            return Executable(self._client.deserialize_executable(serialized, self._devices, None))
        except Exception as error:
            raise RejectError(path, f"XLA does not load this executable: {error}") from error

    def compile(self, portable: bytes) -> Executable:
        """Compiles a portable program for this device.

        Raises:
            BuildError: XLA does not compile it.
        """
        xla_client, _ = _jaxlib()
        options = xla_client.CompileOptions()
        try:
            module = _stablehlo_module(portable)
            return Executable(self._client.compile_and_load(module, self._devices, options))
        except Exception as error:
            raise BuildError(f"XLA does not compile this program: {error}") from error


def to_numpy(array: DeviceArray) -> np.ndarray[Any, Any]:
    """The array's values, once they are there; on a CPU a read-only view, not a copy."""
    value: np.ndarray[Any, Any] = array._single_device_array_to_np_array_did_copy()[0]
    return value


def is_jax_array(value: Any) -> bool:
    """Whether a value is a jax.Array, without importing jax for the answer."""
    core = sys.modules.get("jaxlib._jax")
    return core is not None and isinstance(value, core.ArrayImpl)


def to_jax(array: DeviceArray) -> Any:
    """The array as one of the host program's own jax client (ours is another), without a copy."""
    import jax

    return (
        jax.dlpack.from_dlpack(array)
        if array.dtype.kind != "V"
        else jax.device_put(to_numpy(array))
    )


def _register_library_calls(program: bytes) -> None:
    """Registers the handlers of jaxlib's own library calls that a program makes.

    `import jax` registers them all, and loads SciPy's LAPACK for it; few programs want them.
    """
    for library, mark in (("lapack", b"lapack_"), ("cpu_sparse", b"cpu_csr_")):
        if mark in program:
            _register_library(library)


@functools.cache
def _register_library(name: str) -> None:
    xla_client, _ = _jaxlib()
    library = importlib.import_module(f"jaxlib.{name}")
    for platform, calls in library.registrations().items():
        for call, handler, api_version in calls:
            xla_client.register_custom_call_target(call, handler, platform, api_version=api_version)
    if name == "lapack":
        library._lapack.initialize()


def _stablehlo_module(portable: bytes) -> Any:
    """The MLIR module of a versioned portable artifact, upgraded to this jaxlib's StableHLO."""
    from jaxlib.mlir import ir

    _, _jax = _jaxlib()
    _register_library_calls(portable)
    with ir.Context():
        return _jax.mlir.deserialize_portable_artifact(portable)


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program compiled for a target.

    Attributes:
        serialized: for `Device.load`.
        cpu_features: the instruction-set extensions that the code may use, in LLVM's names.
        memory: what it needs while it runs.
    """

    serialized: bytes
    cpu_features: tuple[str, ...]
    memory: Memory


def cross_compiles() -> bool:
    """Whether this jaxlib compiles for a CPU described in data (0.11 and later).

    Older ones compile for the build host's own features, capped by `--xla_cpu_max_isa` in XLA_FLAGS.
    """
    _, _jax = _jaxlib()
    return hasattr(_jax.DeviceTopology, "deserialize")


def compile_portable(
    portable: bytes, *, cpu: str | None = None, cpu_features: tuple[str, ...] | None = None
) -> CompiledProgram:
    """Compiles a portable program for a CPU that need not be this machine's.

    Args:
        portable: StableHLO as a versioned portable artifact.
        cpu: LLVM's name for the CPU to tune for; None: this machine's.
        cpu_features: LLVM's names of the extensions that may be used; None: all of this machine's.
            Ignored where `cross_compiles()` is false.

    Raises:
        BuildError: XLA does not compile it.
    """
    xla_client, _jax = _jaxlib()
    client = xla_client.make_cpu_client()
    options = xla_client.CompileOptions()
    try:
        module = _stablehlo_module(portable)
        if cpu is None or cpu_features is None or not cross_compiles():
            devices = _jax.DeviceList(tuple(client.devices()[:1]))
            compiled = client.compile_and_load(module, devices, options)
        else:
            host = _jax.get_topology_for_devices(client.devices()[:1])
            changed = _with_cpu(host.serialize(), cpu, cpu_features)
            compiled = client.compile(module, _jax.DeviceTopology.deserialize(changed), options)
        serialized = bytes(compiled.serialize())
        stats = compiled.get_compiled_memory_stats()
    except Exception as error:
        raise BuildError(f"XLA does not compile this program: {error}") from error
    memory = Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )
    return CompiledProgram(serialized, _features_in(serialized), memory)


def _features_in(serialized: bytes) -> tuple[str, ...]:
    """The extensions that an XLA:CPU executable was compiled with: LLVM's feature string inside it."""
    longest = max(re.findall(rb"(?:[+-][a-z0-9.\-]+,){8,}[+-][a-z0-9.\-]+", serialized), key=len)
    features = (name[1:] for name in longest.decode().split(",") if name.startswith("+"))
    # `prefer-*` is tuning. The last name may run into the next field of the protobuf: it is dropped
    # unless it is known, see fingerprint.LINUX_CPU_FLAGS.
    from prejit.runtime.fingerprint import CPU_FEATURES

    return tuple(sorted(name for name in features if name in CPU_FEATURES))


def _with_cpu(topology: bytes, cpu: str, features: tuple[str, ...]) -> bytes:
    """A serialized topology of this machine, with another CPU in it.

    xla/pjrt/proto/topology_description.proto holds, as an Any in field 9, a CpuTopologyProto, whose
    field 5 is TargetMachineOptionsProto {1: triple, 2: cpu, 3: features}
    (xla/service/cpu/executable.proto).
    """
    listed = ",".join(f"+{name}" for name in features)
    machine = {2: cpu.encode(), 3: listed.encode()}
    return _edit(topology, (9, 2, 5), machine)


def _edit(message: bytes, path: tuple[int, ...], values: dict[int, bytes]) -> bytes:
    """A protobuf message with fields of the submessage at path replaced."""
    out = bytearray()
    for number, value in _protobuf_fields(message):
        if path and number == path[0] and isinstance(value, bytes):
            value = _edit(value, path[1:], values)
        elif not path:
            value = values.get(number, value)
        if isinstance(value, bytes):
            out += _varint(number << 3 | 2) + _varint(len(value)) + value
        else:
            out += _varint(number << 3) + _varint(value)
    return bytes(out)


def _protobuf_fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 2:
            size = varint()
            yield tag >> 3, message[at : at + size]
            at += size
        else:
            raise ValueError(f"unexpected protobuf wire type {tag & 7}")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Zeros at a 64-byte boundary, so that a CPU device takes them without a copy."""
    size = dtype.itemsize * math.prod(shape)
    raw = np.zeros(size + 64, np.uint8)  # calloc: the pages are made when they are first written
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
