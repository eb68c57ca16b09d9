"""This machine as a build host: its CPU, and the targets that it can compile for."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from prejit.compiler.targets.target_classes import Target
from prejit.runtime.errors import BuildError
from prejit.runtime.machine.fingerprint import Fingerprint

_DECIDING = (
    # LLVM names a CPU by these and by its extensions (llvm/lib/TargetParser/Host.cpp).
    *("vendor_id", "cpu family", "model"),  # x86
    *("CPU implementer", "CPU part", "Features"),  # Arm
)


@cache
def host_features() -> tuple[str, ...]:
    """Return the extensions of this machine's CPU, in LLVM's names, sorted. A process reads them once."""
    return Fingerprint.current().cpu_features


@cache
def host_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the properties of this machine's CPU from which LLVM chooses the CPU to tune for.

    The name that the CPU is sold by is none of them: one kind of CPU has many.
    """
    found = dict[str, set[str]]()
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return "unknown"
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _DECIDING:
            found.setdefault(name.strip(), set()).add(value.strip())
    described = (
        f"{name} {' or '.join(sorted(found[name]))}" for name in _DECIDING if name in found
    )
    return ", ".join(described) or "unknown"


def can_build(found: Target) -> str | None:
    """Return why this machine cannot compile for a target; None: it can, as far as the target alone shows.

    `installing.obstacle` returns what the target's environment lacks.
    """
    if found.architecture != platform.machine():
        return f"it needs a build host with {found.architecture}, this is {platform.machine()}"
    if found.platform != "cpu" or found.cpu_features is None:
        return None
    version = found.jax or jaxlib_version()
    if cross_compiles(version):
        return None
    missing = sorted(set(found.cpu_features) - set(Fingerprint.current().cpu_features))
    if missing:
        # --xla_cpu_max_isa only removes features: the code would be for a lower level than its name.
        return (
            f"it needs jaxlib 0.11 or later on this machine: {version} compiles only for"
            f" the build host's own CPU, which lacks {' '.join(missing)}"
        )
    return None


def cross_compiles(jaxlib: str) -> bool:
    """Return whether a version of jaxlib compiles for a CPU that is described in data (0.11 and later).

    Older ones compile for the build host's own features, capped by `--xla_cpu_max_isa` in XLA_FLAGS.
    """
    major, minor = jaxlib.split(".")[:2]
    return (int(major), int(minor)) >= (0, 11)


def jaxlib_version() -> str:
    """Return the version of the installed jaxlib.

    Raises:
        BuildError: it is not installed.
    """
    try:
        from jaxlib import version
    except ImportError as error:
        raise BuildError(
            "expected jaxlib to compile with, found none", hint="pip install 'prejit[compiler]'"
        ) from error
    return str(version.__version__)
