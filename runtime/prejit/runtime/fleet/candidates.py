"""Which target of a bundle serves which machine of a fleet, and the fewest targets to add. No JAX.

A fleet is a directory of fingerprints, as `prejit fingerprint` writes them. Nothing but `read_fleet` does IO.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import shorten
from typing import Any

from prejit.runtime.fleet.cover import fewest_sets, union_of
from prejit.runtime.fleet.machines import WIDTH, Machine, is_release
from prejit.runtime.machine.catalogue import PLATFORMS, catalogue, chips
from prejit.runtime.machine.compare import compare, preference
from prejit.runtime.machine.environment import effective_xla_flags
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.requirement import Requirement
from prejit.runtime.machine.target import CUDA, PLUGINS, Gpu, Target
from prejit.runtime.verdict import Axis, Verdict


@dataclass(frozen=True, slots=True)
class Group:
    """Machines with the same verdict.

    Attributes:
        target: that they load, or that is the closest.
        mismatches: why they do not load it; empty where they do.
        machines: which they are, by name.
    """

    target: str
    mismatches: tuple[Axis, ...]
    machines: tuple[str, ...]

    def reason(self) -> str:
        """Why they do not load the target, in one phrase; what is long is cut. Empty where they do."""
        return "; ".join(
            f"{a.name}: needs {shorten(a.needed, WIDTH, placeholder=' ...')}, "
            f"found {shorten(a.found, WIDTH, placeholder=' ...')}"
            for a in self.mismatches
        )


@dataclass(frozen=True, slots=True)
class Addition:
    """A target to add.

    Attributes:
        table: the `[[target]]` of the manifest.
        note: what a person should know of it.
        requirement: what its executables will need.
        machines: those without a target now that it serves.
        is_elsewhere: whether it needs a build host of another architecture than the bundle's targets.
    """

    table: dict[str, Any]
    note: str | None
    requirement: Requirement
    machines: tuple[str, ...]
    is_elsewhere: bool

    def needs(self) -> str:
        """What it needs of the build host, in one phrase."""
        needed = self.requirement
        where = f"a build host with {needed.architecture}"
        if self.is_elsewhere:
            where += ", in a manifest and bundle of its own"
        return f"{where}; pip that finds jax {needed.jaxlib}"

    def toml(self) -> str:
        """The table, to paste into a manifest."""
        notes = [f"# needs {self.needs()}", *([f"# {self.note}"] if self.note else [])]
        lines = [f"{key} = {_toml(value)}" for key, value in self.table.items()]
        return "\n".join(["[[target]]", *notes, *lines])


def group_machines(found: dict[tuple[str, tuple[Axis, ...]], list[str]]) -> tuple[Group, ...]:
    """Return machines grouped by target and mismatches, the largest groups first."""
    groups = [Group(target, why, tuple(sorted(names))) for (target, why), names in found.items()]
    return tuple(sorted(groups, key=lambda g: (bool(g.mismatches), -len(g.machines), g.machines)))


# What to add


@dataclass(frozen=True, slots=True)
class Build:
    """What a target that is added to a bundle has in common with those that are there.

    Attributes:
        names: of the targets.
        device_count: the size of the manifest's mesh.
        need_bytes: device memory, by platform, of the target that needs least of it. What an added
            target really needs the compiler alone can say.
        xla_flags: those that all targets have: of the environment in which the bundle was built.
        environment: variables, by platform, likewise.
        glibc: the lowest that a CPU target asks for: of the build host's compiler of kernels.
        architectures: of the targets; a build host compiles for its own alone.
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
        """Whether a target has as many chips as the manifest's mesh; a manifest is of one."""
        return target.topology is None or chips(target.topology) == self.device_count


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A target that could be added.

    Attributes:
        target: as the catalogue or a machine describes it.
        table: what its `[[target]]` says beside the name.
        note: for whom adds it.
        requirement: of its executables.
    """

    target: Target
    table: dict[str, Any]
    note: str | None
    requirement: Requirement


def cover_machines(
    helpless: Sequence[tuple[Machine, ...]], build: Build
) -> tuple[tuple[Addition, ...], bool, tuple[Group, ...]]:
    """The additions, whether they are the fewest, and the machines beyond help.

    Code is of one jaxlib, one plugin and one set of flags: each combination is a problem of its own.
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
        candidates = _candidates(classes, build)
        covers = [
            [compare("", c.requirement, merged[0].fingerprint).matches for merged in classes]
            for c in candidates
        ]
        fitted = [any(column) for column in zip(*covers, strict=True)] or [False] * len(classes)
        for fits, merged in zip(fitted, classes, strict=True):
            if not fits:
                closest = _obstacle(candidates, merged[0].fingerprint)
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


def _candidates(classes: Sequence[tuple[Machine, ...]], build: Build) -> list[_Candidate]:
    """What could be added for machines of one jaxlib, plugin and set of flags."""
    machine = classes[0][0].fingerprint
    platform, jaxlib = machine.platform, machine.jaxlib
    if platform not in PLATFORMS or not is_release(jaxlib):
        return []
    flags = tuple(flag for flag in machine.xla_flags if flag not in build.xla_flags)
    table: dict[str, Any] = {"xla_flags": flags} if flags else {}
    note = None
    # A plugin of jax's own has jax's version (prejit.compiler.environments.wanted).
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

    def candidate(target: Target, keys: dict[str, Any], note: str | None) -> _Candidate:
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
        return _Candidate(target, {**keys, **table}, note, requirement)

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
    """The target that `fingerprint = FILE` gives, and what its table still lacks."""
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


def _obstacle(candidates: Sequence[_Candidate], machine: Fingerprint) -> Verdict:
    """What stands in the way of every target that could be added, at the one that comes closest."""
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


def _prefer(
    chosen: Sequence[int],
    masks: Sequence[int],
    candidates: Sequence[_Candidate],
    classes: Sequence[tuple[Machine, ...]],
) -> list[int]:
    """The chosen sets, each replaced by the one that is best for the machines that only it serves.

    As many sets, and nobody is lost: a higher CPU level where all machines have it, the very GPU.
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
    candidate: _Candidate, machines: tuple[str, ...], taken: set[str], build: Build
) -> Addition:
    """The table of a candidate, under a name that is not taken; it is then."""
    target, table = candidate.target, candidate.table
    # The name in the bundle tells the jax version: prejit.compiler.target.resolve.
    suffix = f"-jax{candidate.requirement.jaxlib}"
    name, count = target.name, 1
    own_name = "fingerprint" in table
    while name + suffix in taken or (own_name and name in catalogue()):
        count += 1
        name = f"{target.name}-{count}"
    taken.add(name + suffix)
    if name != target.name and not own_name:  # the catalogue does not know it by that name
        table = {**_described(target), **table}
    needs = candidate.requirement
    is_elsewhere = needs.architecture not in build.architectures
    return Addition({"name": name, **table}, candidate.note, needs, machines, is_elsewhere)


def _described(target: Target) -> dict[str, Any]:
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
    if isinstance(value, Gpu):
        pairs = (f"{key} = {size}" for key, size in asdict(value).items())
        return f"{{ {', '.join(pairs)} }}"
    return str(value)
