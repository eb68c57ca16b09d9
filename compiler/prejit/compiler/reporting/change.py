"""What changed between the bundles of two reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Change:
    """The difference of a bundle to the one that it replaced.

    Attributes:
        digest: the digest of the bundle that was replaced.
        date: when that one was built.
        added, removed: programs, each as `NAME for TARGET`.
        changed: programs whose StableHLO differs.
        recompiled: programs with the same StableHLO and another executable.
        executable_bytes: growth of all executables; negative: they shrank.
        weights: whether the weights differ.
        versions: for each package whose version differs, `before -> after`.
    """

    digest: str
    date: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    recompiled: tuple[str, ...]
    executable_bytes: int
    weights: bool
    versions: dict[str, str]


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    """Return the difference of two reports, as their JSON has them.

    Raises:
        KeyError, TypeError: `before` is no report.
    """
    old, new = _programs(before["programs"]), _programs(after["programs"])
    both = [name for name in new if name in old]
    changed = [name for name in both if old[name]["portable"] != new[name]["portable"]]
    recompiled = [name for name in both if old[name]["executable"] != new[name]["executable"]]
    sums = [sum(one["executable_bytes"] for one in each.values()) for each in (old, new)]
    was, now = before["versions"], after["versions"]
    return Change(
        before["digest"],
        before["date"],
        tuple(name for name in new if name not in old),
        tuple(name for name in old if name not in new),
        tuple(changed),
        tuple(name for name in recompiled if name not in changed),
        sums[1] - sums[0],
        before["weights"] != after["weights"],
        {
            name: f"{was.get(name, 'none')} -> {now.get(name, 'none')}"
            for name in sorted({*was, *now})
            if was.get(name) != now.get(name)
        },
    )


def _programs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {f"{row['program']} for {row['target']}": row for row in rows}
