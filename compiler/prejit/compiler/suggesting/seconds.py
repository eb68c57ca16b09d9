"""Estimate how long buckets take to compile, from the report of an earlier build."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prejit.compiler.manifest.specs import ProgramSpec
from prejit.runtime.errors import StoreError, UsageError


@dataclass(frozen=True, slots=True)
class CompileSeconds:
    """The seconds that compiling a program took, as the mean of each kind.

    Attributes:
        by_kind: mean by kind of program.
        mean: mean of all programs, for kinds that were not compiled.
    """

    by_kind: dict[str, float]
    mean: float

    def of(self, specs: Iterable[ProgramSpec]) -> float:
        """Return the estimate for programs, one after the other."""
        return sum(self.by_kind.get(spec.kind, self.mean) for spec in specs)


def read_seconds(path: Path) -> CompileSeconds:
    """Read the compile times in the report of a build.

    Raises:
        StoreError: the file cannot be read.
        UsageError: it is no report, or has no programs.
    """
    try:
        report = json.loads(path.read_bytes())
        rows = [(one["kind"], float(one["compile_seconds"])) for one in report["programs"]]
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: expected the report of a build, found something else",
            hint="`prejit build` writes it beside the bundle: NAME.report.json",
        ) from error
    if not rows:
        raise UsageError(f"{path}: expected programs, found none")
    kinds: dict[str, list[float]] = {}
    for kind, seconds in rows:
        kinds.setdefault(kind, []).append(seconds)
    means = {kind: sum(each) / len(each) for kind, each in kinds.items()}
    return CompileSeconds(means, sum(seconds for _, seconds in rows) / len(rows))
