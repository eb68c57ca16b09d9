"""The properties of a machine that decide whether an executable runs on it, and those that one needs.

A fingerprint is plain data. `prejit fingerprint` saves one, and another machine can compare it with a bundle.
No JAX.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prejit.runtime.base.files import store_errors
from prejit.runtime.base.typed_json import from_any_json, shown
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.records import dataclass, replace

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms that portable programs may be lowered for."""

# Matches the same as `\d+(\.[0-9A-Za-z]+)*([.+-][0-9A-Za-z.]+)?`, but in one way only, so it never
# backtracks.
_VERSION = r"\d+(?:\.[0-9A-Za-z.]+|(?:\.[0-9A-Za-z]+)*[+-][0-9A-Za-z.]+)?"
_AXIS_FORMS = {
    # field of Requirement and of Fingerprint: (its form, an example)
    "platform": (r"[a-z]+", "cpu"),
    "architecture": (r"[a-z][a-z0-9_]*", "x86_64"),
    "cpu_features": (r"[a-z0-9.\-]+", "avx2"),
    "jaxlib": (_VERSION, "0.12.0.1"),
    "plugin": (rf"[a-z0-9\-]+ {_VERSION}", "libtpu 0.0.51"),
    "cuda": (_VERSION, "13.0"),
    "driver": (_VERSION, "580.65.06"),
    "device_kind": (r"[\x20-\x7e]+", "NVIDIA L4"),
    "compute_capability": (r"\d+\.\d+", "9.0"),
    "device_count": (r"[1-9]\d*", "8"),
    "topology": (r"[1-9]\d*(?:x[1-9]\d*)*", "2x2"),
    "device_memory_bytes": (r"\d+", "16000000000"),
    "xla_flags": (r"--\S+", "--xla_cpu_enable_fast_math=true"),
    "environment": (r"[A-Z][A-Z0-9_]*=.*", "NVIDIA_TF32_OVERRIDE=0"),
    "glibc": (r"\d+(?:\.\d+)+", "2.34"),
}


def check_axes(value: Requirement | Any) -> None:
    """Check the form of every axis of a requirement or a fingerprint.

    Raises:
        ValueError: an axis has a value of another form.
    """
    for name, (form, example) in _AXIS_FORMS.items():
        found = getattr(value, name)
        for item in found if isinstance(found, tuple) else (found,):
            if item is not None and not re.fullmatch(form, str(item), re.ASCII):
                raise ValueError(f"{name}: expected the form of {example!r}, found {shown(item)}")


@dataclass(frozen=True, slots=True)
class Requirement:
    """The properties that an executable needs of a machine, called axes. None: any value will do.

    `compare.compare` has the rule of each axis, with the reason for it.

    Attributes:
        platform: `cpu`, `cuda`, `tpu`.
        architecture: architecture of the host: `x86_64`, `aarch64`.
        cpu_features: instruction-set extensions in LLVM's names.
        jaxlib: exact version, because no other version promises to load the executable.
        plugin: name and exact version of the PJRT plugin; None: jaxlib itself.
        cuda: the lowest version of the CUDA runtime; the major version must be equal.
        driver: the lowest version of the driver.
        device_kind: the name that the driver gives the device.
        compute_capability: compute capability of a GPU.
        device_count: the number of devices that a program runs on.
        topology: topology of a TPU slice.
        device_memory_bytes: the memory that the largest program needs on one device.
        xla_flags: the XLA flags of the build that change results or speed, sorted.
        environment: the environment variables of the build with such an effect, as NAME=value, sorted.
        glibc: the lowest version that loads the native kernels; None: one that jaxlib needs anyway.
    """

    platform: str
    architecture: str
    cpu_features: tuple[str, ...]
    jaxlib: str
    plugin: str | None = None
    cuda: str | None = None
    driver: str | None = None
    device_kind: str | None = None
    compute_capability: str | None = None
    device_count: int | None = None
    topology: str | None = None
    device_memory_bytes: int | None = None
    xla_flags: tuple[str, ...] | None = None
    environment: tuple[str, ...] | None = None
    glibc: str | None = None

    def __post_init__(self) -> None:
        check_axes(self)


