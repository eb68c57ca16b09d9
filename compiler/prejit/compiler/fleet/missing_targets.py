"""Choose the fewest targets that serve machines which load no target yet."""

from __future__ import annotations

import json
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

from prejit.compiler.fleet.machine_groups import Group, closest, group_machines
from prejit.compiler.targets.target_classes import CUDA, PLUGINS, GpuTable, Target, catalogue, chips
from prejit.compiler.targets.target_table import catalogue_targets_like
from prejit.runtime.machine.compare import compare
from prejit.runtime.machine.fingerprint import (
    PLATFORMS,
    Fingerprint,
    Requirement,
    effective_xla_flags,
)
from prejit.runtime.machine.fleet_machines import Machine
from prejit.runtime.verdict import Axis, Verdict

MAX_STEPS = 5_000
"""Maximum steps of one search, which takes some tenths of a second."""
MAX_DEPTH = 200
"""Maximum number of sets that the search, which is recursive, may choose."""


def fewest_sets(masks: Sequence[int]) -> tuple[list[int], bool]:
    """Return the fewest sets whose union equals the union of all sets.

    Branch and bound: the rarest uncovered element must come from one of the sets that hold it. Uncovered
    elements that share no set give a lower bound on the sets still needed. The search starts from the
    greedy solution (Chvatal 1979) and keeps it when it runs out of steps.

    Args:
        masks: the sets, one bit per element.

    Returns:
        The indices of the chosen sets, and whether they are known to be the fewest.
    """
    kept = [  # drop sets within another set; of equal sets keep the first
        i
        for i, mask in enumerate(masks)
        if mask
        and not any(
            mask | other == other and (mask != other or j < i) for j, other in enumerate(masks)
        )
    ]
    everything = union_of(masks[i] for i in kept)
    holders = {
        bit: [i for i in kept if masks[i] >> bit & 1]
        for bit in range(everything.bit_length())
        if everything >> bit & 1
    }
    reach = {bit: union_of(masks[i] for i in has) for bit, has in holders.items()}
    rarest = sorted(holders, key=lambda bit: len(holders[bit]))
    forced = sorted({has[0] for has in holders.values() if len(has) == 1})
    left = everything & ~union_of(masks[i] for i in forced)
    best = [*forced, *_greedy(masks, kept, left)]
    steps = 0

    def lower_bound(left: int) -> int:
        count = 0
        for bit in rarest:
            if left >> bit & 1:
                count, left = count + 1, left & ~reach[bit]
        return count

    proven = len(forced) + lower_bound(left) == len(best)
    if proven or len(best) - len(forced) > MAX_DEPTH:
        return sorted(best), proven

    def search(left: int, chosen: list[int]) -> None:
        nonlocal best, steps
        steps += 1
        if not left:
            if len(chosen) < len(best):
                best = list(chosen)
            return
        if steps > MAX_STEPS or len(chosen) + lower_bound(left) >= len(best):
            return
        bit = next(bit for bit in rarest if left >> bit & 1)
        for index in sorted(holders[bit], key=lambda i: -(masks[i] & left).bit_count()):
            search(left & ~masks[index], [*chosen, index])

    search(left, forced)
    return sorted(best), steps <= MAX_STEPS


def union_of(masks: Iterable[int]) -> int:
    """Return the union of sets, each a bit mask."""
    return reduce(operator.or_, masks, 0)


def _greedy(masks: Sequence[int], kept: Sequence[int], left: int) -> list[int]:
    """Return sets that cover `left`, taking the set with most uncovered elements each time."""
    chosen = []
    while left:
        index = max(kept, key=lambda i: (masks[i] & left).bit_count())
        chosen.append(index)
        left &= ~masks[index]
    return chosen


