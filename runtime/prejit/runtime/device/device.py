"""A device, or a mesh of devices: put arrays on it, load or compile programs for it.

It uses jaxlib's client (PJRT) directly, below `jax.jit`: nothing is traced, and Python dispatches nothing.
One CPU device needs no module of jax; an accelerator or a mesh imports jax.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from prejit.runtime.base.process_facts import is_plain_start
from prejit.runtime.device import _jaxlib
from prejit.runtime.device.transfer import (
    DeviceArray,
    aligned_zeros,
    dtype_of,
    shared_zeros,
    to_numpy,
)
from prejit.runtime.errors import BuildError, ExecutableError, PrejitError, UsageError
from prejit.runtime.format.arrays import PACKED, Array, Mesh

_LARGE_BYTES = 4 << 20
"""Zeros of so many bytes take memory when they are written: most of a large cache never is."""


@final
class Device:
    """What programs run on: one device of this machine or a mesh of them, and the client that runs it.

    On a CPU the client is our own, so that a host program's jax is not disturbed. An accelerator has room
    for one client only, so there it is jax's. If the process takes part in a cluster
    (`jax.distributed.initialize`), the mesh spans the devices of all its processes.

    Attributes:
        platform: `cpu`, `cuda`, `tpu`.
        mesh: how programs are split over the devices; None: one device.
        in_cluster: whether the process takes part in a cluster.
        cpu_sharding: the sharding of arrays that are made without jax's Python; None: the device needs jax.
    """

    def __init__(
        self, platform: str = "cpu", mesh: Mesh | None = None, *, of_jax: bool = False
    ) -> None:
        """Start the client.

        Args:
            platform: `cpu`, `cuda`, `tpu`.
            mesh: its size is the number of devices that are used; None: one.
            of_jax: use jax's client on a CPU too, for programs on arrays of the host program's jax.

        Raises:
            UsageError: the machine has fewer devices, or jax has no such platform.
        """
        self.platform = platform
        self.mesh = mesh
        self.in_cluster = _jaxlib.in_cluster()
        count = 1 if mesh is None else mesh.size
        if platform == "cpu" and not self.in_cluster and not of_jax:
            self._client = _jaxlib.new_cpu_client(count)
        else:
            from prejit.runtime.device import _jax_parts

            self._client = _jax_parts.client_of_jax(platform)
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
        self._devices = _jaxlib.device_list(self._all)
        # One CPU device works without jax's Python, whose import takes as long as all of ours.
        without_jax = platform == "cpu" and mesh is None and not self.in_cluster
        without_jax = without_jax and not of_jax and not is_plain_start()
        self.cpu_sharding = _jaxlib.cpu_sharding(self._all[0]) if without_jax else None
        self._shardings: dict[tuple[str, ...], Any] = {}
        self._begun = False
        self._lock = threading.Lock()

    @property
    def first(self) -> Any:
        """The device of the client, the first one of a mesh; a jax.Device if the client is jax's."""
        return self._local[0]

    def put(self, array: np.ndarray[Any, Any], sharding: tuple[str, ...] = ()) -> DeviceArray:
        """Return the array on this device, or split over the mesh.

        A CPU copies nothing if the data is C-contiguous and aligned to 64 bytes. The device then reads the
        caller's memory, which must not change while it is in use. On a mesh the same holds for each shard,
        so an array that is split along its first dimension is not copied either; the whole array never is.

        DLPack is not used: XLA's threads drop the last reference to an array when a program ends, and
        NumPy's DLPack deleter then takes the GIL, which aborts the process while the interpreter shuts
        down. jaxlib drops its own references without the GIL.

        Args:
            array: the whole array.
            sharding: the mesh axis that splits each dimension, `""` for none; empty: every device has it all.
        """
        if self.cpu_sharding is not None:
            return _jaxlib.put_on_cpu(array, self.cpu_sharding, self._local[0])
        from prejit.runtime.device import _jax_parts

        if not self._begun:
            _jax_parts.uninterrupted(self._begin)
        shards = [array]
        placed = self.sharding(sharding)
        if self.mesh is not None:
            pieces = placed.addressable_devices_indices_map(array.shape)
            shards = [array[pieces[device]] for device in self._local]
        return _jax_parts.put_with_jax(array.shape, array.dtype, placed, shards, self._local)

    def zeros(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: tuple[str, ...] = ()
    ) -> DeviceArray:
        """Return zeros in the device's own memory, where a program may write if they are donated to it.

        An array that `put` did not copy lies in the caller's memory, so XLA copies it when it is donated.
        """
        if self.cpu_sharding is None:
            return self.put(aligned_zeros(shape, dtype), sharding)
        size = dtype.itemsize * math.prod(shape)
        source = shared_zeros(size).view(dtype).reshape(shape)
        array = _jaxlib.copy_to_cpu(source, self.cpu_sharding, self._local[0])
        if size >= _LARGE_BYTES and dtype.name not in PACKED:
            from prejit.runtime.base import process_memory

            process_memory.zero(to_numpy(array).ctypes.data, size)
        return array

    def copy(self, array: np.ndarray[Any, Any], sharding: tuple[str, ...] = ()) -> DeviceArray:
        """Return a copy of the array in the device's own memory, where a program may write if it is donated.

        Arguments as for `put`.
        """
        if self.cpu_sharding is None:
            return self.put(
                np.array(array, order="C") if self.platform == "cpu" else array, sharding
            )
        return _jaxlib.copy_to_cpu(array, self.cpu_sharding, self._local[0])

    def _begin(self) -> None:
        """Import jax, and whatever jaxlib imports when it makes a first array."""
        from prejit.runtime.device import _jax_parts

        with self._lock, _jaxlib.importing:
            whole = self.sharding(())
            shards = [np.zeros(1, np.uint8)] * len(self._local)
            to_numpy(_jax_parts.put_with_jax((1,), np.dtype(np.uint8), whole, shards, self._local))
            self._begun = True

    def sharding(self, split: tuple[str, ...]) -> Any:
        """Return jax's sharding for the mesh axes of an array's dimensions; empty: nothing is split."""
        if (known := self._shardings.get(split)) is None:
            from prejit.runtime.device import _jax_parts

            if self.mesh is None:
                known = _jax_parts.single_sharding(self._all[0])
            else:
                grid = np.array(self._all).reshape(*self.mesh.sizes.values())
                known = _jax_parts.mesh_sharding(grid, tuple(self.mesh.sizes), split)
            self._shardings[split] = known
        return known

    def load(self, serialized: bytes, path: str, results: Sequence[Array] = ()) -> Executable:
        """Deserialize an executable. The bytes must have been verified: XLA crashes on damaged ones.

        Args:
            serialized: as `Executable.serialize` gave them.
            path: the file that they came from, for errors.
            results: the program's results, which a mesh needs. On one CPU device a program whose results are
                given runs without jax's Python.

        Raises:
            ExecutableError: XLA cannot load it on this machine.
        """
        _jaxlib.register_library_calls(serialized)
        # Without options it runs on the device numbers of the compiler, which a cluster does not have.
        alone = self.mesh is None and not self.in_cluster
        options = None
        if not alone:
            from prejit.runtime.device import _jax_parts

            options = _jax_parts.compile_options(self._all)
        try:
            loaded = self._client.deserialize_executable(serialized, self._devices, options)
        except Exception as error:
            # The bytes match their digest, so they are not damaged.
            raise ExecutableError(
                f"{path}: XLA cannot load this executable on this machine: {error}",
                hint="the file is as it was built: look at the memory, the driver and the libraries of this "
                "machine; where those are right, build the bundle again",
            ) from error
        return self._executable(loaded, results)

    def compile(
        self, portable: bytes, platforms: Sequence[str] = (), results: Sequence[Array] = ()
    ) -> Executable:
        """Compile a portable program for this device.

        Args:
            portable: StableHLO, a versioned portable artifact.
            platforms: the platforms that it was lowered for, in order; empty: this one alone.
            results: as for `load`.

        Raises:
            BuildError: XLA does not compile it, or it was not lowered for this platform.
        """
        from prejit.runtime.device import _jax_parts  # a start seldom needs these
        from prejit.runtime.device.portable import stablehlo_module

        try:
            module = stablehlo_module(portable, platforms, self.platform)
            options = _jax_parts.compile_options(self._all)
            loaded = self._client.compile_and_load(module, self._devices, options)
        except PrejitError:
            raise
        except Exception as error:
            raise BuildError(f"XLA cannot compile this program: {error}") from error
        return self._executable(loaded, results)

    def describe(self) -> bytes:
        """Return XLA's serialized description of the device, to compile for it on another machine."""
        from prejit.runtime.device import _jax_parts

        return bytes(_jax_parts.topology_of(self._all[:1]))

    def memory_bytes(self) -> int | None:
        """Return the peak memory use of the fullest device; None: its client does not count."""
        stats = [device.memory_stats() or {} for device in self._local]
        return max((one.get("peak_bytes_in_use", 0) for one in stats), default=0) or None

    def free_memory_bytes(self) -> int | None:
        """Return what the fullest device can still allocate; None: its client does not count."""
        stats = [device.memory_stats() or {} for device in self._local]
        left = [one["bytes_limit"] - one["bytes_in_use"] for one in stats if "bytes_limit" in one]
        return min(left, default=None)

    def _executable(self, loaded: Any, results: Sequence[Array]) -> Executable:
        if self.cpu_sharding is not None and results:
            avals = [(array.shape, dtype_of(array.dtype), array.weak) for array in results]
            return Executable(loaded, _jaxlib.cpu_runner(loaded, avals, self.cpu_sharding))
        from prejit.runtime.device import _jax_parts

        if not self._begun:
            _jax_parts.uninterrupted(self._begin)
        if self.mesh is None:
            return Executable(loaded, loaded.execute)
        avals = [(array.shape, dtype_of(array.dtype), array.weak) for array in results]
        shardings = [self.sharding(array.sharding) for array in results]
        return Executable(loaded, _jax_parts.mesh_runner(loaded, avals, shardings))