_CPU_FEATURES = """
    64bit=lm adx aes amx-bf16=amx_bf16 amx-complex=amx_complex amx-fp16=amx_fp16 amx-int8=amx_int8
    amx-tile=amx_tile avx avx2 avx512bf16=avx512_bf16 avx512bitalg=avx512_bitalg avx512bw avx512cd
    avx512dq avx512f avx512fp16=avx512_fp16 avx512ifma avx512vbmi avx512vbmi2=avx512_vbmi2 avx512vl
    avx512vnni=avx512_vnni avx512vp2intersect=avx512_vp2intersect avx512vpopcntdq=avx512_vpopcntdq
    avxifma=avx_ifma avxneconvert=avx_ne_convert avxvnni=avx_vnni avxvnniint16=avx_vnni_int16
    avxvnniint8=avx_vnni_int8 bmi=bmi1 bmi2 clflushopt clwb clzero cmov cmpccxadd crc32=sse4_2 cx16 cx8
    f16c fma fma4 fsgsbase fxsr gfni invpcid lzcnt=abm mmx movbe movdir64b movdiri pclmul=pclmulqdq
    popcnt prfchw=3dnowprefetch rdpid rdrnd=rdrand rdseed sahf=lahf_lm serialize sha=sha_ni sse sse2
    sse3=pni sse4.1=sse4_1 sse4.2=sse4_2 sse4a ssse3 tbm vaes vpclmulqdq waitpkg xop xsave xsavec
    xsaveopt xsaves
"""
CPU_FEATURES = {
    name: flag or name for name, _, flag in (word.partition("=") for word in _CPU_FEATURES.split())
}
"""The CPU extensions that a compiler may use and that Linux reports, by LLVM's name
(llvm/lib/Target/X86/X86.td), with Linux's flag (arch/x86/include/asm/cpufeatures.h). LLVM has more (`shstk`,
tuning flags), which are not compared, as are names of CPUs: a virtual machine may show any."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The properties of a machine.

    Attributes:
        platform: the platform that programs run on by default: `cpu`, `cuda`, `tpu`.
        architecture: `x86_64`, `aarch64`.
        cpu_features: extensions that this machine has, in LLVM's names, sorted.
        jaxlib: version of jaxlib.
        cpu_model: model of the CPU; information only.
        cpu_count: CPUs that this process may use; information only.
        memory_bytes: memory of the machine; information only.
        plugin: name and version of the PJRT plugin of the accelerator.
        cuda: version of the CUDA runtime.
        driver: version of the accelerator's driver.
        device_kind: the name that the driver gives the accelerators.
        compute_capability: compute capability of the GPUs; the lowest, if they differ.
        device_count: the number of accelerators that this process sees.
        topology: topology of a TPU slice.
        device_memory_bytes: memory of the smallest accelerator.
        xla_flags, environment: XLA flags and variables that change results or speed, sorted.
        glibc: version of glibc; None: another C library, or not known.
    """

    platform: str
    architecture: str
    cpu_features: tuple[str, ...]
    jaxlib: str
    cpu_model: str
    cpu_count: int
    memory_bytes: int
    plugin: str | None = None
    cuda: str | None = None
    driver: str | None = None
    device_kind: str | None = None
    compute_capability: str | None = None
    device_count: int | None = None
    topology: str | None = None
    device_memory_bytes: int | None = None
    xla_flags: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    glibc: str | None = None

    def __post_init__(self) -> None:
        check_axes(self)

    @classmethod
    def current(cls) -> Fingerprint:
        """Return this machine's fingerprint. Takes about a millisecond, imports no jax, starts no device.

        Raises:
            UsageError: an environment variable has an impossible value.
            StoreError: XLA_FLAGS names a file that cannot be read.
        """
        from jaxlib import version

        flags, model = _linux_cpu()
        described = _accelerator()
        platform_name = described.pop("platform", "cpu")
        try:
            return cls(
                platform=platform_name,
                architecture=platform.machine(),
                cpu_features=tuple(
                    sorted(name for name, flag in CPU_FEATURES.items() if flag in flags)
                ),
                jaxlib=version.__version__,
                cpu_model=model,
                cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
                memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                xla_flags=effective_xla_flags(read_xla_flags(os.environ)),
                environment=effective_environment(platform_name, os.environ),
                glibc=_glibc(),
                **described,
            )
        except ValueError as error:
            raise UsageError(
                f"cannot identify this machine: {error}",
                hint="correct XLA_FLAGS or the variables of the accelerator, such as TPU_TOPOLOGY",
            ) from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Fingerprint:
        """Read a fingerprint that `prejit fingerprint` wrote.

        Raises:
            StoreError: the file cannot be read.
            RejectError: it is not a fingerprint.
        """
        with store_errors(
            os.fspath(path),
            "read a fingerprint",
            hint="write one with `prejit fingerprint > FILE` on the machine to describe",
        ):
            content = Path(path).read_bytes()
        try:
            # People edit this file, unlike those of a bundle, and tools such as jq write other spellings of
            # JSON.
            found = from_any_json(cls, content, os.fspath(path))
        except RejectError as error:
            error.hint = "write a fingerprint with `prejit fingerprint > FILE`"
            raise
        return replace(
            found,
            cpu_features=tuple(sorted(found.cpu_features)),
            xla_flags=tuple(sorted(found.xla_flags)),
            environment=tuple(sorted(found.environment)),
        )


