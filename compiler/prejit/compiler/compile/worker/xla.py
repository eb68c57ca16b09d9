"""Compile a portable program with XLA for a machine that is described in data and need not be this one."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prejit.compiler.compile.compile_jobs import CANNOT_COMPILE
from prejit.compiler.compile.recorded_lowering import RecordedLowering
from prejit.compiler.compile.stablehlo_contents import WITHOUT_CUDNN, has_plain_convolutions
from prejit.compiler.compile.worker.xla_messages import message_bytes, read_message
from prejit.runtime.device import _jax_parts, _jaxlib
from prejit.runtime.device.portable import stablehlo_module
from prejit.runtime.errors import BuildError, PrejitError
from prejit.runtime.format.bundle_schema import Memory


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program compiled for a target.

    Attributes:
        serialized: the executable, which `Device.load` reads.
        memory: memory that it needs on each device while it runs.
        cpu_features: CPU extensions that its instructions use, in LLVM's names, once they were read.
    """

    serialized: bytes
    memory: Memory
    cpu_features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CompileFor:
    """The machine to compile for. It need not be this one.

    Attributes:
        platform: `cpu`, `cuda`, `tpu`.
        platforms: platforms that the program was lowered for, in order; empty: `platform` alone.
        device_count: number of devices in the mesh.
        cpu: LLVM's name of the CPU to tune for; None: this machine's.
        cpu_features: LLVM's names of the extensions that may be used; None: all of this machine's.
            Ignored by jaxlib before 0.11.
        gpu: XLA's description of a GPU: a GpuTargetConfigProto as text.
        described: XLA's description of one GPU from `Device.describe`, base64; replaces `gpu`.
        topology: libtpu's name of a slice of TPUs: `v5e:2x2`.
    """

    platform: str = "cpu"
    platforms: tuple[str, ...] = ()
    device_count: int = 1
    cpu: str | None = None
    cpu_features: tuple[str, ...] | None = None
    gpu: str | None = None
    described: str | None = None
    topology: str | None = None


def import_compiler(platform: str) -> None:
    """Import what compiling for a platform needs. Starts no thread, so the process can still fork safely."""
    _jaxlib.import_jaxlib()
    if platform == "cpu":  # what reads executables: a tenth of a second in each fork
        import iced_x86  # noqa: F401
        from google.protobuf import message_factory  # noqa: F401
    else:
        from jax.experimental import topologies  # noqa: F401


def compile_portable(
    portable: bytes, machine: CompileFor = CompileFor(), stand_ins: tuple[str, ...] = ()
) -> CompiledProgram:
    """Compile a portable program, or a RecordedLowering, for a machine.

    `stand_ins` are names of a recorded program's handlers that were registered to compile it.

    Raises:
        BuildError: XLA cannot compile it.
    """
    recorded = RecordedLowering.of(portable) if RecordedLowering.is_in(portable) else None
    program = portable if recorded is None else recorded.portable
    topology = None
    try:
        if machine.platform == "cpu":
            devices = _jaxlib.new_cpu_client(machine.device_count).devices()
            cpu, features = machine.cpu, machine.cpu_features
            if cpu and features is not None and _jax_parts.compiles_for_topology():
                topology = _with_cpu(_jax_parts.topology_of(devices), cpu, features)
        else:
            devices = _described_devices(machine)
        options = _jax_parts.compile_options(devices)
        if recorded is not None:
            options = type(options).ParseFromString(recorded.options)
        lowered_for = machine.platforms, machine.platform
        tuned = machine.described is not None
        if has_plain_convolutions(program, *lowered_for, tuned=tuned):
            options.env_option_overrides = [*options.env_option_overrides, *WITHOUT_CUDNN]
        serialized, memory = _compile_ahead(program, *lowered_for, devices, options, topology)
    except PrejitError:
        raise
    except Exception as error:
        unknown = re.search(r"No FFI handler registered for (\S+)", str(error))
        may_stand_in = recorded is not None and machine.platform == "cpu"
        if may_stand_in and unknown and unknown[1] not in stand_ins:
            # Whoever starts the recorded program registers this handler, as its process did.
            register_stand_ins([unknown[1]])
            return compile_portable(portable, machine, (*stand_ins, unknown[1]))
        hint = None
        if unknown is not None and recorded is None:
            hint = (
                "if the handler is in a library of yours, name it in the manifest: [[library]] with its "
                f"path and handlers = {{ {unknown[1]} = SYMBOL }}"
            )
        raise BuildError(f"{CANNOT_COMPILE}: {error}", hint=hint) from error
    return CompiledProgram(serialized, memory)


