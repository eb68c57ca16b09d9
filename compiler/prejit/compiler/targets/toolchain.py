"""The toolchain of a target: the interpreter, packages and flags that compile its programs.

A process has one jaxlib, so each version of jax has worker processes of its own. XLA reads its flags once,
when a process first uses it: workers take them with each request, and answer it in a fork.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.targets import cpu_count
from prejit.compiler.targets.build_host import cross_compiles
from prejit.compiler.targets.environments import Environment, worker_command
from prejit.compiler.targets.target_classes import PLUGINS, Target, capabilities
from prejit.runtime.base.files import digest_of
from prejit.runtime.device.tuning import Tuning
from prejit.runtime.errors import BuildError
from prejit.runtime.machine.fingerprint import read_xla_flags


def gpu_config(target: Target) -> str:
    """Return XLA's description of a GPU: a GpuTargetConfigProto as text.

    The fields are those of xla/stream_executor/device_description.proto. Limits that all GPUs since compute
    capability 7.0 share are from the CUDA C++ Programming Guide.
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


_REPRODUCIBLE = "--xla_cpu_parallel_codegen_split_count=1"
"""XLA flag that puts kernels into the same objects on every build host; `disassembly.narrowed` sorts these.
GPT-2's programs compile as fast as without it (2 CPUs)."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The measurements of `prejit tune` on a device.

    Attributes:
        results: XLA's autotuning results, which a worker reads from a file.
        topology: XLA's description of the device, base64.
        digest: digest of the tuning file.
    """

    results: bytes
    topology: str
    digest: str


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The tools that compile for a target.

    Attributes:
        target: the target.
        command: command that starts a worker; the store's directory and the platform follow it.
        versions: names and versions of the packages that decide an executable, sorted.
        isolated: whether it has an environment of its own, and not this process's.
        tuned: measurements of `prejit tune` on such a device; None: XLA guesses.
    """

    target: Target
    command: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    isolated: bool = False
    tuned: Tuned | None = None

    @property
    def jaxlib(self) -> str:
        """Version of the jaxlib that compiles."""
        return dict(self.versions)["jaxlib"]

    @property
    def plugin(self) -> str | None:
        """Name and version of the PJRT plugin; None: jaxlib itself compiles."""
        name = PLUGINS.get(self.target.platform)
        return None if name is None else f"{name} {dict(self.versions)[name]}"

    @property
    def is_exact(self) -> bool:
        """True if an executable uses the extensions of the target only, whatever the build host has."""
        return self.target.cpu_features is not None and cross_compiles(self.jaxlib)

    @property
    def cpus(self) -> int | None:
        """The number of CPUs that XLA sees while it compiles; None: it compiles for no CPU.

        It is the target's number wherever this machine can show it to XLA.
        """
        return cpu_count.seen_by_xla(self.target.cpus) if self.target.platform == "cpu" else None

    @property
    def process(self) -> tuple[tuple[str, ...], str]:
        """The command and platform of a worker process. Targets with the same two share workers."""
        return self.command, self.target.platform

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a worker process, without XLA_FLAGS."""
        worker = dict(inherited)
        # The first two set the size of XLA's thread pool, and with it the parts of loops: see cpu_count.py.
        for name in ("NPROC", "PJRT_NPROC", "MALLOC_ARENA_MAX", "XLA_FLAGS"):
            worker.pop(name, None)
        # Equal programs become equal executables only if the memory of a thread begins equally: not shared
        # with other threads, and without pieces in it that others gave back. See worker/worker_requests.py.
        tunables = filter(None, [worker.get("GLIBC_TUNABLES"), "glibc.malloc.tcache_count=0"])
        if self.isolated:
            for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
                worker.pop(name, None)
        if self.target.platform == "tpu":
            worker["TPU_SKIP_MDS_QUERY"] = "1"  # otherwise libtpu asks the cloud for its chips
            # Only one process may hold chips, but many compile.
            worker["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        return worker | {
            "JAX_PLATFORMS": "cpu",  # compiling for others needs their plugin, not their devices
            "PYTHONHASHSEED": "0",
            "GLIBC_TUNABLES": ":".join(tunables),
            "OPENBLAS_NUM_THREADS": "1",  # a worker forks, which is safe only without threads
        }

    def xla_flags(self, inherited: Mapping[str, str]) -> str:
        """Return XLA_FLAGS: prejit's, which the user's may override, then the target's; none of `tuned`.

        Raises:
            StoreError: XLA_FLAGS names a file, and it cannot be read.
        """
        flags = [_REPRODUCIBLE, *read_xla_flags(inherited).split(), *self.target.xla_flags]
        if self.target.xla_max_isa is not None and not self.is_exact:
            flags.append(f"--xla_cpu_max_isa={self.target.xla_max_isa}")
        return " ".join(flags)

    def worker_flags(self, inherited: Mapping[str, str], tuning_results: Path | None = None) -> str:
        """Return the XLA_FLAGS that a worker sets for this target's programs.

        Args:
            inherited: this process's variables. The user's own XLA_FLAGS stay.
            tuning_results: file with the results of `tuned`; None: the target has none.
        """
        flags = self.xla_flags(inherited)
        if tuning_results is not None:
            flags += f" --xla_gpu_load_autotune_results_from={_quoted(str(tuning_results))}"
        return flags

    def machine(self, platforms: tuple[str, ...]) -> dict[str, Any]:
        """Return the fields of `prejit.compiler.compile.worker.xla.CompileFor`, for a worker."""
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
    """Return a path as a flag's value in XLA_FLAGS, which has no escapes (xla/parse_flags_from_env.cc)."""
    if not re.search(r"\s", path):
        return path
    quote = "'" if '"' in path else '"'
    return f"{quote}{path}{quote}"


def host_toolchain(target: Target, versions: Mapping[str, str]) -> Toolchain:
    """Return a toolchain that compiles in this process's own environment."""
    command = (sys.executable, "-P", "-m", "prejit.compiler.compile.worker")
    return Toolchain(target, command, tuple(sorted(versions.items())))


def toolchain_of(target: Target, environment: Environment) -> Toolchain:
    """Return a toolchain that compiles in an environment of its own."""
    packages = ("jax", "jaxlib", *filter(None, [PLUGINS.get(target.platform)]))
    versions = tuple(sorted((name, environment.versions[name]) for name in packages))
    return Toolchain(target, tuple(worker_command(environment)), versions, isolated=True)


def read_tuning(target: Target) -> Tuned | None:
    """Return the measurements for a target; None: its manifest names no tuning file.

    Raises:
        BuildError: it was measured on another kind of device.
        RejectError, StoreError: the file is not a tuning file, or cannot be read.
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
            hint="name a file that `prejit tune` wrote on such a device, or remove `tuning`",
        )
    results = base64.b64decode(tuning.results)
    return Tuned(results, tuning.topology, digest_of(path.read_bytes()))
