"""Conditions of a start: what the page cache holds, where the process may write, CPUs, memory.

A condition changes how a row's process runs, the same for every engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.harness.control_groups import Group
from benchmarks.harness.fresh_processes import Row, Sample, command_line, run_once
from benchmarks.harness.limited_disk import counters, work_since
from benchmarks.harness.page_cache import make_cold, resident_ranges

RECEIPTS = "PREJIT_RUNTIME_CACHE"
"""Variable that names the directory of prejit's receipts."""
_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


@dataclass(frozen=True)
class Condition:
    """A condition under which processes start.

    Attributes:
        name: head of its column.
        cold: whether files are put out of the page cache before each process.
        fresh_root: whether the process has a new home, no bytecode, and models that it cannot write.
        one_cpu: whether it runs on one CPU.
        limited: whether its memory is limited.
    """

    name: str
    cold: bool = False
    fresh_root: bool = False
    one_cpu: bool = False
    limited: bool = False


WARM = Condition("page cache warm")
COLD = Condition("disk cold", cold=True)
FRESH = Condition("fresh root", fresh_root=True)
ONE_CPU = Condition("1 CPU", one_cpu=True)
LIMITED = Condition("memory limit, disk cold", cold=True, limited=True)
CONDITIONS = (WARM, COLD, FRESH, ONE_CPU, LIMITED)


@dataclass(frozen=True)
class Start:
    """Runs a row under a condition, from exec to its first token.

    Attributes:
        condition: the condition.
        models: directory of models, bundles and environments.
        new_receipts: directory that is removed before each process. A row that keeps its receipts there has
            none.
        files: files that are put out of the page cache where the kernel cannot drop all, by row.
        checked: files of the model, by row; how much of them is still in the cache is counted.
        group: control group for a limited condition.
        limits: bytes of memory by row.
        slow: control group whose processes read the disk slowly.
        disk: number of the disk whose work is counted; empty: none is.
    """

    condition: Condition
    models: Path
    new_receipts: Path
    files: Mapping[str, Sequence[Path]]
    checked: Mapping[str, Sequence[Path]]
    group: Group | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    slow: Group | None = None
    disk: str = ""

    def run(self, row: Row) -> Sample:
        """Run a row once.

        Returns:
            The sample; where files were made cold, `made_cold` says how, and `cached_share` how much of the
            model's files the page cache still held. If the work of a disk is counted, it has the figures of
            limited_disk.work_since at the first token.

        Raises:
            FailedProcessError: the process failed.
        """
        shutil.rmtree(self.new_receipts, ignore_errors=True)
        command, variables = command_line(row), dict(row.environment)
        with tempfile.TemporaryDirectory() as home:
            if self.condition.fresh_root:
                command = read_only(command, self.models)
                variables = fresh_root(variables, Path(home))
            if self.condition.one_cpu:
                command = ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command)
            facts: Sample = {}
            if self.condition.limited and self.group:
                self.group.limit_memory(self.limits[row.name])
                command = self.group.command(command)
                facts["limit_bytes"] = self.limits[row.name]
            if self.slow:
                command = self.slow.command(command)
            if self.condition.cold:
                facts["made_cold"] = make_cold(self.files[row.name])
                facts["cached_share"] = cached_share(self.checked[row.name])
            changed = replace(row, command=command, environment=variables)
            count = partial(work_since, self.disk, counters(self.disk)) if self.disk else dict
            return {**run_once(changed, until="FIRST", at_stop=count), **facts}


def cached_share(files: Sequence[Path]) -> float:
    """Return the share of the bytes of files that the page cache holds, from 0 to 1."""
    size = sum(path.stat().st_size for path in files)
    held = sum(part.length for path in files for part in resident_ranges(path))
    return held / size if size else 0.0


def fresh_root(variables: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the variables of a process with a new home, no bytecode and no receipts."""
    kept = {name: value for name, value in variables.items() if name != RECEIPTS}
    return {
        **kept,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPYCACHEPREFIX": str(home / "bytecode"),
    }


def read_only(command: tuple[str, ...], directory: Path) -> tuple[str, ...]:
    """Return a command line that mounts a directory read-only for itself, then becomes `command`."""
    return ("unshare", "--mount", "/bin/sh", "-c", _READ_ONLY, str(directory), *command)


def can_mount(directory: Path) -> bool:
    """Return whether this process may mount a directory read-only."""
    try:
        done = subprocess.run(read_only(("true",), directory), capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def interpreter_directories(python: str) -> list[Path]:
    """Return the directories from which an interpreter of a virtual environment imports."""
    libraries = [path for path in Path(python).parents[1].glob("lib/python*/site-packages")]
    return [*libraries, Path(sys.base_prefix) / "lib", Path(sys.base_prefix) / "bin"]
