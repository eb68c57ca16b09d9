"""Executables on a device. The only module that touches the private parts of jax and jaxlib.

It is small on purpose: put arrays on a device, load or compile a program, run it, read a result. It
works on jaxlib's client (PJRT) directly, below `jax.jit`, so nothing is traced and nothing is dispatched
in Python. One CPU device needs no module of jax; others import all of it.
tests/unit/runtime/test_executable.py runs on every jax version that we support.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from prejit.runtime.base.process import is_plain_start
from prejit.runtime.device import kernels
from prejit.runtime.device.start import set_log_level
from prejit.runtime.errors import BuildError, KernelError, MismatchError, PrejitError, UsageError
from prejit.runtime.format.arrays import MESH_AXES, Array, Mesh
from prejit.runtime.format.schema import Memory

DeviceArray = Any
"""A `jaxlib._jax.ArrayImpl`: what `isinstance(x, jax.Array)` accepts, for `run`, `to_numpy` and `to_jax`.
It lacks what jax's Python would give it: on one CPU device it is made without any module of jax."""


@functools.cache
def _jaxlib() -> tuple[Any, Any]:
    """jaxlib's client module and its C++ core, which need no jax."""
    set_log_level()
    from jaxlib import _jax, xla_client

    return xla_client, _jax


_imports = threading.RLock()
"""Held while modules of jax or of jaxlib's MLIR are imported. A program may be compiled in one thread
while another makes the first array: both want `jaxlib.mlir._mlir_libs` and its `_mlir`, which import each
other, and Python ends that as a deadlock."""


@dataclass(frozen=True, slots=True)
class _Aval:
    """What jaxlib reads of an array's abstract value, in place of `jax._src.core.ShapedArray`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False


@functools.cache
def _only_device() -> type[Any]:
    """A sharding on one device that needs none of jax's Python, unlike jaxlib's own before 0.12."""
    xla_client, _jax = _jaxlib()

    class OnlyDevice(_jax.SingleDeviceSharding):  # type: ignore[misc, name-defined]
        memory_kind = None

        def _to_xla_hlo_sharding(self, num_dimensions: int) -> Any:
            return xla_client.HloSharding.replicate()

    return OnlyDevice


def _result_handler(aval: _Aval, sharding: Any) -> Any:
    """What makes an array of a result."""
    _, _jax = _jaxlib()
    try:
        return _jax.array_result_handler(aval, sharding, True, _skip_checks=True)
    except TypeError:  # jaxlib 0.12: there are no checks to skip
        return _jax.array_result_handler(aval, sharding, True)


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments and results of a compiled program on each device.

    Attributes:
        arguments, results: dtype and shape of each, in NumPy's names: `("float32", (2, 3))`.
        donated: numbers of the arguments whose memory it reuses.
    """

    arguments: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    donated: frozenset[int]


_UNWANTED = (
    *("print_metadata", "print_backend_config", "print_large_constants", "print_operand_names"),
    *("print_operand_shape", "print_result_shape", "print_program_shape", "print_extra_attributes"),
    *("print_control_dependencies", "print_percent", "include_layout_in_shapes", "print_ids"),
)
"""Options of HloPrintOptions that are turned off."""

