"""Targets: the classes of machines that programs are compiled for, as data. No JAX.

The catalogue (catalogue/*.toml, a file for each platform) describes those that everybody has. The build
side compiles for them; `prejit explain --fleet` says which of them a fleet lacks.
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from importlib import resources
from typing import Any

from prejit.runtime.machine import requirement
from prejit.runtime.machine.target import Capability, Gpu, Target

PLATFORMS = requirement.PLATFORMS


def chips(topology: str) -> int:
    """The number of chips of a topology such as `2x2x1`."""
    return math.prod(map(int, topology.split("x")))


@cache
def catalogue() -> dict[str, Target]:
    """Every target that is described, by name; `cpu-host` is not among them."""
    return {
        entry["name"]: _target(entry)
        for platform in PLATFORMS
        for entry in _read(platform)["target"]
    }


@cache
def capabilities() -> dict[str, Capability]:
    """What GPUs of each compute capability share."""
    return {name: Capability(**values) for name, values in _read("cuda")["capability"].items()}


@cache
def _read(platform: str) -> dict[str, Any]:
    file = resources.files("prejit.runtime.machine") / "catalogue_data" / f"{platform}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _target(entry: dict[str, Any]) -> Target:
    """A table of the catalogue as a Target."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    if "gpu" in values:
        values["gpu"] = Gpu(**values["gpu"])
    if "topology" in values:
        values["device_count"] = chips(values["topology"])
    return Target(**values)
