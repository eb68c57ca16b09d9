"""The CPU of the build host, as LLVM distinguishes CPUs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

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

    Args:
        cpuinfo: Linux's description of the CPUs; a CPU may have cores of several kinds.
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
