"""What a target's programs are compiled with: interpreter, packages, flags; and what of it a key holds.

XLA reads its flags once, when a process first uses it, and a process has one jaxlib. So each target has
worker processes of its own.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.store.interface import Store
from prejit.compiler.targets.build_host import cross_compiles
from prejit.compiler.targets.environments import Environment, worker_command
from prejit.runtime.base.digests import digest_of
from prejit.runtime.device.tuning import Tuning
from prejit.runtime.errors import BuildError
from prejit.runtime.machine.environment import read_xla_flags
from prejit.runtime.machine.targets import PLUGINS, Target, capabilities

_REPRODUCIBLE = "--xla_cpu_parallel_codegen_split_count=1"
"""Kernels come out in the same objects on every build host, whose order `disassembly.in_order` sets. Costs
nothing: GPT-2's programs compile as fast as without (2 CPUs)."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What `prejit tune` measured on a device, ready for a worker.

    Attributes:
        results: path of a file with XLA's autotuning results.
        topology: XLA's description of the device, base64.
        digest: of the tuning file.
    """

    results: str
    topology: str
    digest: str


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What compiles for a target.

    Attributes:
        target: what is compiled for.
        command: that starts a worker; the cache's directory and the platform are added.
        versions: of the packages in its environment that decide what comes out, by name, sorted.
        isolated: whether the environment is not this process's own.
        tuned: what was measured on such a device; None: XLA guesses.
    """

    target: Target
    command: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    isolated: bool = False
    tuned: Tuned | None = None

    @property
    def jaxlib(self) -> str:
        """The version of jaxlib that compiles."""
        return dict(self.versions)["jaxlib"]

    @property
    def plugin(self) -> str | None:
        """Name and version of the PJRT plugin; None where that is jaxlib itself."""
        name = PLUGINS.get(self.target.platform)
        return None if name is None else f"{name} {dict(self.versions)[name]}"

    @property
    def is_exact(self) -> bool:
        """Whether the code keeps to the extensions of the target, and owes nothing to the build host's."""
        return self.target.cpu_features is not None and cross_compiles(self.jaxlib)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment variables of a worker process.

        Args:
            inherited: this process's. The user's own XLA_FLAGS stay.

        Raises:
            StoreError: XLA_FLAGS names a file, and it cannot be read.
        """
        worker = dict(inherited)
        # They set the size of XLA's thread pool, which XLA partitions loops for: see cpu_count.py.
        for name in ("NPROC", "PJRT_NPROC"):
            worker.pop(name, None)
        if self.isolated:
            for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
                worker.pop(name, None)
        if self.target.platform == "tpu":
            worker["TPU_SKIP_MDS_QUERY"] = "1"  # or libtpu asks the cloud which chips it has
            worker["ALLOW_MULTIPLE_LIBTPU_LOAD"] = (
                "1"  # only one process may hold chips, but many compile
            )
        return (
            worker
            | {
                "JAX_PLATFORMS": "cpu",  # compiling for others needs their plugin, not their devices
                "XLA_FLAGS": self.xla_flags(inherited),
                "PYTHONHASHSEED": "0",
                "OPENBLAS_NUM_THREADS": "1",  # a worker forks, and only a process without threads can well
            }
        )

    def xla_flags(self, inherited: Mapping[str, str]) -> str:
        """XLA_FLAGS: ours, which the user's may override, and the target's last.

        Raises:
            StoreError: XLA_FLAGS names a file, and it cannot be read.
        """
        flags = [_REPRODUCIBLE, *read_xla_flags(inherited).split(), *self.target.xla_flags]
        if self.target.xla_max_isa is not None and not self.is_exact:
            flags.append(f"--xla_cpu_max_isa={self.target.xla_max_isa}")
        if self.tuned is not None:
            flags.append(f"--xla_gpu_load_autotune_results_from={_quoted(self.tuned.results)}")
        return " ".join(flags)

    def machine(self, platforms: tuple[str, ...]) -> dict[str, Any]:
        """The fields of `prejit.compiler.compile.xla.CompileFor`, for a worker.

        Args:
            platforms: that the program was lowered for.
        """
        target = self.target
        return {
            "platform": target.platform,
            "platforms": platforms,
            "device_count": target.device_count,
            "cpu": target.cpu,
            "cpu_features": target.cpu_features,
            "gpu": gpu_config(target) if target.platform == "cuda" else None,
            "described": self.tuned.topology if self.tuned is not None else None,
            "topology": f"{target.generation}:{target.topology}" if target.topology else None,
        }


def _quoted(path: str) -> str:
    """A path as the value of a flag in XLA_FLAGS (xla/parse_flags_from_env.cc: there are no escapes)."""
    if not re.search(r"\s", path):
        return path
    quote = "'" if '"' in path else '"'
    return f"{quote}{path}{quote}"


def host_toolchain(target: Target, versions: Mapping[str, str]) -> Toolchain:
    """A target's toolchain where this process's own environment compiles for it.

    Args:
        target: what is compiled for.
        versions: of jax and jaxlib here.
    """
    command = (sys.executable, "-P", "-m", "prejit.compiler.compile.worker")
    return Toolchain(target, command, tuple(sorted(versions.items())))


def toolchain_of(target: Target, environment: Environment) -> Toolchain:
    """A target's toolchain where an environment of its own compiles for it."""
    packages = ("jax", "jaxlib", *filter(None, [PLUGINS.get(target.platform)]))
    versions = tuple(sorted((name, environment.versions[name]) for name in packages))
    return Toolchain(target, tuple(worker_command(environment)), versions, isolated=True)


