"""Targets: the classes of machines that programs are compiled for.

The x86-64 levels are those of the psABI (https://gitlab.com/x86-psABIs/x86-64-ABI, section
"Micro-Architecture Levels"), spelt as LLVM spells them.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from prejit.compiler.wording import nearest
from prejit.runtime.errors import BuildError, UsageError
from prejit.runtime.fingerprint import Fingerprint

_V2 = (
    *("64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"),  # the baseline of x86-64
    *("crc32", "cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"),
)
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

_X86_64_LEVELS = {
    # name: (LLVM's name of the CPU, features, --xla_cpu_max_isa)
    "cpu-x86-64-v2": ("x86-64-v2", _V2, "SSE4_2"),
    "cpu-x86-64-v3": ("x86-64-v3", _V3, "AVX2"),
    "cpu-x86-64-v4": ("x86-64-v4", _V4, "AVX512"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A class of machines.

    Attributes:
        name: as manifests say it.
        platform: `cpu`.
        architecture: `x86_64`, `aarch64`.
        cpu: LLVM's name of the CPU to tune for; None: the build host's.
        cpu_features: LLVM's names of the extensions that code may use, sorted; None: all that the
            build host has.
        xla_max_isa: value of `--xla_cpu_max_isa` for a jaxlib that cannot compile for a CPU
            described in data; None: no limit. It can go with jaxlib 0.10.
    """

    name: str
    platform: str
    architecture: str
    cpu: str | None = None
    cpu_features: tuple[str, ...] | None = None
    xla_max_isa: str | None = None


def names() -> tuple[str, ...]:
    """The names of all targets of this release."""
    return ("cpu-host", *_X86_64_LEVELS)


def target(name: str) -> Target:
    """The target of that name.

    Raises:
        UsageError: there is none; the message gives the nearest and the list.
    """
    if name == "cpu-host":
        return Target(name, "cpu", platform.machine())
    if name not in _X86_64_LEVELS:
        guess = nearest(name, names())
        raise UsageError(
            f"expected a target, one of {', '.join(names())}; found {name!r}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    cpu, features, max_isa = _X86_64_LEVELS[name]
    return Target(name, "cpu", "x86_64", cpu, tuple(sorted(features)), max_isa)


def can_build(target: Target) -> str | None:
    """Why this machine cannot compile for a target; None where it can."""
    if target.architecture != platform.machine():
        return f"it needs a build host with {target.architecture}, this is {platform.machine()}"
    if target.cpu_features is None or cross_compiles():
        return None
    missing = sorted(set(target.cpu_features) - set(Fingerprint.current().cpu_features))
    if missing:
        # --xla_cpu_max_isa only takes features away: a lower level would get this one's name.
        return (
            f"it needs jaxlib 0.11 or later on this machine: {jaxlib_version()} compiles only for"
            f" what the build host has, and that lacks {' '.join(missing)}"
        )
    return None


def cross_compiles() -> bool:
    """Whether the installed jaxlib compiles for a CPU that is described in data (0.11 and later).

    Told from the version: to ask `prejit.runtime.executable.cross_compiles` imports all of jaxlib,
    which costs more than the rest of a plan.
    """
    major, minor = jaxlib_version().split(".")[:2]
    return (int(major), int(minor)) >= (0, 11)


def jaxlib_version() -> str:
    """The version of the jaxlib that compiles here.

    Raises:
        BuildError: none is installed.
    """
    try:
        from jaxlib import version
    except ImportError as error:
        raise BuildError(
            "expected jaxlib to compile with, found none", hint="pip install 'prejit[compiler]'"
        ) from error
    return str(version.__version__)
