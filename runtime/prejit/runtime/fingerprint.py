"""What a machine is, what an executable needs of it, and their comparison, axis by axis. No JAX.

A fingerprint is plain data: it can be saved (`prejit fingerprint`) and compared on another machine.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prejit.runtime import bundle
from prejit.runtime.accelerator import find_accelerator
from prejit.runtime.bundle import Requirement
from prejit.runtime.errors import RejectError, StoreError, UsageError

CPU_FEATURES = {
    # LLVM's name (llvm/lib/Target/X86/X86.td) -> Linux's flag (arch/x86/include/asm/cpufeatures.h).
    # CPU names are not compared: a virtual machine may show any name with any set of features.
    "64bit": "lm",
    "adx": "adx",
    "aes": "aes",
    "amx-bf16": "amx_bf16",
    "amx-complex": "amx_complex",
    "amx-fp16": "amx_fp16",
    "amx-int8": "amx_int8",
    "amx-tile": "amx_tile",
    "avx": "avx",
    "avx2": "avx2",
    "avx512bf16": "avx512_bf16",
    "avx512bitalg": "avx512_bitalg",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512f": "avx512f",
    "avx512fp16": "avx512_fp16",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vl": "avx512vl",
    "avx512vnni": "avx512_vnni",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxifma": "avx_ifma",
    "avxneconvert": "avx_ne_convert",
    "avxvnni": "avx_vnni",
    "avxvnniint16": "avx_vnni_int16",
    "avxvnniint8": "avx_vnni_int8",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "clflushopt": "clflushopt",
    "clwb": "clwb",
    "clzero": "clzero",
    "cmov": "cmov",
    "cmpccxadd": "cmpccxadd",
    "crc32": "sse4_2",
    "cx16": "cx16",
    "cx8": "cx8",
    "f16c": "f16c",
    "fma": "fma",
    "fma4": "fma4",
    "fsgsbase": "fsgsbase",
    "fxsr": "fxsr",
    "gfni": "gfni",
    "invpcid": "invpcid",
    "lzcnt": "abm",
    "mmx": "mmx",
    "movbe": "movbe",
    "movdir64b": "movdir64b",
    "movdiri": "movdiri",
    "pclmul": "pclmulqdq",
    "popcnt": "popcnt",
    "prfchw": "3dnowprefetch",
    "rdpid": "rdpid",
    "rdrnd": "rdrand",
    "rdseed": "rdseed",
    "sahf": "lahf_lm",
    "serialize": "serialize",
    "sha": "sha_ni",
    "sse": "sse",
    "sse2": "sse2",
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "sse4a": "sse4a",
    "ssse3": "ssse3",
    "tbm": "tbm",
    "vaes": "vaes",
    "vpclmulqdq": "vpclmulqdq",
    "waitpkg": "waitpkg",
    "xop": "xop",
    "xsave": "xsave",
    "xsavec": "xsavec",
    "xsaveopt": "xsaveopt",
    "xsaves": "xsaves",
}
"""Extensions that a compiler may use and that Linux tells of. Others (`shstk`, tuning) do not count."""


_FLAGS_WITHOUT_EFFECT = (
    # Prefixes of XLA flags that change neither results nor speed of what is loaded
    # (xla/debug_options_flags.cc).
    *(
        "--xla_dump",
        "--xla_hlo_profile",
        "--xla_backtrace",
        "--xla_vlog",
        "--xla_gpu_cuda_data_dir",
    ),
    "--xla_cpu_parallel_codegen_split_count",  # ours: the order of kernels in the file
    "--xla_force_host_platform_device_count",  # the axis device_count is about it
    *("--xla_gpu_dump_autotune", "--xla_gpu_load_autotune", "--xla_gpu_per_fusion_autotune_cache"),
    "--xla_cpu_max_isa",  # the axis cpu_features is about it
)
_ENVIRONMENT = {
    # Variables of each platform that change results or speed of compiled code.
    "cpu": (),
    # cuBLAS: TF32 for float32 products, and its deterministic mode (cuBLAS documentation).
    "cuda": ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
    "tpu": ("LIBTPU_INIT_ARGS",),  # flags of the TPU's compiler and runtime
}
_SET_BY_JAX = " --xla_tpu_use_enhanced_launch_barrier=true"
"""`import jax` appends it to LIBTPU_INIT_ARGS on a TPU (jax/_src/cloud_tpu_init.py): before and after the
import, a machine is the same one."""


def effective_xla_flags(flags: str) -> tuple[str, ...]:
    """Those of XLA_FLAGS that change what compiled code gives or how fast; sorted, the last of a name."""
    named = {flag.partition("=")[0]: flag for flag in flags.split() if flag.startswith("--")}
    return tuple(
        sorted(flag for flag in named.values() if not flag.startswith(_FLAGS_WITHOUT_EFFECT))
    )


def effective_environment(platform: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those variables that change what compiled code of a platform gives or how fast; sorted."""
    values = {name: environ.get(name, "") for name in _ENVIRONMENT[platform]}
    values = {name: value.replace(_SET_BY_JAX, "").strip() for name, value in values.items()}
    return tuple(f"{name}={value}" for name, value in sorted(values.items()) if value)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a machine is.

    Attributes:
        platform: the one that programs run on unless told otherwise: `cpu`, `cuda`, `tpu`.
        architecture: `x86_64`, `aarch64`.
        cpu_features: extensions that this machine has, in LLVM's names, sorted.
        jaxlib: its version.
        cpu_model: information only.
        cpu_count: cores that this process may use; information only.
        memory_bytes: of the machine; information only.
        plugin: name and version of the PJRT plugin of the accelerator.
        cuda: version of the CUDA runtime.
        driver: version of the accelerator's driver.
        device_kind: of the accelerators, as their driver names them.
        compute_capability: of a GPU; of the least, where they differ.
        device_count: accelerators that this process sees.
        topology: of a TPU slice.
        device_memory_bytes: of the smallest accelerator.
        xla_flags, environment: those in force that change results or speed; sorted.
        glibc: its version; None: another C library, or nobody looked.
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
        bundle.check_axes(self)

    @classmethod
    def current(cls) -> Fingerprint:
        """This machine's. Costs about a millisecond; neither jax nor a device is touched.

        Raises:
            UsageError: an environment variable says something that cannot be.
            StoreError: XLA_FLAGS names a file that cannot be read.
        """
        from jaxlib import version

        flags, model = _linux_cpu()
        found = find_accelerator(os.environ)
        described = {} if found is None else found.described()
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
                f"this machine is not told as any is: {error}",
                hint="look at XLA_FLAGS and at the variables of the accelerator, such as TPU_TOPOLOGY",
            ) from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Fingerprint:
        """A fingerprint saved with `prejit fingerprint`.

        Raises:
            StoreError: the file cannot be read.
            RejectError: it is not a fingerprint.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise StoreError(
                f"{os.fspath(path)}: cannot read a fingerprint: {error.strerror}",
                hint="write one with `prejit fingerprint > FILE` on the machine that it is of",
            ) from error
        try:
            # A person's file, unlike those of a bundle: editors and jq spell JSON as they like.
            found = bundle.from_any_json(cls, content, os.fspath(path))
        except RejectError as error:
            error.hint = "write a fingerprint with `prejit fingerprint > FILE`"
            raise
        return replace(
            found,
            cpu_features=tuple(sorted(found.cpu_features)),
            xla_flags=tuple(sorted(found.xla_flags)),
            environment=tuple(sorted(found.environment)),
        )


@dataclass(frozen=True, slots=True)
class Axis:
    """One line of a verdict.

    Attributes:
        name: of the axis, as `compare` lists them.
        rule: `equal`, `subset`, `at least`, `information`.
        needed, found: in words.
        matches: whether what was found satisfies what is needed.
    """

    name: str
    rule: str
    needed: str
    found: str
    matches: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a requirement with a fingerprint.

    Attributes:
        target: name of the target that has the requirement.
        axes: every axis, whether it matches or not.
    """

    target: str
    axes: tuple[Axis, ...]

    @property
    def matches(self) -> bool:
        """Whether the target's executables run on the machine."""
        return all(axis.matches for axis in self.axes)

    @property
    def mismatches(self) -> tuple[Axis, ...]:
        """The axes that do not match."""
        return tuple(axis for axis in self.axes if not axis.matches)

    @property
    def distance(self) -> tuple[bool, int]:
        """How far the target is from fitting: one of the machine's own platform is nearer than any other."""
        wrong = self.mismatches
        return any(axis.name == "platform" for axis in wrong), len(wrong)

    def reason(self) -> str:
        """Why the target does not fit, in one phrase: each axis, what was needed and what was found."""
        return "; ".join(f"{a.name}: needs {a.needed}, found {a.found}" for a in self.mismatches)


