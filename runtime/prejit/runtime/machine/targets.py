"""Targets: the classes of machines that programs are compiled for. No JAX.

The catalogue (catalogue/*.toml, one file for each platform) describes targets that anybody may use. The
build side compiles for them, and `prejit explain --fleet` reports which of them a fleet lacks.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from prejit.runtime.machine.requirement import PLATFORMS, Requirement

HOST = "cpu-host"
"""The target that is the machine which builds."""

PLUGINS = {"cuda": "jax-cuda13-pjrt", "tpu": "libtpu"}
"""The package that holds the PJRT plugin of a platform."""

CUDA = "13.0"
"""The CUDA version that the plugin compiles for."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What XLA wants to know of a GPU beside its compute capability.

    Attributes:
        core_count: streaming multiprocessors.
        bandwidth_bytes: of the memory, a second.
        l2_bytes: of the second-level cache.
        clock_mhz: boost clock.
    """

    core_count: int
    bandwidth_bytes: int
    l2_bytes: int
    clock_mhz: int


@dataclass(frozen=True, slots=True)
class Capability:
    """What all GPUs of a compute capability share."""

    fpus_per_core: int
    threads_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block_optin: int


@dataclass(frozen=True, slots=True)
class Target:
    """A class of machines.

    Attributes:
        name: unique in a bundle.
        platform: `cpu`, `cuda`, `tpu`.
        architecture: of the host: `x86_64`, `aarch64`.
        cpu: LLVM's name of the CPU to tune for; None: the build host's, or none matters.
        cpu_features: LLVM's names of the extensions that code may use, sorted; None: all that the
            build host has.
        xla_max_isa: value of `--xla_cpu_max_isa` for a jaxlib before 0.11.
        device_kind: as the device's driver names it.
        compute_capability: of a GPU: `9.0`.
        memory_bytes: of one device.
        driver: the lowest that runs it.
        gpu: of a GPU.
        generation: libtpu's name of a TPU: `v5e`.
        topology: of a TPU slice, chips in each dimension: `2x2`.
        device_count: devices that a program runs on: the size of the manifest's mesh.
        xla_flags: for compiling, beside the user's own.
        jax: the version to compile with; None: the build host's.
        constraints: further packages of its environment, as pip takes them.
        tuning: path of a file that `prejit tune` wrote on such a device.
    """

    name: str
    platform: str
    architecture: str = "x86_64"
    cpu: str | None = None
    cpu_features: tuple[str, ...] | None = None
    xla_max_isa: str | None = None
    device_kind: str | None = None
    compute_capability: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    gpu: Gpu | None = None
    generation: str | None = None
    topology: str | None = None
    device_count: int = 1
    xla_flags: tuple[str, ...] = ()
    jax: str | None = None
    constraints: tuple[str, ...] = field(default=())
    tuning: str | None = None

    def requirement(
        self,
        jaxlib: str,
        *,
        plugin: str | None = None,
        cuda: str | None = None,
        cpu_features: tuple[str, ...] | None = None,
        device_memory_bytes: int | None = None,
        xla_flags: tuple[str, ...] = (),
        environment: tuple[str, ...] = (),
    ) -> Requirement:
        """What executables of this target need of a machine.

        Args:
            jaxlib: that they are compiled with.
            plugin: name and version of the PJRT plugin, where it is not jaxlib itself.
            cuda: the CUDA version that they are compiled for.
            cpu_features: that they really use; None: all that the target has.
            device_memory_bytes: that they need; None: not known.
            xla_flags: those of the build that change what runs.
            environment: variables of the build, likewise.
        """
        features = self.cpu_features if cpu_features is None else cpu_features
        return Requirement(
            platform=self.platform,
            architecture=self.architecture,
            cpu_features=features or (),
            jaxlib=jaxlib,
            plugin=plugin,
            cuda=cuda,
            driver=self.driver,
            device_kind=self.device_kind,
            compute_capability=self.compute_capability,
            device_count=None if self.platform == "cpu" else self.device_count,
            topology=self.topology,
            device_memory_bytes=device_memory_bytes,
            xla_flags=xla_flags,
            environment=environment,
        )


def chips(topology: str) -> int:
    """The number of chips of a topology such as `2x2x1`."""
    return math.prod(map(int, topology.split("x")))


@cache
def catalogue() -> dict[str, Target]:
    """Every target that is described, by name; `cpu-host` is not among them."""
    return {
        entry["name"]: _target(entry)
        for platform in PLATFORMS
        for entry in _read(platform)["target"]
    }


@cache
def capabilities() -> dict[str, Capability]:
    """What GPUs of each compute capability share."""
    return {name: Capability(**values) for name, values in _read("cuda")["capability"].items()}


@cache
def _read(platform: str) -> dict[str, Any]:
    file = resources.files("prejit.runtime.machine") / "catalogue" / f"{platform}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _target(entry: dict[str, Any]) -> Target:
    """A table of the catalogue as a Target."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    if "gpu" in values:
        values["gpu"] = Gpu(**values["gpu"])
    if "topology" in values:
        values["device_count"] = chips(values["topology"])
    return Target(**values)