class Signature(NamedTuple):
    """The arguments and results of a compiled program on each device.

    Attributes:
        arguments, results: dtype and shape of each, in NumPy's names: `("float32", (2, 3))`.
        donated: numbers of the arguments whose memory it reuses.
    """

    arguments: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    donated: frozenset[int]


@final
class Executable(NamedTuple):
    """A program loaded on a device or a mesh, ready to run.

    Attributes:
        loaded: jaxlib's executable.
        run: runs it, asynchronously. The compiled program itself checks number and sizes of arguments.
    """

    loaded: Any
    run: _jaxlib.Run

    def serialize(self) -> bytes:
        """Return the executable's bytes, for `Device.load` on the same kind of machine."""
        return bytes(self.loaded.serialize())

    def signature(self) -> Signature | None:
        """Return the arguments and results that XLA compiled; None: its plugin does not have them.

        Takes 0.3 ms for a program of 500 instructions.
        """
        head = _jaxlib.hlo_head(self.loaded)
        return None if head is None else _parse_signature(head)


_TOKENS = re.compile(r"([a-z]\w*)\[((?:\d{1,19}(?:,\d{1,19})*)?)\]|[{}]|->", re.ASCII)
_DONATED = re.compile(r"\((\d{1,19}), \{", re.ASCII)
_XLA_DTYPES = {
    **{"bool": "pred", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"},
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"s{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
}
_NUMPY_DTYPES = {xla: numpy for numpy, xla in _XLA_DTYPES.items()}
"""NumPy's names of dtypes by XLA's. All others follow one rule: `f8e4m3fn` is `float8_e4m3fn`."""


def _parse_signature(head: str) -> Signature | None:
    """Return the signature in the first line of a module's HLO text; None: the line has none.

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