@dataclass(frozen=True, slots=True)
class Build:
    """Properties that the targets of a bundle share; an added target would share them too.

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
        """Return whether a target has as many chips as the manifest's mesh."""
        return target.topology is None or chips(target.topology) == self.device_count


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target that could be added."""

    target: Target
    table: dict[str, Any]
    note: str | None
    requirement: Requirement


def candidates_for(classes: Sequence[tuple[Machine, ...]], build: Build) -> list[Candidate]:
    """Return the targets that could serve machines of one jaxlib, plugin and set of XLA flags."""
    machine = classes[0][0].fingerprint
    platform, jaxlib = machine.platform, machine.jaxlib
    if platform not in PLATFORMS or not _is_release(jaxlib):
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
    alike = catalogue_targets_like(found)
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
        if not _is_release(machine.jaxlib):
            axis = Axis("jaxlib", "equal", "a release", machine.jaxlib, False)
        if machine.platform not in PLATFORMS:
            axis = Axis("platform", "equal", " or ".join(PLATFORMS), machine.platform, False)
        return Verdict("any target", (axis,))
    return closest([(each.target.name, each.requirement) for each in candidates], machine)


@dataclass(frozen=True, slots=True)
class Addition:
    """A target to add.

    Attributes:
        table: the keys of its `[[target]]` in the manifest.
        note: a remark for the person who adds it.
        requirement: what its executables will need.
        machines: the names of the machines that it serves.
        is_elsewhere: whether its build host has another architecture than the bundle's targets.
    """

    table: dict[str, Any]
    note: str | None
    requirement: Requirement
    machines: tuple[str, ...]
    is_elsewhere: bool

    def needs(self) -> str:
        """Return what it needs of the build host, in one phrase."""
        needed = self.requirement
        where = f"a build host with {needed.architecture}"
        if self.is_elsewhere:
            where += ", in a manifest and bundle of its own"
        return f"{where}; pip that finds jax {needed.jaxlib}"

    def toml(self) -> str:
        """Return the table as TOML, to paste into a manifest."""
        notes = [f"# needs {self.needs()}", *([f"# {self.note}"] if self.note else [])]
        lines = [f"{key} = {_toml(value)}" for key, value in self.table.items()]
        return "\n".join(["[[target]]", *notes, *lines])


def cover_machines(
    helpless: Sequence[tuple[Machine, ...]], build: Build
) -> tuple[tuple[Addition, ...], bool, tuple[Group, ...]]:
    """Choose the fewest targets to add.

    An executable fits one jaxlib, one plugin and one set of XLA flags, so each combination of them is a
    problem of its own.

    Returns:
        The targets to add; whether no smaller number would do; the machines that no target can serve.
    """
    software: dict[tuple[Any, ...], list[tuple[Machine, ...]]] = defaultdict(list)
    for merged in helpless:
        m = merged[0].fingerprint
        software[m.platform, m.jaxlib, m.plugin, m.xla_flags].append(merged)
    additions: list[Addition] = []
    is_fewest = True
    beyond: dict[tuple[Axis, ...], tuple[str, list[str]]] = {}
    taken = set(build.names)
    for _, classes in sorted(software.items(), key=lambda item: str(item[0])):
        candidates = candidates_for(classes, build)
        covers = [
            [compare("", c.requirement, merged[0].fingerprint).matches for merged in classes]
            for c in candidates
        ]
        fitted = [any(column) for column in zip(*covers, strict=True)] or [False] * len(classes)
        for fits, merged in zip(fitted, classes, strict=True):
            if not fits:
                closest = obstacle(candidates, merged[0].fingerprint)
                _, names = beyond.setdefault(closest.mismatches, (closest.target, []))
                names.extend(m.name for m in merged)
        masks = [sum(1 << i for i, fits in enumerate(row) if fits) for row in covers]
        chosen, exact = fewest_sets(masks)
        is_fewest = is_fewest and exact
        for index in _prefer(chosen, masks, candidates, classes):
            served = sorted(
                m.name for i, merged in enumerate(classes) if masks[index] >> i & 1 for m in merged
            )
            additions.append(_addition(candidates[index], tuple(served), taken, build))
    additions.sort(key=lambda addition: (-len(addition.machines), addition.machines))
    return (
        tuple(additions),
        is_fewest,
        group_machines({(t, why): n for why, (t, n) in beyond.items()}),
    )


def _prefer(
    chosen: Sequence[int],
    masks: Sequence[int],
    candidates: Sequence[Candidate],
    classes: Sequence[tuple[Machine, ...]],
) -> list[int]:
    """Replace each chosen set by the best one that still covers what it alone covers.

    The number of sets stays the same. A better set has the GPU of the machines themselves, or a higher CPU
    level.
    """
    result = list(chosen)
    for place in range(len(result)):
        others = union_of(masks[index] for index in (*result[:place], *result[place + 1 :]))
        alone = masks[result[place]] & ~others

        def merit(index: int, alone: int = alone) -> tuple[int, int, int]:
            kind = candidates[index].requirement.device_kind
            alike = sum(
                len(merged)
                for i, merged in enumerate(classes)
                if alone >> i & 1 and merged[0].fingerprint.device_kind == kind
            )
            return alike, len(candidates[index].requirement.cpu_features), -index

        result[place] = max((i for i, mask in enumerate(masks) if mask & alone == alone), key=merit)
    return result


def _addition(
    candidate: Candidate, machines: tuple[str, ...], taken: set[str], build: Build
) -> Addition:
    """Return the addition for a candidate under a free name, and add that name to `taken`."""
    target, table = candidate.target, candidate.table
    # The build adds the jax version to the name of a target (prejit.compiler.targets).
    suffix = f"-jax{candidate.requirement.jaxlib}"
    name, count = target.name, 1
    own_name = "fingerprint" in table
    while name + suffix in taken or (own_name and name in catalogue()):
        count += 1
        name = f"{target.name}-{count}"
    taken.add(name + suffix)
    if name != target.name and not own_name:  # the catalogue has no target of that name
        table = {**_described(target), **table}
    needs = candidate.requirement
    is_elsewhere = needs.architecture not in build.architectures
    return Addition({"name": name, **table}, candidate.note, needs, machines, is_elsewhere)


def _described(target: Target) -> dict[str, Any]:
    """Return the keys that describe a target which the catalogue does not have."""
    keys = (
        *("platform", "architecture", "cpu", "cpu_features", "device_kind", "compute_capability"),
        *("memory_bytes", "driver", "gpu", "generation", "topology"),
    )
    return {key: value for key in keys if (value := getattr(target, key)) is not None}


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, GpuTable):
        pairs = (f"{key} = {size}" for key, size in asdict(value).items())
        return f"{{ {', '.join(pairs)} }}"
    return str(value)


def _is_release(version: str) -> bool:
    """Return whether a version is a release: manifests accept no other for `jax`."""
    return re.fullmatch(r"\d+(\.\d+){1,3}", version) is not None
