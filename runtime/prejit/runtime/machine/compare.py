"""Compare a machine with a requirement, axis by axis."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.records import replace
from prejit.runtime.verdict import Axis, Verdict


def compare(target: str, needs: Requirement, machine: Fingerprint) -> Verdict:
    """Compare the requirement of a target's executables with a machine, by one rule for each axis.

    - platform: equal; a client of one platform cannot read executables of another.
    - architecture: equal; machine code is for one architecture, also the host's part of an accelerator's
      program.
    - cpu_features: a subset. Code with an instruction that the machine lacks is killed by SIGILL, and XLA
      does not check. Further extensions do no harm.
    - jaxlib: equal. No version promises to read the serialized form of another
      (xla/pjrt/pjrt_executable.h), even if a neighbouring version happens to read it.
    - plugin: equal for the same reason: the plugin compiles the code and reads it.
    - cuda: at least, within a major version (CUDA Compatibility, "minor version compatibility").
    - driver: at least (CUDA Toolkit release notes: each toolkit has a lowest driver; CUDA Compatibility:
      a later driver runs code for an earlier one).
    - device_kind: equal for a TPU, whose code is for one kind of chip. For a GPU information only: XLA
      needs the same compute capability (xla/service/gpu/gpu_executable.cc, CheckCompatibility) and takes
      any board that has it; code that is tuned for another board runs a little slower.
    - compute_capability: equal for the same reason.
    - device_count: at least; a program runs on the first devices. CPU devices are virtual: a process
      makes as many as it needs.
    - topology: equal; collectives are routed at compile time (xla/pjrt/pjrt_compiler.h: an executable is
      compiled for one PjRtTopologyDescription).
    - device_memory: at least; with less memory the first call fails with RESOURCE_EXHAUSTED.
    - glibc: at least; the dynamic linker refuses a library that needs symbols of a later version (LSB,
      "Symbol Versioning").
    - xla_flags, environment: equal. They are compiled into an executable (xla/xla.proto, DebugOptions; the
      cuBLAS and libtpu documentation), so different settings on a server would be ignored silently.

    An axis without a value in the requirement is left out.
    """
    rows = []
    for field, rule in _RULES.items():
        if (needed := getattr(needs, field)) is not None:
            rows.append(rule(field.removesuffix("_bytes"), needed, getattr(machine, field)))
            if field == "device_kind" and needs.platform != "tpu":
                rows[-1] = replace(rows[-1], rule="information", matches=True)
            if field == "device_count" and needs.platform == "cpu":
                rows[-1] = replace(rows[-1], found="virtual devices", matches=True)
    return Verdict(target, tuple(rows))


def preference(needs: Requirement, machine: Fingerprint) -> tuple[bool, int, int]:
    """Return the key that targets are sorted by; the first that fits is loaded.

    Targets that are tuned for the machine's own device come first, then those with the widest vectors, then
    those that use most extensions of the CPU. The number of extensions alone is not enough: code for
    x86-64-v2 may use as many as code for v3, all with vectors of 128 bits. Equal targets stay in the order
    of the index.
    """
    features = needs.cpu_features
    width = max((_vector_bits(name) for name in features), default=0)
    return needs.device_kind != machine.device_kind, -width, -len(features)


def _vector_bits(feature: str) -> int:
    if feature.startswith(("avx512", "amx")):
        return 512
    return 256 if feature.startswith(("avx", "fma", "f16c")) else 128


def _equal(name: str, needed: str | tuple[str, ...], found: str | tuple[str, ...] | None) -> Axis:
    texts = [side if isinstance(side, str) else " ".join(side or ()) for side in (needed, found)]
    same = needed == (found or type(needed)())
    return Axis(name, "equal", texts[0] or "none", texts[1] or "none", same)


def _subset(name: str, needed: tuple[str, ...], found: tuple[str, ...]) -> Axis:
    missing = sorted(set(needed) - set(found))
    return Axis(
        name,
        "subset",
        f"{len(needed)} extensions",
        f"all but {' '.join(missing)}" if missing else "all of them",
        not missing,
    )


def _at_least_version(name: str, needed: str, found: str | None) -> Axis:
    rule = "at least, same major" if name == "cuda" else "at least"
    if found is None:
        return Axis(name, rule, needed, "none", False)
    needs, has = (version_key(text) for text in (needed, found))
    has += version_key("0") * (len(needs) - len(has))  # 13 is 13.0
    return Axis(name, rule, needed, found, has >= needs and (name != "cuda" or has[0] == needs[0]))


def version_key(text: str) -> list[tuple[int, str]]:
    """Return the numbers of a version as a sort key. They stay text, because they may have many digits."""
    numbers = (part.lstrip("0") for part in re.findall(r"[0-9]+", text))
    return [(len(number), number) for number in numbers]


def _at_least_bytes(name: str, needed: int, found: int | None) -> Axis:
    if found is None:
        return Axis(name, "at least", f"{needed / 1e9:.2f} GB", "unknown", False)
    shown = [f"{size / 1e9:.2f} GB" for size in (needed, found)]
    if shown[0] == shown[1] and needed > found:  # the two texts must differ
        shown = [f"{size} bytes" for size in (needed, found)]
    return Axis(name, "at least", shown[0], shown[1], found >= needed)


def _at_least_count(name: str, needed: int, found: int | None) -> Axis:
    return Axis(name, "at least", str(needed), str(found or "none"), (found or 0) >= needed)


_RULES: dict[str, Callable[[str, Any, Any], Axis]] = {
    "platform": _equal,
    "architecture": _equal,
    "cpu_features": _subset,
    "jaxlib": _equal,
    "plugin": _equal,
    "cuda": _at_least_version,
    "driver": _at_least_version,
    "device_kind": _equal,
    "compute_capability": _equal,
    "device_count": _at_least_count,
    "topology": _equal,
    "device_memory_bytes": _at_least_bytes,
    "glibc": _at_least_version,
    "xla_flags": _equal,
    "environment": _equal,
}
"""The rule of each axis, by its field, in the order of a verdict. `compare` makes the two exceptions."""
