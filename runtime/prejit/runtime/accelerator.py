"""The accelerators of this machine, found without starting them: no CUDA context, no TPU runtime. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What programs run on where it is not the CPU; fields as in `fingerprint.Fingerprint`."""

    platform: str
    plugin: str | None
    driver: str | None
    device_kind: str
    device_count: int
    device_memory_bytes: int | None
    cuda: str | None = None
    compute_capability: str | None = None
    topology: str | None = None

    def described(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def find_accelerator(environ: Mapping[str, str]) -> Accelerator | None:
    """The accelerator that jax would choose; None: the CPU."""
    return None
