"""What an executable needs of a machine, as a bundle states it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from prejit.runtime.base.typed_json import shown

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
