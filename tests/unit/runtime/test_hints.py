"""Hints: each cause gives one, where its part was slow and nowhere else."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from prejit.runtime import start_report as module
from prejit.runtime.programs.ready_programs import ProgramReport
from prejit.runtime.start_report import StartReport, hints

QUICK = StartReport(0.01, 0.04, 0.01, 0.01, 0.01, 0.01, 0.0, 0.1, 0, 10_000_000, 0)
LOCAL = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
BLOB = "/srv/my models/demo/blobs/sha256/1234"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """/proc of a process with 4 CPUs on a local disk that is quick and has nothing to wait for."""
    kernel = tmp_path / "kernel"
    (kernel / "proc/self").mkdir(parents=True)
    (kernel / "proc/self/mountinfo").write_text(LOCAL)
    (kernel / "proc/self/io").write_text("rchar: 100\nread_bytes: 0\nwrite_bytes: 5\n")
    (kernel / "proc/self/schedstat").write_text("5000000000 1000 7\n")
    return kernel


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with bytecode, 4 CPUs, a cache that can be written: no reason to be slow."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.delenv("PREJIT_PLAIN_START", raising=False)
    source = tmp_path / "packages" / "numpy.py"
    source.parent.mkdir()
    source.write_text("")
    bytecode = Path(importlib.util.cache_from_source(str(source)))
    bytecode.parent.mkdir()
    bytecode.write_bytes(b"")
    os.utime(bytecode, (1e9, 1e9))
    fake = type(sys)("fake_numpy")
    fake.__file__ = str(source)
    monkeypatch.setitem(sys.modules, "fake_numpy", fake)
    monkeypatch.setattr(module, "_MODULES", ("fake_numpy", "no_such_module", "builtins"))
    return bytecode


def slow(part: str, seconds: float = 2.0, **changes: Any) -> StartReport:
    whole = QUICK.total_seconds - getattr(QUICK, part) + seconds
    return dataclasses.replace(QUICK, **{part: seconds, "total_seconds": whole, **changes})


def found(report: StartReport, root: Path, blob: str = BLOB, *programs: ProgramReport) -> str:
    return "\n".join(hints(report, blob, programs, str(root)))


def test_a_part_that_is_slow_without_a_cause_has_no_hint(root: Path) -> None:
    for part in ("process", "imports", "reading", "verifying", "loading", "first_run", "other"):
        for kernel in (root, root / "none"):  # also of a kernel that says nothing
            assert hints(slow(f"{part}_seconds"), BLOB, [], str(kernel)) == ()


@pytest.mark.parametrize(
    ("report", "is_slow"),
    [
        (slow("verifying_seconds", 0.09, hashed_bytes=1), False),
        (slow("verifying_seconds", 1.0, hashed_bytes=1, loading_seconds=9.0, total_seconds=10.08), False),
        (slow("other_seconds", 50.0, hashed_bytes=1), False),
        (slow("verifying_seconds", 0.5, hashed_bytes=1, other_seconds=99, total_seconds=99.59), True),
    ],
)  # fmt: skip
def test_a_part_is_slow_by_itself_and_beside_the_others(
    report: StartReport, is_slow: bool, root: Path
) -> None:
    """The time of the program itself makes no part look quick."""
    assert ("verifying took" in found(report, root)) == is_slow


@pytest.mark.parametrize(("kind", "what"), [("nfs4", "network"), ("fuse.gcsfuse", "FUSE")])
def test_a_network_file_system(kind: str, what: str, quiet: Path, root: Path) -> None:
    mounts = LOCAL + f"40 22 0:50 / /srv/my\\040models rw shared:9 master:2 - {kind} host:/a rw\n"
    (root / "proc/self/mountinfo").write_text(mounts)
    said = found(slow("reading_seconds"), root)
    assert said.startswith("reading took 2.00 s: /srv/my models/demo is on /srv/my models (")
    assert kind in said
    assert what in said
    assert not found(slow("loading_seconds"), root)
    assert not found(slow("reading_seconds"), root, "/srv/my models2/blobs/sha256/1")
    local_on_top = mounts + "41 40 8:2 / /srv/my\\040models rw - xfs /dev/sdb rw\n"
    (root / "proc/self/mountinfo").write_text(local_on_top)
    assert not found(slow("reading_seconds"), root)
    at = quiet.parents[1]
    (root / "proc/self/mountinfo").write_text(f"{LOCAL}40 22 0:50 / {at} rw - {kind} host:/a rw\n")
    for part in ("process_seconds", "imports_seconds"):
        assert f"fake_numpy came from {at} ({kind}" in found(slow(part), root)
    assert not found(slow("first_run_seconds"), root)


DISK = "rchar: 9\nread_bytes: {}\n"
WAITED = "5000000000 1500000000 7\n"


@pytest.mark.parametrize(
    ("file", "content", "part", "said"),
    [
        ("io", DISK.format(9_000_000), "first_run_seconds", "took 2.00 s: 9 MB have come from a"),
        ("io", DISK.format(9_000_000), "reading_seconds", "/srv/my models/demo on a faster disk"),
        ("io", DISK.format(150_000_000), "imports_seconds", "took 2.01 s: 150 MB have come from a"),
        ("io", DISK.format(150_000_000), "other_seconds", ""),
        ("io", DISK.format(1_000_000), "first_run_seconds", ""),
        ("schedstat", WAITED, "imports_seconds", "the main thread has waited 1.50 s for a CPU"),
        ("schedstat", WAITED, "other_seconds", ""),
    ],
)
def test_a_cold_disk_and_busy_cpus(
    file: str, content: str, part: str, said: str, root: Path
) -> None:
    (root / "proc/self" / file).write_text(content)
    told = found(slow(part), root)
    assert said in told if said else not told
    assert file == "io" or not found(slow("imports_seconds", 20.0), root)


def test_missing_bytecode(quiet: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    quiet.write_bytes(b"")  # this start had to make it
    said = found(slow("imports_seconds"), root)
    assert "Python had no bytecode of fake_numpy" in said
    assert f"python -m compileall -q {quiet.parents[1]}`" in said
    assert "PYTHONDONTWRITEBYTECODE or -B forbids to keep it" in said
    assert not found(slow("loading_seconds"), root)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    quiet.unlink()
    assert "It is kept for the next start" in found(slow("imports_seconds"), root)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != quiet.parent)
    assert f"{quiet.parent} cannot be written" in found(slow("imports_seconds"), root)


def test_no_receipt(root: Path, runtime_cache: Path) -> None:
    for part in ("verifying_seconds", "reading_seconds"):
        said = found(slow(part, hashed_bytes=500_000_000), root)
        assert "500 MB had no receipt, as in every first start. The next start" in said
        assert str(runtime_cache) in said
    runtime_cache.write_text("a file, so that no directory can be made there")
    said = found(slow("verifying_seconds", hashed_bytes=500_000_000), root)
    assert f"{runtime_cache} cannot be written, so no receipt is kept" in said


def test_programs_that_were_compiled_here(root: Path) -> None:
    programs = [ProgramReport("a", "compiled", 1.0), ProgramReport("b", "kept", 0.1)]
    assert "1 of the programs was compiled" in found(slow("loading_seconds"), root, BLOB, *programs)
    assert not found(slow("loading_seconds"), root, BLOB, programs[1])
    assert not found(slow("imports_seconds"), root, BLOB, *programs)


def test_one_cpu_and_a_plain_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREJIT_PLAIN_START", "1")
    assert "PREJIT_PLAIN_START is set" in found(slow("imports_seconds"), root)
    assert not found(slow("first_run_seconds"), root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert "this process may use one CPU" in found(slow("first_run_seconds"), root)
    assert not found(QUICK, root)


def test_the_real_files_of_the_kernel_have_the_form_of_those_above() -> None:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    kinds = {line.split(" ")[4]: line.partition(" - ")[2].split(" ")[0] for line in lines}
    assert kinds["/proc"] == "proc"
    assert re.search(r"^read_bytes: \d+$", Path("/proc/self/io").read_text(), re.M)
    assert re.fullmatch(r"\d+ \d+ \d+\n", Path("/proc/self/schedstat").read_text())