def _described_devices(machine: CompileFor) -> tuple[Any, ...]:
    """Return devices that exist as a description only, from a PJRT plugin that is installed here."""
    from jax.experimental import topologies

    read: Any = getattr(topologies.TopologyDescription, "deserialize", None)  # since jax 0.11
    try:
        if machine.platform == "cuda":
            shape = f"1x1x{machine.device_count}"  # slices x hosts x devices of a host
            found = topologies.get_topology_desc(
                platform="cuda", target_config=machine.gpu, topology=shape
            )
            if machine.described is not None and machine.device_count == 1 and read is not None:
                found = read(base64.b64decode(machine.described))  # the plugin is initialized now
        else:
            found = topologies.get_topology_desc(
                machine.topology or "", platform="tpu", **_one_host(machine.topology or "")
            )
    except NotImplementedError as error:
        raise BuildError(
            f"expected jax's plugin for {machine.platform}, found none: {error}"
        ) from error
    if len(found.devices) < machine.device_count:
        raise BuildError(
            f"expected {machine.device_count} devices, found {len(found.devices)} in {machine.topology}"
        )
    return tuple(found.devices[: machine.device_count])


def _one_host(topology: str) -> dict[str, Any]:
    """Return libtpu's options for a slice that one host holds: 8 chips in two dimensions, 4 in three.

    libtpu itself assumes 2x2 chips a host, which does not fit one chip (before 0.0.51), and splits a 2x4
    slice into two hosts.
    """
    shape = tuple(map(int, topology.partition(":")[2].split("x")))
    fits = math.prod(shape) <= (8 if len(shape) == 2 else 4)
    return {"chips_per_host_bounds": (*shape, 1)[:3]} if fits else {}


def _with_cpu(topology: bytes, cpu: str, features: tuple[str, ...]) -> bytes:
    """Return a serialized topology of this machine with another CPU in it."""
    read = read_message("Topology", topology)
    machine = read.platform.value.machine
    machine.cpu, machine.features = cpu, ",".join(f"+{name}" for name in features)
    return message_bytes(read)


def _compile_ahead(
    portable: bytes,
    platforms: Sequence[str],
    platform: str,
    devices: Sequence[Any],
    options: Any,
    topology: bytes | None = None,
) -> tuple[bytes, Memory]:
    """Compile a portable program without running it.

    `devices` are those of a client of this machine, or of a topology description; `options` are XLA's
    CompileOptions; `topology` is a serialized one to compile for in place of theirs. Other arguments and
    errors as `stablehlo_module`.

    Returns:
        The serialized executable, and the memory it needs on each device while it runs.
    """
    module = stablehlo_module(portable, platforms, platform)
    client = devices[0].client
    if topology is not None:
        compiled = client.compile(module, _jax_parts.deserialize_topology(topology), options)
    else:
        compile_ = client.compile_and_load if platform == "cpu" else client.compile
        compiled = compile_(module, _jaxlib.device_list(devices), options)
    stats = compiled.get_compiled_memory_stats()
    memory = Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )
    return bytes(compiled.serialize()), memory


def register_stand_ins(names: Iterable[str]) -> None:
    """Register custom calls under names that XLA must know to compile a program. Calling one fails."""
    if names := tuple(names):
        _jaxlib.register_handlers(dict.fromkeys(names, _jax_parts.any_handler()))
