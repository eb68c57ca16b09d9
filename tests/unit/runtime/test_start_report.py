"""A start in parts that add up, and hints: each cause gives one, where its part was slow and nowhere else."""

import dataclasses
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import prejit.runtime
from prejit.runtime import StartReport
from prejit.runtime import start_report as module
from prejit.runtime.base import process_facts
from prejit.runtime.base.process_facts import LoadTimes, Span
from prejit.runtime.programs.ready_programs import ProgramReport
from prejit.runtime.start_report import hints, split

PARTS = ("process", "imports", "reading", "verifying", "loading", "first_run", "other")
ME, OTHER = 1, 2


def parts(found):
    return {name: getattr(found, f"{name}_seconds") for name in PARTS}


def parts_of(*spans, **options):
    """Parts of a start from 0 to 100: loads from 20 to 60, first request from 70, by thread 1."""
    given = {
        "loaded": Span("loading", ME, 20, 60),
        "asked": (70.0, ME),
        "answered": (100.0, ME),
        "times": LoadTimes(20, True, (), 1, 2, 3),
        "read_share": 0.25,
    }
    found = split(spans=spans, **{**given, **options})
    assert sum(parts(found).values()) == pytest.approx(found.total_seconds)
    return {name: value for name, value in parts(found).items() if value}


@pytest.fixture
def at_zero(monkeypatch):
    """The process started at 0, and the first line of prejit ran at 5."""
    monkeypatch.setattr(process_facts, "exec_time", lambda: 0.0)
    monkeypatch.setattr(prejit.runtime, "first_line", 5.0)
    monkeypatch.setattr(process_facts, "imports", [])


def test_a_start_is_process_load_and_first_run_of_one_thread(at_zero, monkeypatch):
    """One thread loads, another makes the first request, and waits while the first still prepares."""
    assert parts_of() == {"process": 5, "loading": 40, "first_run": 30, "other": 25}
    busy = [Span("verification", OTHER, 22, 59), Span("loading", OTHER, 70, 99)]
    assert parts_of(*busy) == parts_of()
    both = [Span("loading", ME, 62, 80), Span("loading", OTHER, 75, 85)]
    found = parts_of(*both, asked=(70.0, OTHER), answered=(100.0, OTHER))
    assert found == {"process": 5, "loading": 40 + 8 + 10, "first_run": 20, "other": 17}
    for unfinished in ({"asked": None}, {"answered": None}, {"asked": None, "answered": None}):
        assert parts_of(**unfinished) == {"process": 5, "loading": 40, "other": 15}
    monkeypatch.setattr(
        process_facts, "imports", [Span("imports", ME, 6, 18), Span("imports", ME, 21, 24)]
    )
    found = parts_of(
        Span("reading", ME, 30, 40),
        Span("verification", ME, 34, 38),
        Span("loading", ME, 72, 92),
        Span("verification", ME, 80, 88),
    )
    assert found == {
        "process": 5,
        "imports": 15,
        "reading": 6 + 3,  # a quarter of verification was reading
        "verifying": 9,
        "loading": 40 - 3 - 10 + 12,
        "first_run": 10,
        "other": 100 - 5 - 15 - 9 - 9 - 39 - 10 + 0,
    }
    monkeypatch.setattr(process_facts, "imports", [Span("imports", ME, 6, 18)])
    found = parts_of(times=LoadTimes(20, False, (), 1, 2, 3))
    assert found == {"loading": 40, "first_run": 30, "other": 10}


@pytest.mark.parametrize("forked", [10.0, 50.0, 90.0])
def test_a_fork_begins_later(forked, at_zero, monkeypatch):
    monkeypatch.setattr(process_facts, "exec_time", lambda: forked)
    found = parts_of()
    assert "process" not in found
    assert sum(found.values()) == 100 - forked
    if forked > 60:  # after the load: it has no start of its own
        assert parts_of(asked=None) == {}


QUICK = StartReport(0.01, 0.04, 0.01, 0.01, 0.01, 0.01, 0.0, 0.1, 0, 10_000_000, 0)
LOCAL = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
BLOB = "/srv/my models/demo/blobs/sha256/1234"