def _linux_cpu() -> tuple[frozenset[str], str]:
    """Return flags and model name of the first CPU; no flags if there is no /proc/cpuinfo.

    If the cores differ, Linux shows the flags that all of them have.
    """
    flags, model = frozenset[str](), "unknown"
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                match key.strip():
                    case "flags":
                        flags = frozenset(value.split())
                    case "model name":
                        model = value.strip()
                    case "" if flags:
                        break
    except OSError:
        pass
    return flags, model


def _accelerator() -> dict[str, Any]:
    """Return the properties of the accelerator that jax would choose; empty: the CPU."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    if asked == "cpu" or (
        not asked
        and not os.path.exists("/dev/nvidiactl")
        and not os.path.exists("/proc/driver/nvidia")
        and find_spec("libtpu") is None
    ):
        return {}
    from dataclasses import asdict  # few machines have one

    from prejit.runtime.machine.accelerator import find_accelerator

    found = find_accelerator(os.environ)
    return {} if found is None else asdict(found)


def _glibc() -> str | None:
    try:
        found = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):  # another C library has no such name
        return None
    return (found or "").removeprefix("glibc ") or None


_FLAGS_WITHOUT_EFFECT = (
    # Prefixes of XLA flags that change neither results nor speed of executables
    # (xla/debug_options_flags.cc).
    *(
        "--xla_dump",
        "--xla_hlo_profile",
        "--xla_backtrace",
        "--xla_vlog",
        "--xla_gpu_cuda_data_dir",
    ),
    "--xla_cpu_parallel_codegen_split_count",  # set by prejit: the order of kernels in the file
    "--xla_force_host_platform_device_count",  # compared as the axis device_count
    *("--xla_gpu_dump_autotune", "--xla_gpu_load_autotune", "--xla_gpu_per_fusion_autotune_cache"),
    "--xla_cpu_max_isa",  # compared as the axis cpu_features
)
_ENVIRONMENT = {
    # Variables of each platform that change results or speed of compiled code.
    "cpu": (),
    # cuBLAS: TF32 for float32 products, and its deterministic mode (cuBLAS documentation).
    "cuda": ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
    "tpu": ("LIBTPU_INIT_ARGS",),  # flags of the TPU's compiler and runtime
}
_SET_BY_JAX = " --xla_tpu_use_enhanced_launch_barrier=true"
"""The flag that `import jax` appends to LIBTPU_INIT_ARGS on a TPU (jax/_src/cloud_tpu_init.py). It is
removed, so that a machine has the same fingerprint before and after the import."""


def effective_xla_flags(flags: str) -> tuple[str, ...]:
    """Return the XLA flags that change results or speed, sorted; of several with one name the last."""
    named = {flag.partition("=")[0]: flag for flag in flags.split() if flag.startswith("--")}
    return tuple(
        sorted(flag for flag in named.values() if not flag.startswith(_FLAGS_WITHOUT_EFFECT))
    )


def effective_environment(platform: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that change results or speed on a platform, as NAME=value, sorted."""
    values = {name: environ.get(name, "") for name in _ENVIRONMENT[platform]}
    values = {name: value.replace(_SET_BY_JAX, "").strip() for name, value in values.items()}
    return tuple(f"{name}={value}" for name, value in sorted(values.items()) if value)


def read_xla_flags(environ: Mapping[str, str]) -> str:
    """Return the flags in XLA_FLAGS, which holds flags or the name of a file with flags.

    Raises:
        StoreError: the file cannot be read.
    """
    flags = environ.get("XLA_FLAGS", "").strip()
    if not flags or flags.startswith("-"):
        return flags
    try:
        with open(flags, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{flags}: cannot read the file that XLA_FLAGS names: {error}",
            hint="set XLA_FLAGS to flags, which start with --, or to a file with flags",
        ) from error
