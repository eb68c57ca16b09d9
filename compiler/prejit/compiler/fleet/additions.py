"""Choose the fewest targets that serve machines which load no target yet."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prejit.compiler.fleet.candidates import Build, Candidate, candidates_for, obstacle
from prejit.compiler.fleet.cover import fewest_sets, union_of
from prejit.compiler.fleet.groups import Group, group_machines
from prejit.compiler.fleet.machines import Machine
from prejit.runtime.machine.compare import compare
from prejit.runtime.machine.requirement import Requirement
from prejit.runtime.machine.targets import Gpu, Target, catalogue
from prejit.runtime.verdict import Axis


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

    Args:
        helpless: machines that load no target, grouped by equal fingerprints.
        build: what the targets of the bundle share.

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
    """Return a value in the syntax of TOML."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Gpu):
        pairs = (f"{key} = {size}" for key, size in asdict(value).items())
        return f"{{ {', '.join(pairs)} }}"
    return str(value)
