"""The targets that [[target]] tables describe: with the catalogue, a fingerprint or values of their own."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from prejit.compiler.base.suggestions import did_you_mean, no_such_path, shown
from prejit.compiler.targets.cpu_count import MAX_CPUS
from prejit.compiler.targets.target_classes import (
    CPUS,
    HOST,
    GpuTable,
    Target,
    capabilities,
    catalogue,
    chips,
)
from prejit.runtime.base.wording import nearest
from prejit.runtime.errors import PrejitError, UsageError
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.machine.fingerprint import PLATFORMS, Fingerprint


@dataclass(frozen=True, slots=True)
class TargetTable:
    """`[[target]]`: machines to compile for. Its keys override the catalogue and the fingerprint.

    Attributes:
        name: a name that `prejit targets` lists, or another one beside `fingerprint` or `platform`.
        fingerprint: file that `prejit fingerprint` wrote on such a machine, relative to the manifest.
        jax: version of jax to compile with. Default: that of the build host, or of the fingerprint.
        constraints: versions of packages in the environment that compiles, as pip takes constraints.
        tuning: file that `prejit tune` wrote on such a machine, relative to the manifest.
        platform: platform of JAX.
        architecture: architecture of the host.
        cpu: LLVM's name of the CPU to tune for.
        cpu_features: LLVM's names of the extensions that code may use. Default: all of the build host.
        cpus: number of CPUs that the loops of a CPU's programs are split for, 1 to 1024. Default: 16. A
            machine with fewer or more runs the programs too.
        device_kind: name that the driver gives the device.
        compute_capability: compute capability of a GPU, such as "9.0".
        memory_bytes: memory of one device in bytes.
        driver: lowest version of the driver.
        gpu: a GPU that the catalogue does not know.
        generation: libtpu's name of a TPU generation, such as "v5e".
        topology: chips of a TPU slice in each dimension, such as "2x2".
        xla_flags: flags of XLA for compiling, beside those in XLA_FLAGS.
    """

    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid"}

    name: str
    fingerprint: str | None = None
    jax: str | None = None
    constraints: tuple[str, ...] = ()
    tuning: str | None = None
    platform: str | None = None
    architecture: str | None = None
    cpu: str | None = None
    cpu_features: tuple[str, ...] | None = None
    cpus: int | None = None
    device_kind: str | None = None
    compute_capability: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    gpu: GpuTable | None = None
    generation: str | None = None
    topology: str | None = None
    xla_flags: tuple[str, ...] = ()


_OVERRIDES = (
    *("architecture", "cpu", "cpus", "device_kind", "compute_capability", "memory_bytes"),
    *("driver", "gpu", "generation", "topology", "jax"),
)


_NEEDED = {
    "cuda": ("device_kind", "compute_capability", "memory_bytes", "gpu"),
    "tpu": ("device_kind", "generation", "topology", "memory_bytes"),
}
"""Keys without which a device that is not in the catalogue cannot be compiled for."""


def names() -> tuple[str, ...]:
    """Return the names of targets that a manifest may use without describing them."""
    return (HOST, *catalogue())


def target(name: str) -> Target:
    """Return the target with a name, for one device.

    Raises:
        UsageError: no target has the name; the message suggests the nearest and lists all.
    """
    if name == HOST:
        return Target(name, "cpu", platform.machine())
    if name not in catalogue():
        guess = nearest(name, names())
        raise UsageError(
            f"expected a target, one of {', '.join(names())}; found {name!r}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    return catalogue()[name]


def resolve(table: TargetTable, directory: Path, mesh: Mesh | None) -> Target:
    """Return the target that a table of a manifest describes.

    Where the table pins a jax version, the target's name in the bundle ends with it (`cpu-host-jax0.12.0.1`):
    a bundle may carry one target for several versions.

    Raises:
        TableError: the table describes no target.
    """
    found = replace(_base(table, directory), name=table.name)
    given: dict[str, Any] = {
        key: getattr(table, key) for key in _OVERRIDES if getattr(table, key) is not None
    }
    if table.cpu_features is not None:
        given["cpu_features"] = tuple(sorted(table.cpu_features))
    if table.tuning is not None:
        given["tuning"] = str(directory / table.tuning)
    found = replace(found, constraints=table.constraints, **given)
    found = replace(found, xla_flags=(*found.xla_flags, *table.xla_flags))
    if found.jax is not None:
        found = replace(found, name=f"{table.name}-jax{found.jax}")
    for key, problem in (*_table_problems(table, directory), *_incomplete(found)):
        raise TableError(key, problem)
    return _on_mesh(found, mesh)


class TableError(ValueError):
    """A `[[target]]` table has an error at a key."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


def _base(table: TargetTable, directory: Path) -> Target:
    if table.fingerprint is not None:
        if not os.path.isfile(directory / table.fingerprint):
            problem = no_such_path("file", table.fingerprint, directory)
            raise TableError("fingerprint", f"{problem} (`prejit fingerprint > FILE` writes one)")
        try:
            machine = Fingerprint.read(directory / table.fingerprint)
        except PrejitError as error:
            raise TableError("fingerprint", f"{error} ({error.hint})") from error
        return _of_machine(machine)
    if table.name in names():
        if table.platform not in (None, target(table.name).platform):
            wanted = target(table.name).platform
            raise TableError("platform", f"expected {shown(wanted)}, the platform of {table.name}")
        return target(table.name)
    if table.platform is None:
        guess = did_you_mean(table.name, names())
        raise TableError(
            "name",
            f"unknown target {shown(table.name)}{guess}; expected one that `prejit targets` lists, or "
            "a `fingerprint` or `platform` beside it",
        )
    if table.platform not in PLATFORMS:
        raise TableError(
            "platform", f"expected one of {', '.join(PLATFORMS)}; found {shown(table.platform)}"
        )
    return Target(table.name, table.platform)