_TOKENS = re.compile(r"([a-z]\w*)\[([\d,]*)\]|[{}]|->")
_DONATED = re.compile(r"\((\d+), \{")
_XLA_DTYPES = {
    **{"bool": "pred", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"},
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"s{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
}
_NUMPY_DTYPES = {xla: numpy for numpy, xla in _XLA_DTYPES.items()}
"""By XLA's names in HLO; others are `f8e4m3fn` for `float8_e4m3fn`."""


def _parse_signature(head: str) -> Signature | None:
    """The signature in the first line of a module in HLO's text.

    HloModule f, input_output_alias={ {0}: (2, {}, may-alias) }, buffer_donor={ (1, {}) },
        entry_computation_layout={(f32[2,3]{1,0}, s32[], f32[2]{0})->(f32[2]{0}, pred[])}
    """
    aliases, found, layout = head.partition(", entry_computation_layout={")
    if not found:
        return None
    sides: tuple[list[Any], list[Any]] = [], []
    depth, side = 1, 0
    for token in _TOKENS.finditer(layout):
        match token[0]:
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if not depth:
                    break
            case "->":
                side = 1
            case _ if depth == 1:
                dtype = _NUMPY_DTYPES.get(token[1]) or re.sub(r"^f(\d)(?=e)", r"float\1_", token[1])
                shape = tuple(map(int, token[2].split(","))) if token[2] else ()
                sides[side].append((dtype, shape))
    donated = frozenset(map(int, _DONATED.findall(aliases)))
    return Signature(tuple(sides[0]), tuple(sides[1]), donated)


@final
class Executable:
    """A program loaded on a device or a mesh, ready to run."""

    def __init__(self, loaded: Any, assemble: Callable[[Any], list[DeviceArray]] | None) -> None:
        self._loaded = loaded
        self._assemble = assemble
        self.run: Callable[[list[DeviceArray]], list[DeviceArray]] = (
            loaded.execute if assemble is None else self._run_assembled
        )
        """Runs the program: `run(list of DeviceArray) -> list of DeviceArray`, asynchronously.

        Donated arguments are deleted. The compiled program itself checks number and sizes.
        """

    def _run_assembled(self, arguments: list[DeviceArray]) -> list[DeviceArray]:
        assert self._assemble is not None
        return self._assemble(self._loaded.execute_sharded(arguments))

    def serialize(self) -> bytes:
        """The executable's bytes, for `Device.load` on the same kind of machine."""
        return bytes(self._loaded.serialize())

    def signature(self) -> Signature | None:
        """What the program takes and gives on each device, as XLA compiled it; None: jaxlib does not tell.

        Costs 0.3 ms for a program of 500 instructions.
        """
        _jaxlib()
        from jaxlib import _hlo

        # Only the first line is wanted, and the fewer options the rest of it has the sooner it is written.
        options = _hlo.HloPrintOptions.short_parsable()
        for name in _UNWANTED:
            if hasattr(options, name):
                setattr(options, name, False)
        try:
            module, *others = self._loaded.hlo_modules()
            head = module.to_string(options).partition("\n")[0]
        except Exception:  # a plugin need not implement it
            return None
        return None if others else _parse_signature(head)


@final
class Device:
    """What programs run on: one device of this machine or a mesh of them, and the client that runs it.

    On a CPU the client is our own, so that a host program's jax is not disturbed; an accelerator has
    room for one client only, and there it is jax's. Where the process takes part in a cluster
    (`jax.distributed.initialize`), the mesh spans the devices of all its processes.
    """

    def __init__(self, platform: str = "cpu", mesh: Mesh | None = None) -> None:
        """Starts the client.

        Args:
            platform: `cpu`, `cuda`, `tpu`.
            mesh: its size says how many devices are used; None: one.

        Raises:
            UsageError: the machine has fewer devices, or jax has no such platform.
        """
        xla_client, _jax = _jaxlib()
        self.mesh = mesh
        self.in_cluster = _in_cluster()
        count = 1 if mesh is None else mesh.size
        if platform == "cpu" and not self.in_cluster:
            # Told, or it would be as many as --xla_force_host_platform_device_count says.
            self._client = xla_client.make_cpu_client(num_devices=count)
        else:
            self._client = _backend_of_jax(platform)
        devices = self._client.local_devices() if mesh is None else self._client.devices()
        if len(devices) < count:
            raise UsageError(
                f"expected {count} {platform} devices for the bundle's mesh, found {len(devices)}",
                hint="run it on a machine that has them, or build with a smaller [mesh]",
            )
        self._all = devices[:count]
        local = self._client.process_index()
        self._local = [device for device in self._all if device.process_index == local]
        if not self._local:
            raise UsageError(
                f"expected a device of this process, number {local} of the cluster, among the "
                f"{count} of the bundle's mesh; found {len(devices)} {platform} devices in all, and "
                "none of the first is its own",
                hint="start as many processes as the mesh needs, or build with a larger [mesh]",
            )
        self._devices = _jax.DeviceList(tuple(self._all))
        # One CPU device can do without jax's Python, whose import costs as much as all of ours.
        without_jax = platform == "cpu" and mesh is None and not self.in_cluster
        without_jax = without_jax and not is_plain_start()
        self._only_device = _only_device()(self._all[0]) if without_jax else None
        self._shardings: dict[tuple[str, ...], Any] = {}
        self._shaped_array: Any = None
        self._enable_x64: Any = None
        self._lock = threading.Lock()
        self.platform = platform

    def put(self, array: np.ndarray[Any, Any], sharding: tuple[str, ...] = ()) -> DeviceArray:
        """The array on this device, or split over the mesh.

        On a CPU nothing is copied where the data is C-contiguous and aligned to 64 bytes: the device then
        reads the caller's memory, which must not change while it is in use. On a mesh the same holds for
        every shard by itself: what is split along its first dimension is not copied either, and never is
        the whole of it.

        Not through DLPack: XLA's threads drop the last reference to an array when a program ends, NumPy's
        DLPack deleter then takes the GIL, and while the interpreter shuts down that aborts the process.
        jaxlib's own references are dropped without the GIL.

        Args:
            array: the whole of it.
            sharding: the mesh axis that splits each dimension, `""` for none; empty: every device has it all.
        """
        if self._only_device is not None:
            _, _jax = _jaxlib()
            aval = _Aval(array.shape, array.dtype)
            return _jax.batched_device_put(
                aval, self._only_device, [array], self._local, enable_x64=True
            )
        if self._shaped_array is None:
            _uninterrupted(self._begin)
        shards = [array]
        placed = self._sharding(sharding)
        if self.mesh is not None:
            pieces = placed.addressable_devices_indices_map(array.shape)
            shards = [array[pieces[device]] for device in self._local]
        return self._put(array.shape, array.dtype, placed, shards)

    def zeros(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: tuple[str, ...] = ()
    ) -> DeviceArray:
        """Zeros in memory of the device's own, which a program that takes them donated writes in place.

        What `put` does not copy is the caller's, so XLA copies it when it is donated.

        Args:
            shape: of the whole.
            dtype: NumPy's.
            sharding: as of `put`.
        """
        if self._only_device is None:
            return self.put(aligned_zeros(shape, dtype), sharding)
        _, _jax = _jaxlib()
        source = _untouched_zeros(dtype.itemsize * math.prod(shape)).view(dtype).reshape(shape)
        return _jax.batched_device_put(
            _Aval(shape, dtype),
            self._only_device,
            [source],
            self._local,
            force_copy=True,
            host_buffer_semantics=_jax.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL,
            enable_x64=True,
        )

    def _put(
        self, shape: tuple[int, ...], dtype: Any, sharding: Any, shards: list[Any]
    ) -> DeviceArray:
        _, _jax = _jaxlib()
        aval = self._shaped_array(shape, dtype)
        with self._enable_x64(True):  # or 64-bit values become 32-bit ones
            return _jax.batched_device_put(aval, sharding, shards, self._local)

    def _begin(self) -> None:
        """Imports jax, and what jaxlib wants of it for a first array.

        All of it: its modules import each other in circles, and `jax/__init__` is where to enter them.
        """
        with self._lock, _imports:
            import jax  # noqa: F401
            from jax._src import config, core

            self._enable_x64 = config.enable_x64
            self._shaped_array = core.ShapedArray
            first = self._put(
                (1,),
                np.dtype(np.uint8),
                self._sharding(()),
                [np.zeros(1, np.uint8)] * len(self._local),
            )
            to_numpy(first)

    def _sharding(self, spec: tuple[str, ...]) -> Any:
        """jax's sharding for a spec of ours; of one device where there is no mesh."""
        if (known := self._shardings.get(spec)) is None:
            with _imports:
                import jax  # noqa: F401
                from jax._src import mesh, partition_spec, sharding_impls

                if self.mesh is None:
                    known = sharding_impls.SingleDeviceSharding(self._all[0])
                else:
                    grid = np.array(self._all).reshape(self.mesh.data, self.mesh.tensor)
                    axes = partition_spec.PartitionSpec(*(axis or None for axis in spec))
                    known = sharding_impls.NamedSharding(mesh.Mesh(grid, MESH_AXES), axes)
            self._shardings[spec] = known
        return known

    def load(self, serialized: bytes, path: str, results: Sequence[Array] = ()) -> Executable:
        """Deserializes an executable. The bytes must have been verified: XLA crashes on damaged ones.

        Args:
            serialized: as `Executable.serialize` gave them.
            path: the file that they came from, for errors.
            results: what it gives; a mesh wants to know. On one CPU device a program that says so runs
                without any of jax's Python.

        Raises:
            MismatchError: XLA cannot load it on this machine.
        """
        _register_library_calls(serialized)
        # Without options it runs on the devices that the compiler counted, which have other numbers in a
        # cluster.
        alone = self.mesh is None and not self.in_cluster
        options = None if alone else _compile_options(self._all)
        try:
            loaded = self._client.deserialize_executable(serialized, self._devices, options)
        except Exception as error:
            # The file is what its digest says: it is not damaged.
            raise MismatchError(
                f"{path}: XLA cannot load this executable on this machine: {error}",
                hint="the file is as it was built: look at the memory, the driver and the libraries of this "
                "machine; where those are right, build the bundle again",
            ) from error
        return self._executable(loaded, results)

    def compile(
        self, portable: bytes, platforms: Sequence[str] = (), results: Sequence[Array] = ()
    ) -> Executable:
        """Compiles a portable program for this device.

        Args:
            portable: StableHLO, a versioned portable artifact.
            platforms: that it was lowered for, in order; empty: for this one alone.
            results: as of `load`.

        Raises:
            BuildError: XLA does not compile it, or it was not lowered for this platform.
        """
        try:
            module = _stablehlo_module(portable, platforms, self.platform)
            loaded = self._client.compile_and_load(
                module, self._devices, _compile_options(self._all)
            )
        except PrejitError:
            raise
        except Exception as error:
            raise BuildError(f"XLA cannot compile this program: {error}") from error
        return self._executable(loaded, results)

    def describe(self) -> bytes:
        """Return XLA's serialized description of the device, to compile for it on another machine."""
        return topology_of(self._all[:1])

    def memory_bytes(self) -> int | None:
        """The most memory of one of its devices that was ever in use; None where nobody counts it."""
        stats = [device.memory_stats() or {} for device in self._local]
        return max((one.get("peak_bytes_in_use", 0) for one in stats), default=0) or None

    def _executable(self, loaded: Any, results: Sequence[Array]) -> Executable:
        _, _jax = _jaxlib()
        from prejit.runtime.device.dtypes import dtype_of

        if self._only_device is not None and results:
            avals = [_Aval(array.shape, dtype_of(array.dtype)) for array in results]
            handlers = [_result_handler(aval, self._only_device) for aval in avals]
            return Executable(loaded, lambda ran: ran.consume_with_handlers(handlers))
        if self._shaped_array is None:
            _uninterrupted(self._begin)
        if self.mesh is None:
            return Executable(loaded, None)
        outputs = [
            (self._shaped_array(array.shape, dtype_of(array.dtype)), self._sharding(array.sharding))
            for array in results
        ]

        def assemble(ran: Any) -> list[DeviceArray]:
            shards = ran.disassemble_into_single_device_arrays()
            return [
                _jax.ArrayImpl(aval, sharding, arrays, committed=True, _skip_checks=True)
                for (aval, sharding), arrays in zip(outputs, shards, strict=True)
            ]

        return Executable(loaded, assemble)


def _uninterrupted(work: Callable[[], None]) -> None:
    """Does work that ctrl-C must not cut off: a native module whose import was cannot be imported again.

    The main thread alone is interrupted, so another one does it; who comes next finds it done or waits.
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


def _in_cluster() -> bool:
    """Whether the host program called `jax.distributed.initialize`."""
    module = sys.modules.get("jax._src.distributed")
    state = getattr(module, "global_state", None)  # None: another thread is importing it just now
    return state is not None and state.client is not None


def _backend_of_jax(platform: str) -> Any:
    """jax's own client of a platform."""
    import jax  # all of it: a plugin registers its custom calls with it

    try:
        return jax.devices(platform)[0].client
    except RuntimeError as error:
        raise UsageError(
            f"expected a {platform} device, found none: {error}",
            hint="install jax for it, such as pip install 'jax[cuda13]', or set JAX_PLATFORMS=cpu",
        ) from error


def _compile_options(devices: Sequence[Any]) -> Any:
    """For one program over these devices, split as its shardings say (SPMD, by Shardy)."""
    xla_client, _ = _jaxlib()
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


def to_numpy(array: DeviceArray) -> np.ndarray[Any, Any]:
    """The array's values, once they are there; on a CPU a read-only view, not a copy.

    Of an array that a mesh has split, the whole is put together: a copy.

    Raises:
        UsageError: a mesh of several processes has split it, and this process holds a part only.
    """
    if isinstance(array._sharding, _only_device()):
        try:
            return np.asarray(memoryview(array))
        except BufferError:  # no dtype of Python's; or the program failed, which is told below
            array.block_until_ready()
            if array.aval.dtype.name not in _PACKED:
                return _view(array)
            _uninterrupted(_import_jax)  # jaxlib unpacks, and wants some of jax for it
    elif not array._sharding.is_fully_replicated:
        return _joined(array)
    elif (shards := array._arrays) is not None and len(shards) > 1:
        array = shards[0]
    value: np.ndarray[Any, Any] = array._single_device_array_to_np_array_did_copy()[0]
    return value


_PACKED = frozenset({"int2", "int4", "uint2", "uint4", "float4_e2m1fn"})
"""Dtypes of less than a byte. A device may hold several values in one byte; NumPy never does."""


def _import_jax() -> None:
    with _imports:
        import jax  # noqa: F401


def _joined(array: DeviceArray) -> np.ndarray[Any, Any]:
    """The values of an array that a mesh has split."""
    if not array.is_fully_addressable:
        held = len(array._arrays)
        raise UsageError(
            f"expected an array that this process can read whole, found one that a mesh has split over "
            f"{len(array._sharding.device_set)} devices, of which {held} are of this process",
            hint="let the function return it whole, or call it in one process that has all devices",
        )
    whole: np.ndarray[Any, Any] = np.asarray(array)  # as jax does it, which a mesh has imported
    return whole


def _view(array: DeviceArray) -> np.ndarray[Any, Any]:
    """What an array on our one CPU device has in memory, of a dtype that Python's buffers do not know.

    Where it lies is read from a DLPack capsule, which NumPy does not take for such a dtype. jaxlib's other
    ways import jax, in whichever thread reads first: a host program that imports jax in another one may
    then wait for ever.
    """
    _, _jax = _jaxlib()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.argtypes, pointer_of.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    capsule = _jax.buffer_to_dlpack_managed_tensor(array)
    # DLManagedTensor begins with the tensor's data (dlpack.h).
    data = ctypes.c_void_p.from_address(pointer_of(capsule, b"dltensor")).value
    memory = (ctypes.c_uint8 * array.on_device_size_in_bytes()).from_address(data or 0)
    memory.array = array  # lives as long as the view
    view = np.frombuffer(memory, array.aval.dtype).reshape(array.aval.shape)
    view.flags.writeable = False
    return view


def is_jax_array(value: Any) -> bool:
    """Whether a value is a jax.Array, without importing jax for the answer."""
    core = sys.modules.get("jaxlib._jax")
    return core is not None and isinstance(value, core.ArrayImpl)


@dataclass(frozen=True, slots=True)
class _OnCpu:
    """An array as DLPack's protocol wants it, without jax's Python."""

    array: DeviceArray

    def __dlpack__(self, **_: Any) -> Any:
        return _jaxlib()[1].buffer_to_dlpack_managed_tensor(self.array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU of dlpack.h


def to_jax(array: DeviceArray) -> Any:
    """The array as one of the host program's own jax client (ours is another).

    Nothing is copied, but what a mesh holds and dtypes that DLPack does not know.
    """
    import jax

    ours = isinstance(array._sharding, _only_device())
    if array.dtype.kind == "V" or not (ours or len(array._sharding.device_set) == 1):
        return jax.device_put(to_numpy(array))
    return jax.dlpack.from_dlpack(_OnCpu(array) if ours else array)


def _register_library_calls(program: bytes) -> None:
    """Registers the handlers of jaxlib's own library calls that a program makes.

    `import jax` registers them all, and loads SciPy's LAPACK for it; few programs want them.
    """
    for library, mark in (("lapack", b"lapack_"), ("cpu_sparse", b"cpu_csr_")):
        if mark in program:
            _register_library(library)


def register_kernels(library: bytes) -> None:
    """Makes the kernels of a library known to XLA; `register_library` of what `kernels.load` gives.

    Args:
        library: a shared library with FFI handlers `prejit_*`, verified.

    Raises:
        KernelError: this machine does not load it, or this jaxlib does not take its handlers.
    """
    register_library(kernels.load(library))


def register_library(library: kernels.Library) -> None:
    """Makes kernels known to XLA, which looks them up when it compiles or loads a program that calls them.

    Nothing is done again of a library that was registered in this process.

    Raises:
        KernelError: this jaxlib does not take its handlers.
    """
    _register_handlers(library.handlers)


def register_stand_ins(names: Iterable[str]) -> None:
    """Register custom calls under names that XLA must know to compile a program. Calling one fails."""
    _jaxlib()
    from jaxlib.cpu import _sparse  # any handler does; this one needs no other library

    _register_handlers(dict.fromkeys(names, next(iter(_sparse.registrations().values()))))


_registered: set[str] = set()
_registering = threading.Lock()


def _register_handlers(handlers: Mapping[str, Any]) -> None:
    xla_client, _jax = _jaxlib()
    # As making a client does: without it jaxlib puts registrations off, and their errors with them.
    xla_client.register_custom_call_handler("cpu", _jax.register_custom_call_target)
    with _registering:
        for name, handler in handlers.items():
            if name in _registered:
                continue
            try:
                xla_client.register_custom_call_target(name, handler, "cpu", api_version=1)
            except Exception as error:
                raise KernelError(f"XLA does not take the kernel {name}: {error}") from error
            _registered.add(name)


@functools.cache
def _register_library(name: str) -> None:
    xla_client, _ = _jaxlib()
    library = importlib.import_module(f"jaxlib.{name}")
    for platform, calls in library.registrations().items():
        for call, handler, api_version in calls:
            xla_client.register_custom_call_target(call, handler, platform, api_version=api_version)
    if name == "lapack":
        library._lapack.initialize()


def _stablehlo_module(portable: bytes, platforms: Sequence[str], platform: str) -> Any:
    """The MLIR module of a versioned portable artifact, upgraded to this jaxlib's StableHLO.

    A program for several platforms takes, as its first argument, the index of the one that it runs on
    (jax/_src/export/_export.py, "platform index"). Here that becomes a constant, and the parts that are
    for other platforms are dropped.

    Raises:
        BuildError: it was not lowered for this platform.
    """
    with _imports:
        # First, as jax does it, which a host program may import in another thread: see _imports.
        import jaxlib.mlir._mlir_libs  # noqa: F401
        from jaxlib.mlir import ir

    _, _jax = _jaxlib()
    if platforms and platform not in platforms:
        raise BuildError(
            f"expected a program for {platform}, found one for {' and '.join(platforms)} alone",
            hint="its function does not lower for other platforms: mend that and build again",
        )
    if platform == "cpu":
        _register_library_calls(portable)
    with ir.Context():
        module = _jax.mlir.deserialize_portable_artifact(portable)
        if len(platforms) > 1:
            _bind_platform(module, tuple(platforms).index(platform))
        _drop_other_platforms(module)
        return module


def _bind_platform(module: Any, index: int) -> None:
    """Replaces the first argument of `main`, the platform index, by a constant."""
    from jaxlib.mlir import ir

    main = _functions(module)["main"]
    block = main.regions[0].blocks[0]
    _make_constant(block, 0, index)
    block.erase_argument(0)
    kind = main.attributes["function_type"].value
    main.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(kind.inputs[1:], kind.results)
    )
    notes = list(main.attributes["arg_attrs"])[1:]
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(notes)


def _functions(module: Any) -> dict[str, Any]:
    """The functions of a module, by name."""
    from jaxlib.mlir import ir

    operations = (op.operation for op in module.body.operations)
    return {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in operations
        if op.name == "func.func"
    }


def _make_constant(block: Any, place: int, index: int) -> None:
    """Replaces what uses an argument of a function's block, a scalar integer, by a constant."""
    from jaxlib.mlir import ir

    argument = block.arguments[place]
    width = ir.IntegerType(ir.RankedTensorType(argument.type).element_type).width
    with ir.InsertionPoint.at_block_begin(block), ir.Location.unknown():
        value = ir.DenseElementsAttr.get(np.array(index, f"int{width}"))
        constant = ir.Operation.create(
            "stablehlo.constant", results=[argument.type], attributes={"value": value}
        )
    argument.replace_all_uses_with(constant.result)


def _drop_other_platforms(module: Any) -> None:
    """Puts the branch for this platform in place of every conditional over the platform index.

    XLA drops such branches only where it sees the index. Inside of loops and other conditionals it does not,
    and there it looks for the custom calls of all platforms.

    jax hands the index on from function to function as an argument that is marked as such
    (jax/_src/interpreters/mlir.py, "_platform_index"). It is the same at each call of one function.
    """
    functions = _functions(module)
    bound = {"main"}

    def settle(block: Any) -> None:
        left = [op.operation for op in reversed(list(block.operations))]
        while left:
            op = left.pop()
            if op.name == "stablehlo.case" and (index := _constant_of(op.operands[0])) is not None:
                # An index of no branch means the last one.
                place = index if 0 <= index < len(op.regions) else len(op.regions) - 1
                *inner, end = (each.operation for each in op.regions[place].blocks[0].operations)
                for each in inner:
                    each.move_before(op)
                for result, value in zip(op.results, end.operands, strict=True):
                    result.replace_all_uses_with(value)
                op.erase()
                left.extend(reversed(inner))
            elif op.name in _CALLS:
                called = op.attributes[_CALLS[op.name]].value
                if called not in bound:
                    bound.add(called)
                    body = functions[called].regions[0].blocks[0]
                    for place in _platform_arguments(functions[called]):
                        if (index := _constant_of(op.operands[place])) is not None:
                            _make_constant(body, place, index)
                    settle(body)
            else:
                for region in op.regions:
                    for inside in region.blocks:
                        settle(inside)

    settle(functions["main"].regions[0].blocks[0])


_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""Operations that call a function with their own operands, and the attribute that names it."""


def _platform_arguments(function: Any) -> list[int]:
    """The arguments of a function that are the platform index, by place."""
    from jaxlib.mlir import ir

    if "arg_attrs" not in function.attributes:
        return []
    notes = [ir.DictAttr(note) for note in function.attributes["arg_attrs"]]
    mark = "jax.global_constant"
    return [
        place
        for place, note in enumerate(notes)
        if mark in note and ir.StringAttr(note[mark]).value == "_platform_index"
    ]


def _constant_of(value: Any) -> int | None:
    """The integer that a scalar always is; None where that is not known."""
    from jaxlib.mlir import ir

    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    owner = owner.operation
    if owner.name == "stablehlo.convert":
        return _constant_of(owner.operands[0])
    if owner.name != "stablehlo.constant":
        return None
    constant = owner.attributes["value"]
    return int(constant[0]) if isinstance(constant, ir.DenseIntElementsAttr) else None


def import_mlir() -> None:
    """Import what every compile needs. Starts no thread, so the process can still fork safely."""
    _jaxlib()


def new_cpu_devices(count: int) -> tuple[Any, ...]:
    """Return the devices of a new CPU client that has `count` of them."""
    return tuple(_jaxlib()[0].make_cpu_client(num_devices=count).devices())


def compiles_for_topology() -> bool:
    """Return whether this jaxlib compiles for a serialized topology (0.11 and later)."""
    return hasattr(_jaxlib()[1].DeviceTopology, "deserialize")


def topology_of(devices: Sequence[Any]) -> bytes:
    """Return XLA's serialized description of devices: a PjRtTopologyDescriptionProto."""
    return bytes(_jaxlib()[1].get_topology_for_devices(devices).serialize())


def compile_ahead(
    portable: bytes,
    platforms: Sequence[str],
    platform: str,
    devices: Sequence[Any],
    topology: bytes | None = None,
) -> tuple[bytes, Memory]:
    """Compile a portable program without running it.

    Args:
        portable: StableHLO as a versioned portable artifact.
        platforms: platforms that it was lowered for, in order; empty: `platform` alone.
        platform: platform to compile for.
        devices: devices of a client of this machine, or of a topology description.
        topology: serialized topology to compile for in place of the devices' own.

    Returns:
        The serialized executable, and the memory it needs on each device while it runs.

    Raises:
        BuildError: it was not lowered for this platform.
    """
    _, _jax = _jaxlib()
    module = _stablehlo_module(portable, platforms, platform)
    options = _compile_options(devices)
    client = devices[0].client
    if topology is not None:
        compiled = client.compile(module, _jax.DeviceTopology.deserialize(topology), options)
    elif platform == "cpu":
        compiled = client.compile_and_load(module, _jax.DeviceList(devices), options)
    else:
        compiled = client.compile(module, _jax.DeviceList(devices), options)
    stats = compiled.get_compiled_memory_stats()
    memory = Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )
    return bytes(compiled.serialize()), memory


@functools.lru_cache(maxsize=4)
def _untouched_zeros(size: int) -> np.ndarray[Any, Any]:
    """So many bytes that nobody writes: the system shows all of them the same page of zeros."""
    zeros = np.zeros(size, np.uint8)
    zeros.flags.writeable = False
    return zeros


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Zeros at a 64-byte boundary, so that a CPU device takes them without a copy."""
    size = dtype.itemsize * math.prod(shape)
    raw = np.zeros(size + 64, np.uint8)  # calloc: the pages are made when they are first written
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
