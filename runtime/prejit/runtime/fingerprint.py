"""What a machine is, what an executable needs of it, and their comparison, axis by axis. No JAX.

A fingerprint is plain data: it can be saved (`prejit fingerprint`) and compared on another machine.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from prejit.runtime import bundle
from prejit.runtime.bundle import Requirement
from prejit.runtime.errors import RejectError, StoreError

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


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a machine is.

    Attributes:
        platform: `cpu`.
        architecture: `x86_64`, `aarch64`.
        cpu_features: extensions that this machine has, in LLVM's names, sorted.
        jaxlib: its version.
        cpu_model: information only.
        cpu_count: cores that this process may use; information only.
        memory_bytes: of the machine; information only.
    """

    platform: str
    architecture: str
    cpu_features: tuple[str, ...]
    jaxlib: str
    cpu_model: str
    cpu_count: int
    memory_bytes: int

    @classmethod
    def current(cls) -> Fingerprint:
        """This machine's. Costs about a millisecond; neither jax nor a device is touched."""
        from jaxlib import version

        flags, model = _linux_cpu()
        return cls(
            platform="cpu",
            architecture=platform.machine(),
            cpu_features=tuple(
                sorted(name for name, flag in CPU_FEATURES.items() if flag in flags)
            ),
            jaxlib=version.__version__,
            cpu_model=model,
            cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )

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
            return bundle.from_json(cls, content.rstrip(b"\n"), os.fspath(path))
        except RejectError as error:
            error.hint = "write a fingerprint with `prejit fingerprint > FILE`"
            raise


@dataclass(frozen=True, slots=True)
class Axis:
    """One line of a verdict.

    Attributes:
        name: of the axis: `platform`, `architecture`, `cpu_features`, `jaxlib`.
        rule: `equal`, `subset`.
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

    def reason(self) -> str:
        """Why the target does not fit, in one phrase: each axis, what was needed and what was found."""
        return "; ".join(f"{a.name}: needs {a.needed}, found {a.found}" for a in self.mismatches)


def compare(target: str, needs: Requirement, machine: Fingerprint) -> Verdict:
    """Compares what a target's executables need with what a machine is.

    - platform, architecture: equal; machine code is of one.
    - cpu_features: a subset. Code with an instruction that the machine lacks dies of SIGILL, and XLA
      does not check.
    - jaxlib: equal. The serialized form has no promise from one version to the next
      (xla/pjrt/pjrt_executable.h), even where a neighbouring version happens to load it.
    """
    missing = sorted(set(needs.cpu_features) - set(machine.cpu_features))
    return Verdict(
        target,
        (
            _equal("platform", needs.platform, machine.platform),
            _equal("architecture", needs.architecture, machine.architecture),
            Axis(
                "cpu_features",
                "subset",
                f"{len(needs.cpu_features)} extensions",
                f"all but {' '.join(missing)}" if missing else "all of them",
                not missing,
            ),
            _equal("jaxlib", needs.jaxlib, machine.jaxlib),
        ),
    )


def _equal(name: str, needed: str, found: str) -> Axis:
    return Axis(name, "equal", needed, found, needed == found)


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
