"""Control groups: the right one is found, and a process enters it before it becomes the measured command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import memory_limit
from benchmarks.harness.memory_limit import Controller, Group, NoMemoryLimitError, controllers


def test_version_2_comes_first(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").touch()
    assert [each.name for each in controllers(tmp_path)] == ["cgroup v2", "cgroup v1"]


def test_version_2_without_memory_is_no_controller(tmp_path: Path) -> None:
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified" / "cgroup.subtree_control").write_text("hugetlb\n")
    assert controllers(tmp_path) == []


def test_the_process_itself_enters_the_group(tmp_path: Path) -> None:
    limited = Group(Controller("cgroup v1", tmp_path, "limit"), tmp_path)
    command = limited.command(("/bin/sh", "-c", "echo $$"))
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "cgroup.procs").read_text() == printed


def test_the_limit_is_written_in_bytes(tmp_path: Path) -> None:
    Group(Controller("cgroup v2", tmp_path, "memory.max"), tmp_path).limit(123)
    assert (tmp_path / "memory.max").read_text() == "123"


def test_a_machine_without_controllers_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "controllers", lambda: [])
    with pytest.raises(NoMemoryLimitError, match="no controller in"), memory_limit.group():
        pass