def _of_machine(machine: Fingerprint) -> Target:
    """Return the target for a machine: its device as in the catalogue, and the machine's own values."""
    if machine.platform == "cpu":
        return Target(
            "",
            "cpu",
            machine.architecture,
            cpu=_level(machine),
            cpu_features=machine.cpu_features,
            jax=machine.jaxlib,
        )
    alike = catalogue_targets_like(machine)
    if machine.platform == "tpu":
        alike = [t for t in alike if t.topology == machine.topology] or alike
    base = alike[0] if alike else Target("", machine.platform)
    return replace(
        base,
        architecture=machine.architecture,
        device_kind=machine.device_kind,
        compute_capability=machine.compute_capability,
        memory_bytes=machine.device_memory_bytes or base.memory_bytes,
        topology=machine.topology or base.topology,
        jax=machine.jaxlib,
    )


def catalogue_targets_like(machine: Fingerprint) -> list[Target]:
    """Return the targets of the catalogue of a machine's device, then those of its compute capability."""
    known = [t for t in catalogue().values() if t.platform == machine.platform]
    alike = [t for t in known if t.device_kind == machine.device_kind]
    return alike + [t for t in known if t.compute_capability == machine.compute_capability]


def _level(machine: Fingerprint) -> str:
    """Return LLVM's name of the highest x86-64 level of a machine; `generic` for any other architecture."""
    levels = [t for t in catalogue().values() if t.platform == "cpu"]
    held = [
        t.cpu
        for t in levels
        if t.architecture == machine.architecture
        and set(t.cpu_features or ()) <= set(machine.cpu_features)
    ]
    fallback = "x86-64" if machine.architecture == "x86_64" else "generic"
    return held[-1] or fallback if held else fallback


def _table_problems(table: TargetTable, directory: Path) -> Iterator[tuple[str, str]]:
    # A tag of an OCI registry (distribution-spec), with room for a version.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", table.name):
        yield "name", f"expected letters, digits and . _ -; found {shown(table.name)}"
    if table.jax is not None and not re.fullmatch(r"\d+(\.\d+){1,3}", table.jax):
        yield "jax", f'expected a version such as "0.12.0.1"; found {shown(table.jax)}'
    for text in table.constraints:
        if "://" in text or "@" in text or not re.match(r"[A-Za-z0-9]", text):
            yield (
                "constraints",
                f'expected a package such as "numpy==2.3.4", without a URL; found {shown(text)}',
            )
    if table.tuning is not None and not os.path.isfile(directory / table.tuning):
        yield "tuning", no_such_path("file", table.tuning, directory)


def _incomplete(found: Target) -> Iterator[tuple[str, str]]:
    """Yield keys and problems of a description that is too incomplete to compile for."""
    if not 1 <= found.cpus <= MAX_CPUS:
        yield "cpus", f"expected 1 to {MAX_CPUS} CPUs, found {found.cpus}"
    if found.cpus != CPUS and found.platform != "cpu":
        yield (
            "cpus",
            f"expected no cpus, because the loops of {found.name} run on its {found.platform}",
        )
    for key in _NEEDED.get(found.platform, ()):
        if getattr(found, key) is None:
            kind = "GPU" if found.platform == "cuda" else "TPU"
            yield key, f"missing; {found.name} is a {kind} that is not in the catalogue"
    if found.platform == "cuda" and found.compute_capability not in (None, *capabilities()):
        known = ", ".join(capabilities())
        yield (
            "compute_capability",
            f"expected one of {known}; found {shown(found.compute_capability)}",
        )
    if found.platform == "cpu" and found.cpu_features is not None and found.cpu is None:
        yield "cpu", "missing; LLVM's name of the CPU to tune for"
    if found.topology is not None and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", found.topology):
        yield "topology", f'expected a topology such as "2x2"; found {shown(found.topology)}'


def _on_mesh(found: Target, mesh: Mesh | None) -> Target:
    size = 1 if mesh is None else mesh.size
    if found.topology is not None and chips(found.topology) != size:
        raise TableError(
            "name",
            f"{found.name} has {chips(found.topology)} chips, and [mesh] needs {size}: "
            "make them equal (`prejit targets` lists other topologies)",
        )
    return replace(found, device_count=size)


def chosen(targets: Sequence[Target], only: Sequence[str], where: str) -> tuple[Target, ...]:
    """Return the chosen targets of a manifest, in its order.

    Raises:
        UsageError: no target has one of the names.
    """

    def answers(found: Target, name: str) -> bool:
        return name in (found.name, found.name.removesuffix(f"-jax{found.jax}"))

    for name in only:
        if not any(answers(found, name) for found in targets):
            listed = ", ".join(found.name for found in targets)
            guess = nearest(name, [found.name for found in targets])
            raise UsageError(
                f"--target: expected a target of {where}, one of {listed}; found {name!r}",
                hint=f"did you mean {guess!r}?" if guess else None,
            )
    return tuple(t for t in targets if not only or any(answers(t, name) for name in only))