def compare(target: str, needs: Requirement, machine: Fingerprint) -> Verdict:
    """Compares what a target's executables need with what a machine is.

    - platform: equal; a client of one platform reads no executable of another.
    - architecture: equal; machine code is of one, and so is the host's part of an accelerator's program.
    - cpu_features: a subset. Code with an instruction that the machine lacks dies of SIGILL, and XLA
      does not check. More than is needed does no harm.
    - jaxlib: equal. The serialized form has no promise from one version to the next
      (xla/pjrt/pjrt_executable.h), even where a neighbouring version happens to load it.
    - plugin: equal, likewise: it is what compiled the code and what reads it.
    - cuda: at least, within a major version (CUDA Compatibility, "minor version compatibility").
    - driver: at least (CUDA Toolkit release notes: each toolkit has a lowest driver; CUDA Compatibility:
      a later driver runs what was built for an earlier one).
    - device_kind: equal for a TPU, whose code is of one chip. For a GPU information only: XLA wants the
      same compute capability (xla/service/gpu/gpu_executable.cc, CheckCompatibility) and takes any
      board that has it; what is tuned for another board runs, somewhat slower.
    - compute_capability: equal, likewise.
    - device_count: at least; a program runs on the first of them. CPU devices are virtual, a process
      makes as many as it wants.
    - topology: equal; collectives are routed at compile time (xla/pjrt/pjrt_compiler.h: an executable is
      compiled for one PjRtTopologyDescription).
    - device_memory: at least; beyond it the first call ends in RESOURCE_EXHAUSTED.
    - glibc: at least; the dynamic linker refuses a library that wants symbols of a later one (LSB, "Symbol
      Versioning").
    - xla_flags, environment: equal. They are baked into an executable (xla/xla.proto, DebugOptions; the
      cuBLAS and libtpu documentation), so that what an operator sets on a server would be ignored
      without a word.

    An axis that the requirement does not speak of is left out.
    """
    rows = [
        _equal("platform", needs.platform, machine.platform),
        _equal("architecture", needs.architecture, machine.architecture),
        _subset("cpu_features", needs.cpu_features, machine.cpu_features),
        _equal("jaxlib", needs.jaxlib, machine.jaxlib),
    ]
    if needs.plugin is not None:
        rows.append(_equal("plugin", needs.plugin, machine.plugin))
    if needs.cuda is not None:
        rows.append(_at_least_version("cuda", needs.cuda, machine.cuda, same_major=True))
    if needs.driver is not None:
        rows.append(_at_least_version("driver", needs.driver, machine.driver))
    if needs.device_kind is not None:
        rule = "equal" if needs.platform == "tpu" else "information"
        row = _equal("device_kind", needs.device_kind, machine.device_kind)
        rows.append(row if rule == "equal" else replace(row, rule=rule, matches=True))
    if needs.compute_capability is not None:
        rows.append(
            _equal("compute_capability", needs.compute_capability, machine.compute_capability)
        )
    if needs.device_count is not None:
        virtual = needs.platform == "cpu"
        found = machine.device_count or 0
        matches = virtual or found >= needs.device_count
        shown = "virtual devices" if virtual else str(found or "none")
        rows.append(Axis("device_count", "at least", str(needs.device_count), shown, matches))
    if needs.topology is not None:
        rows.append(_equal("topology", needs.topology, machine.topology))
    if needs.device_memory_bytes is not None:
        rows.append(
            _at_least_bytes("device_memory", needs.device_memory_bytes, machine.device_memory_bytes)
        )
    if needs.glibc is not None:
        rows.append(_at_least_version("glibc", needs.glibc, machine.glibc))
    if needs.xla_flags is not None:
        rows.append(_same("xla_flags", needs.xla_flags, machine.xla_flags))
    if needs.environment is not None:
        rows.append(_same("environment", needs.environment, machine.environment))
    return Verdict(target, tuple(rows))


