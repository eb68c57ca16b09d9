"""Control groups: the right one is found, and a process enters it before it becomes the measured command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import control_groups
from benchmarks.harness.control_groups import (
    DISK_READS,
    MEMORY,
    Controller,
    Group,
    NoControlGroupError,
    controllers,
)


def test_version_2_comes_first(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").touch()
    assert [each.name for each in controllers(MEMORY, tmp_path)] == ["cgroup v2", "cgroup v1"]


def test_version_2_without_memory_is_no_controller(tmp_path: Path) -> None:
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified" / "cgroup.subtree_control").write_text("hugetlb\n")
    assert controllers(MEMORY, tmp_path) == []


def test_the_process_itself_enters_the_group(tmp_path: Path) -> None:
    limited = Group(Controller("cgroup v1", tmp_path, "limit"), tmp_path)
    command = limited.command(("/bin/sh", "-c", "echo $$"))
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "cgroup.procs").read_text() == printed


def test_the_limit_is_written_in_bytes(tmp_path: Path) -> None:
    Group(Controller("cgroup v2", tmp_path, "memory.max"), tmp_path).limit_memory(123)
    assert (tmp_path / "memory.max").read_text() == "123"


def test_a_machine_without_controllers_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_groups, "controllers", lambda resource: [])
    with (
        pytest.raises(NoControlGroupError, match="for memory: no controller in"),
        control_groups.group(MEMORY),
    ):
        pass


@pytest.mark.parametrize(
    ("controller", "expected"),
    [
        (("cgroup v1", DISK_READS.old_setting), "254:0 200"),
        (("cgroup v2", DISK_READS.setting), "254:0 rbps=200"),
    ],
)
def test_a_limit_of_reads_has_the_form_of_its_version(
    tmp_path: Path, controller: tuple[str, str], expected: str
) -> None:
    name, setting = controller
    Group(Controller(name, tmp_path, setting), tmp_path).limit_reads("254:0", 200)
    assert (tmp_path / setting).read_text() == expected