@pytest.fixture
def root(tmp_path):
    """/proc of a process on a local disk that is quick and has nothing to wait for."""
    proc = tmp_path / "kernel" / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(LOCAL)
    (proc / "io").write_text("rchar: 100\nread_bytes: 0\nwrite_bytes: 5\n")
    (proc / "schedstat").write_text("5000000000 1000 7\n")
    return tmp_path / "kernel"


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """A module with bytecode and 4 CPUs: no reason to be slow. Gives the bytecode."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.delenv("PREJIT_PLAIN_START", raising=False)
    source = tmp_path / "packages" / "numpy.py"
    bytecode = Path(importlib.util.cache_from_source(str(source)))
    bytecode.parent.mkdir(parents=True)
    source.write_text("")
    bytecode.write_bytes(b"")
    os.utime(bytecode, (1e9, 1e9))
    fake = ModuleType("fake_numpy")
    fake.__file__ = str(source)
    monkeypatch.setitem(sys.modules, "fake_numpy", fake)
    monkeypatch.setattr(module, "_MODULES", ("fake_numpy", "no_such_module", "builtins"))
    return bytecode


def slow(part, seconds=2.0, **changes):
    name = f"{part}_seconds"
    whole = QUICK.total_seconds - getattr(QUICK, name) + seconds
    return dataclasses.replace(QUICK, **{name: seconds, "total_seconds": whole, **changes})


def found(report, root, blob=BLOB, *programs):
    return "\n".join(hints(report, blob, programs, str(root)))


def test_a_part_that_is_slow_without_a_cause_has_no_hint(root):
    for part in ("process", "imports", "reading", "verifying", "loading", "first_run", "other"):
        for kernel in (root, root / "none"):  # also of a kernel that says nothing
            assert not found(slow(part), kernel)


@pytest.mark.parametrize(("kind", "what"), [("nfs4", "network"), ("fuse.gcsfuse", "FUSE")])
def test_a_network_file_system(kind, what, quiet, root):
    mountinfo = root / "proc/self/mountinfo"
    mounts = LOCAL + f"40 22 0:50 / /srv/my\\040models rw shared:9 master:2 - {kind} host:/a rw\n"
    mountinfo.write_text(mounts)
    said = found(slow("reading"), root)
    assert said.startswith("reading took 2.00 s: /srv/my models/demo is on /srv/my models (")
    assert kind in said
    assert what in said
    assert not found(slow("loading"), root)
    assert not found(slow("reading"), root, "/srv/my models2/blobs/sha256/1")
    mountinfo.write_text(mounts + "41 40 8:2 / /srv/my\\040models rw - xfs /dev/sdb rw\n")
    assert not found(slow("reading"), root), "a local one is mounted over it"
    at = quiet.parents[1]
    mountinfo.write_text(f"{LOCAL}40 22 0:50 / {at} rw - {kind} host:/a rw\n")
    for part in ("process", "imports"):
        assert f"fake_numpy came from {at} ({kind}" in found(slow(part), root)
    assert not found(slow("first_run"), root)


DISK = "rchar: 9\nread_bytes: {}\n"
WAITED = "5000000000 1500000000 7\n"


@pytest.mark.parametrize(
    ("file", "content", "part", "said"),
    [
        ("io", DISK.format(9_000_000), "first_run", "took 2.00 s: 9 MB have come from a"),
        ("io", DISK.format(9_000_000), "reading", "/srv/my models/demo on a faster disk"),
        ("io", DISK.format(150_000_000), "imports", "took 2.01 s: 150 MB have come from a"),
        ("io", DISK.format(150_000_000), "other", ""),
        ("io", DISK.format(1_000_000), "first_run", ""),
        ("schedstat", WAITED, "imports", "the main thread has waited 1.50 s for a CPU"),
        ("schedstat", WAITED, "other", ""),
    ],
)
def test_a_cold_disk_and_full_cpus(file, content, part, said, root):
    (root / "proc/self" / file).write_text(content)
    told = found(slow(part), root)
    assert said in told if said else not told
    assert file == "io" or not found(slow("imports", 20.0), root)


def test_missing_bytecode(quiet, root, monkeypatch):
    quiet.write_bytes(b"")  # this start had to make it
    for forbidden, said in (
        (True, "PYTHONDONTWRITEBYTECODE or -B forbids to keep it"),
        (False, "It is kept for the next start"),
    ):
        monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
        told = found(slow("imports"), root)
        assert "Python had no bytecode of fake_numpy" in told
        assert f"python -m compileall -q {quiet.parents[1]}`" in told
        assert said in told
        quiet.unlink(missing_ok=True)


def test_no_receipt(root, runtime_cache):
    for part in ("verifying", "reading"):
        said = found(slow(part, hashed_bytes=500_000_000), root)
        assert "500 MB had no receipt, as in every first start. The next start" in said
        assert str(runtime_cache) in said
    runtime_cache.write_text("a file, so that no directory can be made there")
    said = found(slow("verifying", hashed_bytes=500_000_000), root)
    assert f"{runtime_cache} cannot be written, so no receipt is kept" in said


def test_compiled_programs_one_cpu_plain_start(root, monkeypatch):
    programs = [ProgramReport("a", "compiled", 1.0), ProgramReport("b", "kept", 0.1)]
    assert "1 of the programs was compiled" in found(slow("loading"), root, BLOB, *programs)
    assert not found(slow("loading"), root, BLOB, programs[1])
    assert not found(slow("imports"), root, BLOB, *programs)
    monkeypatch.setenv("PREJIT_PLAIN_START", "1")
    assert "PREJIT_PLAIN_START is set" in found(slow("imports"), root)
    assert not found(slow("first_run"), root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert "this process may use one CPU" in found(slow("first_run"), root)
    assert not found(QUICK, root)


def test_the_real_files_of_the_kernel_have_the_form_of_those_above():
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    kinds = {line.split(" ")[4]: line.partition(" - ")[2].split(" ")[0] for line in lines}
    assert kinds["/proc"] == "proc"
    assert re.search(r"^read_bytes: \d+$", Path("/proc/self/io").read_text(), re.M)
    assert re.fullmatch(r"\d+ \d+ \d+\n", Path("/proc/self/schedstat").read_text())
