"""Recorded bundles are verified before jax sees a byte, unpacked once, and verified again at each start."""

import dataclasses
import os
import time

import pytest
from tests.layouts import GOLDEN

from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.machine import kept_files as receipts
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.recorded import recorded_bundle
from prejit.runtime.recorded.recorded_bundle import on_cpu, open_recorded

from .conftest import FILES, content_of


def found_in(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


EXPECTED = {file: content_of(name) for name, file in FILES.items()}


def test_files_come_read_only_and_later_starts_do_nothing(
    write_recorded, runtime_cache, monkeypatch
):
    killed = runtime_cache / "recorded" / "v1" / ".abc.12.34.tmp"
    killed.mkdir(parents=True)
    opened = open_recorded(write_recorded())
    assert opened.name == "serve"
    assert opened.verdict.matches
    assert found_in(opened.directory) == EXPECTED
    assert opened.directory.is_relative_to(runtime_cache)
    assert {path.stat().st_mode & 0o777 for path in opened.directory.iterdir()} == {0o444}
    assert opened.directory.stat().st_mode & 0o777 == 0o555
    assert [path.name for path in opened.directory.parent.iterdir()] == [opened.directory.name]
    monkeypatch.setattr(receipts, "SETTLED_SECONDS", -1.0)
    path = write_recorded()
    first = open_recorded(path).directory
    for name in ("read_files", "digest_file"):
        monkeypatch.setattr(recorded_bundle, name, lambda *_: pytest.fail("done again"))
        assert open_recorded(path).directory == first
    assert found_in(first) == EXPECTED


def test_files_that_no_start_used_for_a_month_make_room(write_recorded):
    """Only what unpacks removes. A clock that was ahead keeps nothing for ever."""
    first = open_recorded(write_recorded()).directory
    root, now = first.parent, time.time()
    (root / ".abc.12.34.tmp").mkdir()
    for name, days in (("0", 31), ("1", 29), ("2", -5000)):
        (root / (name * 64)).mkdir()
        os.utime(root / (name * 64), (0, now - days * 86400))
    os.utime(first, (0, now - 40 * 86400))
    assert open_recorded(write_recorded()).directory == first
    assert len([*root.iterdir()]) == 5
    recorded_bundle._remove_unused(root)
    assert {*root.iterdir()} == {first, root / ("1" * 64), root / ("2" * 64)}
    assert (root / ("2" * 64)).stat().st_mtime < now + 3600


def test_a_cache_of_another_user_is_an_error_that_names_the_variable(runtime_cache):
    with pytest.raises(StoreError, match="cannot open") as raised:
        with recorded_bundle._locked(runtime_cache / "of another", shared=True):
            pytest.fail("opened")
    assert "PREJIT_RUNTIME_CACHE" in raised.value.hint


SCORE = FILES["jit_score"]
CHANGES = {
    "other bytes": lambda at: rewritten(at / SCORE, lambda old: bytes([old[0] ^ 1]) + old[1:]),
    "fewer bytes": lambda at: rewritten(at / SCORE, lambda old: old[:-1]),
    "a file less": lambda at: (at / SCORE).unlink(),
    "a file more": lambda at: (at / f"jit_other-{'0' * 64}-cache").write_bytes(b"of another"),
    "a link": lambda at: linked(at / SCORE, at.parent.parent / "elsewhere"),
    "an open directory": lambda at: at.chmod(0o777),
    "an open file": lambda at: (at / SCORE).chmod(0o666),
}


def rewritten(file, change):
    file.chmod(0o644)
    file.write_bytes(change(file.read_bytes()))


def linked(file, elsewhere):
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_somebody_changed_in_the_cache_is_replaced(change, write_recorded, monkeypatch):
    monkeypatch.setattr(receipts, "SETTLED_SECONDS", -1.0)  # with receipts for the sound files
    path = write_recorded()
    directory = open_recorded(path).directory
    directory.chmod(0o755)
    change(directory)
    again = open_recorded(path).directory
    assert found_in(again) == EXPECTED
    assert not any(file.is_symlink() for file in again.iterdir())
    assert again.stat().st_mode & 0o777 == 0o555
    assert {file.stat().st_mode & 0o777 for file in again.iterdir()} == {0o444}


def test_a_damaged_or_other_bundle_starts_no_command(write_recorded, tmp_path, ran):
    path, started = write_recorded(), tmp_path / "started"
    [layer] = [f for f in (path / "blobs" / "sha256").iterdir() if f.read_bytes()[:1] != b"{"]
    layer.write_bytes(layer.read_bytes()[:-1] + b"?")
    for options in ([], ["--report"], ["--require-aot"]):
        found = ran("run", path, *options, "--", "touch", started, status=4).err
        assert "error[reject]" in found
    assert not started.exists()
    with pytest.raises(UsageError, match="found one of `prejit build`"):
        open_recorded(GOLDEN / "chunks")


def test_a_mismatch_is_an_error_if_nothing_may_compile(
    write_recorded, tmp_path, runtime_cache, ran
):
    path, started = write_recorded(jaxlib="0.0.1"), tmp_path / "started"
    assert (open_recorded(path).directory, runtime_cache.exists()) == (None, False)
    for options in (["--on-mismatch", "error"], ["--require-aot"]):
        found = ran("run", path, *options, "--", "touch", started, status=3).err
        assert "jaxlib: needs 0.0.1, found" in found
        assert "hint: add a target on this machine with: prejit record" in found
    assert not started.exists()
    found = ran("run", path, "--report", "--", "touch", started).err
    assert started.exists()
    assert "The program runs without the bundle" in found


def test_a_program_on_the_cpu_beside_a_gpu_gets_files_for_cpus(write_recorded, monkeypatch):
    here = Fingerprint.current()
    gpu = {"platform": "cuda", "device_kind": "NVIDIA L4", "device_count": 1}
    machine = dataclasses.replace(here, **gpu)
    monkeypatch.setattr(Fingerprint, "current", classmethod(lambda _: machine))
    assert found_in(open_recorded(write_recorded()).directory) == EXPECTED
    assert on_cpu(machine) == here
