"""Targets that could be added for machines that load no target of a bundle."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prejit.compiler.fleet.machines import Machine, is_release
from prejit.runtime.machine.compare import compare, preference
from prejit.runtime.machine.fingerprint import Fingerprint, effective_xla_flags
from prejit.runtime.machine.requirement import PLATFORMS, Requirement
from prejit.runtime.machine.targets import CUDA, PLUGINS, Target, catalogue, chips
from prejit.runtime.verdict import Axis, Verdict


@dataclass(frozen=True, slots=True)
class Build:
    """What the targets of a bundle share, and what an added target would share with them.

    Attributes:
        names: the names of the targets.
        device_count: the number of devices of the manifest's mesh.
        need_bytes: by platform, the least device memory that a target needs. Only a compile shows the real
            need of an added target.
        xla_flags: the flags of all targets, which come from the environment of the build.
        environment: by platform, the environment variables of the build.
        glibc: the lowest glibc of a CPU target, set by the C++ compiler of the build host.
        architectures: the architectures of the targets; a build host compiles for its own alone.
    """

    names: frozenset[str]
    architectures: frozenset[str]
    device_count: int
    need_bytes: dict[str, int]
    xla_flags: tuple[str, ...]
    environment: dict[str, tuple[str, ...]]
    glibc: str | None

    @classmethod
    def of(cls, targets: Sequence[tuple[str, Requirement]]) -> Build:
        """Return what the targets of a bundle have in common."""
        needs = [need for _, need in targets]
        sizes: dict[str, list[int]] = defaultdict(list)
        for need in needs:
            if need.device_memory_bytes is not None:
                sizes[need.platform].append(need.device_memory_bytes)
        return cls(
            names=frozenset(name for name, _ in targets),
            architectures=frozenset(need.architecture for need in needs),
            device_count=max((need.device_count or 1 for need in needs), default=1),
            need_bytes={platform: min(known) for platform, known in sizes.items()},
            xla_flags=tuple(sorted(set.intersection(*(set(n.xla_flags or ()) for n in needs)))),
            environment={need.platform: need.environment or () for need in reversed(needs)},
            glibc=min(
                (need.glibc for need in needs if need.glibc is not None),
                key=lambda version: tuple(map(int, version.split("."))),
                default=None,
            ),
        )

    def has_mesh_of(self, target: Target) -> bool:
        """Whether a target has as many chips as the manifest's mesh."""
        return target.topology is None or chips(target.topology) == self.device_count


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target that could be added.

    Attributes:
        target: the target, from the catalogue or from a machine.
        table: the keys of its `[[target]]` beside the name.
        note: a remark for the person who adds it.
        requirement: what its executables will need.
    """

    target: Target
    table: dict[str, Any]
    note: str | None
    requirement: Requirement


def candidates_for(classes: Sequence[tuple[Machine, ...]], build: Build) -> list[Candidate]:
    """Return the targets that could serve machines of one jaxlib, plugin and set of XLA flags."""
    machine = classes[0][0].fingerprint
    platform, jaxlib = machine.platform, machine.jaxlib
    if platform not in PLATFORMS or not is_release(jaxlib):
        return []
    flags = tuple(flag for flag in machine.xla_flags if flag not in build.xla_flags)
    table: dict[str, Any] = {"xla_flags": flags} if flags else {}
    note = None
    # jax's own plugins have the version of jax (see prejit.compiler.targets).
    plugin = f"{PLUGINS[platform]} {jaxlib}" if platform in PLUGINS else None
    if platform == "tpu" and (machine.plugin or "").startswith("libtpu "):
        plugin = machine.plugin or ""
        table = {"constraints": (plugin.replace(" ", "=="),), **table}
        note = f"pip refuses it unless jax[tpu] {jaxlib} allows this libtpu"
    if platform == "cpu" and tuple(map(int, jaxlib.split(".")[:2])) < (0, 11):
        note = (
            "jaxlib 0.10 adds extensions of the build host: build on a machine of the oldest kind"
        )
    need_bytes = build.need_bytes.get(platform)

    def candidate(target: Target, keys: dict[str, Any], note: str | None) -> Candidate:
        requirement = replace(target, device_count=build.device_count).requirement(
            jaxlib,
            plugin=plugin,
            cuda=CUDA if platform == "cuda" else None,
            device_memory_bytes=need_bytes,
            xla_flags=effective_xla_flags(" ".join((*build.xla_flags, *flags))),
            environment=build.environment.get(platform, ()),
        )
        if platform == "cpu":
            requirement = replace(requirement, glibc=build.glibc)
        return Candidate(target, {**keys, **table}, note, requirement)

    found = [
        candidate(target, {"jax": jaxlib}, note)
        for target in catalogue().values()
        if target.platform == platform
        and build.has_mesh_of(target)
        and (target.memory_bytes or 0) >= (need_bytes or 0)
    ]
    known = [candidate.requirement for candidate in found]
    for merged in classes:
        if not any(compare("", needs, merged[0].fingerprint).matches for needs in known):
            like, lacks = _like(merged[0])
            if build.has_mesh_of(like):
                found.append(candidate(like, {"fingerprint": merged[0].path}, lacks or note))
    return found


def _like(machine: Machine) -> tuple[Target, str | None]:
    """Return the target that `fingerprint = FILE` describes, and the keys that its table still lacks."""
    found = machine.fingerprint
    target = Target(
        re.sub(r"[^A-Za-z0-9._-]", "-", machine.name).lstrip("._-")[:60] or "machine",
        found.platform,
        found.architecture,
        cpu_features=found.cpu_features if found.platform == "cpu" else None,
        device_kind=found.device_kind,
        compute_capability=found.compute_capability,
        memory_bytes=found.device_memory_bytes,
        topology=found.topology,
    )
    if found.platform == "cpu":
        return target, None
    known = [t for t in catalogue().values() if t.platform == found.platform]
    alike = [t for t in known if t.device_kind == found.device_kind]
    alike += [t for t in known if t.compute_capability == found.compute_capability]
    if found.platform == "tpu" and found.device_kind not in {t.device_kind for t in alike}:
        return target, 'add: generation = "...", as libtpu calls it'
    if not alike:
        return target, (
            "add, from the data sheet: gpu = { core_count = ..., bandwidth_bytes = ..., "
            "l2_bytes = ..., clock_mhz = ... }"
        )
    return replace(target, driver=alike[0].driver), None


def obstacle(candidates: Sequence[Candidate], machine: Fingerprint) -> Verdict:
    """Return, for the closest target that could be added, the axes that still do not match."""
    if not candidates:
        axis = Axis("topology", "equal", "that of the mesh", machine.topology or "none", False)
        if not is_release(machine.jaxlib):
            axis = Axis("jaxlib", "equal", "a release", machine.jaxlib, False)
        if machine.platform not in PLATFORMS:
            axis = Axis("platform", "equal", " or ".join(PLATFORMS), machine.platform, False)
        return Verdict("any target", (axis,))
    ranked = sorted(candidates, key=lambda c: preference(c.requirement, machine))
    verdicts = [compare(c.target.name, c.requirement, machine) for c in ranked]
    return min(verdicts, key=lambda verdict: verdict.distance)
