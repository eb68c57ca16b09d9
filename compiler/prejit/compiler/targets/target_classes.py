"""Targets: the classes of machines that programs are compiled for. No JAX.

The catalogue (catalogue/*.toml, one file for each platform) describes targets that anybody may use. The
build side compiles for them, and `prejit fleet` reports which of them a fleet lacks.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, ClassVar

from prejit.runtime.machine.fingerprint import PLATFORMS, Requirement

HOST = "cpu-host"
"""The name of the target that is the build host."""

PLUGINS = {"cuda": "jax-cuda13-pjrt", "tpu": "libtpu"}
"""The package with the PJRT plugin of each platform."""

CUDA = "13.0"
"""The version of CUDA that the plugin compiles for."""

CPUS = 16
"""The number of CPUs that programs for a CPU are partitioned for, unless a target gives another: those of a
small server. XLA splits a loop that computes into at most as many parts, and a loop that waits for memory
into its square root. All threads of a machine share the parts."""


@dataclass(frozen=True, slots=True)
class GpuTable:
    """`gpu` of a `[[target]]`, or of the catalogue: what XLA needs beside the compute capability.

    Attributes:
        core_count: number of streaming multiprocessors.
        bandwidth_bytes: memory bandwidth in bytes a second.
        l2_bytes: size of the L2 cache in bytes.
        clock_mhz: highest clock rate in MHz.
    """

    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid"}

    core_count: int
    bandwidth_bytes: int
    l2_bytes: int
    clock_mhz: int


@dataclass(frozen=True, slots=True)
class Capability:
    """The properties that all GPUs of a compute capability share."""

    fpus_per_core: int
    threads_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block_optin: int


@dataclass(frozen=True, slots=True)
class Target:
    """A class of machines that programs are compiled for.

    Attributes:
        name: unique in a bundle.
        platform: `cpu`, `cuda`, `tpu`.
        architecture: architecture of the host: `x86_64`, `aarch64`.
        cpu: LLVM's name of the CPU to tune for; None: the build host's CPU, or no CPU code.
        cpu_features: LLVM's names of the extensions that code may use, sorted; None: all extensions of the
            build host.
        xla_max_isa: value of `--xla_cpu_max_isa` for a jaxlib before 0.11.
        device_count: the number of devices that a program runs on: the size of the manifest's mesh.
        jax: the version of jax to compile with; None: the build host's.
        cpus, device_kind, compute_capability, memory_bytes, driver, gpu, generation, topology, xla_flags,
            constraints, tuning: as of `target_table.TargetTable`.
    """

    name: str
    platform: str
    architecture: str = "x86_64"
    cpu: str | None = None
    cpu_features: tuple[str, ...] | None = None
    xla_max_isa: str | None = None
    cpus: int = CPUS
    device_kind: str | None = None
    compute_capability: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    gpu: GpuTable | None = None
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
        """Return the requirement of this target's executables.

        Args:
            jaxlib: version of jaxlib that compiles them.
            plugin: name and version of the PJRT plugin; None: jaxlib itself.
            cuda: the version of CUDA that they are compiled for.
            cpu_features: the extensions that they use; None: all extensions of the target.
            device_memory_bytes: the memory that they need; None: not known.
            xla_flags: XLA flags of the build that change results or speed.
            environment: environment variables of the build with such an effect, as NAME=value.
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
    """Return the number of chips of a topology such as `2x2x1`."""
    return math.prod(map(int, topology.split("x")))


@cache
def catalogue() -> dict[str, Target]:
    """Return every target of the catalogue, by name. `cpu-host` is not one of them."""
    return {
        entry["name"]: _target(entry)
        for platform in PLATFORMS
        for entry in _read(platform)["target"]
    }


@cache
def capabilities() -> dict[str, Capability]:
    """Return the properties that GPUs share, by compute capability."""
    return {name: Capability(**values) for name, values in _read("cuda")["capability"].items()}


@cache
def _read(platform: str) -> dict[str, Any]:
    file = resources.files("prejit.compiler.targets") / "catalogue" / f"{platform}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _target(entry: dict[str, Any]) -> Target:
    """Return the target that a table of the catalogue describes."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    if "gpu" in values:
        values["gpu"] = GpuTable(**values["gpu"])
    if "topology" in values:
        values["device_count"] = chips(values["topology"])
    return Target(**values)