def preference(needs: Requirement, machine: Fingerprint) -> tuple[bool, int, int]:
    """What targets that fit a machine are sorted by; the first is taken, of equals the index's first.

    What is tuned for the machine's very device comes first, then what has the widest vectors, then what
    uses most of its CPU. Not the last alone: code for x86-64-v2 may use as many extensions as code for
    v3, each of them of 128 bits.
    """
    features = needs.cpu_features
    width = max((_vector_bits(name) for name in features), default=0)
    return needs.device_kind != machine.device_kind, -width, -len(features)


def _vector_bits(feature: str) -> int:
    if feature.startswith(("avx512", "amx")):
        return 512
    return 256 if feature.startswith(("avx", "fma", "f16c")) else 128


def _equal(name: str, needed: str, found: str | None) -> Axis:
    return Axis(name, "equal", needed or "none", found or "none", needed == (found or ""))


def _same(name: str, needed: tuple[str, ...], found: tuple[str, ...]) -> Axis:
    return Axis(
        name, "equal", " ".join(needed) or "none", " ".join(found) or "none", needed == found
    )


def _subset(name: str, needed: tuple[str, ...], found: tuple[str, ...]) -> Axis:
    missing = sorted(set(needed) - set(found))
    return Axis(
        name,
        "subset",
        f"{len(needed)} extensions",
        f"all but {' '.join(missing)}" if missing else "all of them",
        not missing,
    )