def gpu_config(target: Target) -> str:
    """A GPU as XLA wants it described: GpuTargetConfigProto as text.

    Its fields are those of xla/stream_executor/device_description.proto. Limits that all GPUs since compute
    capability 7.0 share are those of the CUDA C++ Programming Guide.
    """
    gpu, shared = target.gpu, capabilities()[target.compute_capability or ""]
    assert gpu is not None
    major, minor = (target.compute_capability or "").split(".")
    limits = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": shared.shared_bytes_per_core,
        "shared_memory_per_block_optin": shared.shared_bytes_per_block_optin,
        "threads_per_core_limit": shared.threads_per_core,
        "core_count": gpu.core_count,
        "fpus_per_core": shared.fpus_per_core,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": gpu.bandwidth_bytes,
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_mhz / 1000,
        "device_memory_size": target.memory_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    lines = [f"  {name}: {value}" for name, value in limits.items()]
    return "\n".join(
        (
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 12 }",  # the lowest cuDNN that jax's plugin takes
            f'device_description_str: "{target.device_kind}"',
        )
    )


def read_tuning(target: Target, cache: Store) -> Tuned | None:
    """What was measured for a target; None where its manifest names no tuning.

    Args:
        target: what is compiled for.
        cache: where XLA's part of it goes, as a file of its own.

    Raises:
        BuildError: it was measured with another jaxlib, or on another kind of device.
        RejectError, StoreError: it is no tuning file, or cannot be read.
    """
    if target.tuning is None:
        return None
    path = Path(target.tuning)
    tuning = Tuning.read(path)
    measured = tuning.machine
    if measured.compute_capability != target.compute_capability:
        raise BuildError(
            f"{path}: expected tuning for compute capability {target.compute_capability} of target "
            f"{target.name}, found {measured.compute_capability} ({measured.device_kind})",
            hint="name the tuning of such a device, or leave `tuning` out",
        )
    results = base64.b64decode(tuning.results)
    digest = cache.put_blob(results)
    stored = cache.blob_path(digest)
    assert stored is not None
    return Tuned(str(stored), tuning.topology, digest_of(path.read_bytes()))