def _at_least_version(
    name: str, needed: str, found: str | None, *, same_major: bool = False
) -> Axis:
    rule = "at least, same major" if same_major else "at least"
    if found is None:
        return Axis(name, rule, needed, "none", False)
    needs, has = (version_key(text) for text in (needed, found))
    has += version_key("0") * (len(needs) - len(has))  # 13 is 13.0
    return Axis(name, rule, needed, found, has >= needs and (not same_major or has[0] == needs[0]))


def version_key(text: str) -> list[tuple[int, str]]:
    """The numbers of a version, to be compared; as text, since they may have any number of digits."""
    numbers = (part.lstrip("0") for part in re.findall(r"[0-9]+", text))
    return [(len(number), number) for number in numbers]


def _at_least_bytes(name: str, needed: int, found: int | None) -> Axis:
    if found is None:
        return Axis(name, "at least", f"{needed / 1e9:.2f} GB", "unknown", False)
    shown = [f"{size / 1e9:.2f} GB" for size in (needed, found)]
    if shown[0] == shown[1] and needed > found:  # both sides must show what differs
        shown = [f"{size} bytes" for size in (needed, found)]
    return Axis(name, "at least", shown[0], shown[1], found >= needed)


def _linux_cpu() -> tuple[frozenset[str], str]:
    """Flags and model name of the first processor; empty where there is no /proc/cpuinfo.

    A machine with cores of two kinds shows the flags that all of them have (Linux clears the others).
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


def _glibc() -> str | None:
    try:
        found = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):  # another C library does not know the name
        return None
    return (found or "").removeprefix("glibc ") or None


def read_xla_flags(environ: Mapping[str, str]) -> str:
    """XLA_FLAGS as flags: XLA takes the flags themselves, or the name of a file with them.

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
