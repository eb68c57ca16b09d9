"""What a fallback compiled is kept: for this machine only, bounded, and whatever happens to it heals."""

import dataclasses
import fcntl
import hashlib
import os
import stat
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.runtime.errors import PrejitWarning, UsageError
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.programs import local_compiler
from prejit.runtime.programs.local_compiler import PortableKey, compiled_here, is_kept_here

MACHINE = Fingerprint.current()


def program(number):
    return PortableKey(f"sha256:{number:064x}", ("cpu", "cuda"), "cpu", None)


PROGRAM = program(1)


def made(content):
    return lambda: content


def never():
    pytest.fail("compiled again")


def noise(size, seed=0):
    """What zstd cannot make smaller."""
    return np.random.default_rng(seed).bytes(size)


@pytest.fixture
def directory(runtime_cache):
    return runtime_cache / "compiled" / "v1"


def keep(number, content):
    assert compiled_here(program(number), MACHINE, made(content)) == (content, True)


def kept(number):
    return is_kept_here(program(number), MACHINE)


DECIDE = {
    **{"jaxlib": "0.0.1", "cpu_features": ("avx",), "cpu_count": MACHINE.cpu_count + 1},
    **{"architecture": "aarch64", "platform": "tpu", "plugin": "jax-cuda12-plugin 0.10.2"},
    **{"device_kind": "NVIDIA L4", "compute_capability": "8.9", "device_count": 3},
    **{"topology": "2x2", "xla_flags": ("--xla_cpu_enable_fast_math=true",)},
    "environment": ("NVIDIA_TF32_OVERRIDE=0",),
}
CHANGE_NOTHING = {
    **{"memory_bytes": 1 << 30, "cpu_model": "Another", "driver": "999.1", "cuda": "12.9"},
    **{"device_memory_bytes": 1 << 30, "glibc": "2.28"},
}


def test_a_kept_executable_is_for_its_machine_and_program_alone():
    """A home directory may be shared by machines that are not alike, and a program by bundles."""
    keep(1, b"ours")
    for axis, value in DECIDE.items():
        other = replace(MACHINE, **{axis: value})
        assert not is_kept_here(PROGRAM, other)
        assert compiled_here(PROGRAM, other, made(axis.encode())) == (axis.encode(), True)
    assert compiled_here(PROGRAM, MACHINE, never) == (b"ours", False)
    for axis, value in CHANGE_NOTHING.items():
        other = replace(MACHINE, **{axis: value})
        assert compiled_here(PROGRAM, other, never) == (b"ours", False)
    axes = {field.name for field in dataclasses.fields(Fingerprint)}
    assert axes == {*DECIDE, *CHANGE_NOTHING}, "a new axis belongs in one of the two"
    changes = [{"device": "cuda"}, {"mesh": Mesh(2, 1)}]
    changes += [{"platforms": platforms} for platforms in ((), ("cuda", "cpu"))]
    for number, other in enumerate((program(2), *(replace(PROGRAM, **each) for each in changes))):
        assert not is_kept_here(other, MACHINE)
        theirs = b"%d" % number
        assert compiled_here(other, MACHINE, made(theirs)) == (theirs, True)
    assert compiled_here(PROGRAM, MACHINE, never) == (b"ours", False)


def test_threads_flags_and_our_own_code_are_in_the_key(monkeypatch):
    """Slow code of a capped start is not served to others."""
    keep(1, b"plain")
    for name, value in (("NPROC", "1"), ("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            keep(1, name.encode())
    with monkeypatch.context() as patch:
        patch.setattr(local_compiler, "_our_code", lambda: "of mended code")
        keep(1, b"mended")
    assert compiled_here(PROGRAM, MACHINE, never) == (b"plain", False)


def test_a_compile_that_fails_leaves_nothing_and_releases_the_lock(directory):
    def failing():
        raise ValueError("out of luck")

    with pytest.raises(ValueError, match="out of luck"):
        compiled_here(PROGRAM, MACHINE, failing)
    assert list(directory.iterdir()) == []
    keep(1, b"good")
    assert [path.suffix for path in directory.iterdir()] == [""]


def test_what_xla_refused_is_replaced_and_nothing_else_is():
    keep(1, b"of another build")
    refused = b"of another build"
    again = compiled_here(PROGRAM, MACHINE, made(b"ours"), refused=refused)
    assert again == (b"ours", True)
    # A process that was refused the same one, a little later: it takes what the first one made.
    assert compiled_here(PROGRAM, MACHINE, never, refused=refused) == (b"ours", False)


@settings(
    max_examples=examples(60, 300),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(where=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255), cut=st.booleans())
def test_no_damaged_file_is_ever_served(directory, where, bits, cut):
    content = b"machine code " * 40
    compiled_here(PROGRAM, MACHINE, made(content))
    [path] = directory.iterdir()
    whole = path.read_bytes()
    at = int(where * len(whole))
    path.write_bytes(whole[:at] + (b"" if cut else bytes([whole[at] ^ bits]) + whole[at + 1 :]))
    assert compiled_here(PROGRAM, MACHINE, made(content)) == (content, True)
    assert compiled_here(PROGRAM, MACHINE, never) == (content, False)


def test_the_cache_stays_in_its_limit_and_keeps_what_was_used_last(directory, monkeypatch):
    monkeypatch.setenv("PREJIT_COMPILE_CACHE_BYTES", "3500")
    for number in (1, 2, 3):
        keep(number, noise(1000, number))
        time.sleep(0.02)  # the kernel's clock of mtimes ticks every 4 to 10 ms
    compiled_here(PROGRAM, MACHINE, never)  # used: now 2 is the oldest
    time.sleep(0.02)
    keep(4, noise(1000, 4))
    assert [kept(number) for number in (1, 2, 3, 4)] == [True, False, True, True]
    with pytest.warns(PrejitWarning, match="expected at most PREJIT_COMPILE_CACHE_BYTES=3500"):
        keep(6, noise(4000, 6))  # larger than the limit: it pushes nothing out
    assert kept(1)
    keep(5, noise(3000, 5))
    assert [kept(number) for number in (1, 2, 3, 4, 5)] == [False] * 4 + [True]
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 3500
    # Files of a clock that ran ahead go first: or they would push out all others for years.
    [path] = directory.iterdir()
    os.utime(path, (time.time() + 1e6,) * 2)
    keep(7, noise(1000, 7))
    assert [kept(number) for number in (5, 7)] == [False, True]


def test_what_is_not_ours_is_left_alone_and_a_limit_is_a_number(directory, monkeypatch):
    monkeypatch.setenv("PREJIT_COMPILE_CACHE_BYTES", "1500")
    directory.mkdir(parents=True, mode=0o700)
    (directory / "README").write_text("notes")
    (directory / f"{7:064x}").mkdir()
    keep(1, noise(1000, 1))
    keep(2, noise(1000, 2))
    assert (directory / "README").exists()
    assert (directory / f"{7:064x}").is_dir()
    assert (kept(1), kept(2)) == (False, True)
    monkeypatch.setenv("PREJIT_COMPILE_CACHE_BYTES", "0")  # keeps and reads nothing
    assert not kept(2)
    keep(2, b"now")
    for text in ("2GB", "-1", "9" * 19):
        monkeypatch.setenv("PREJIT_COMPILE_CACHE_BYTES", text)
        with pytest.raises(UsageError, match="PREJIT_COMPILE_CACHE_BYTES: expected a number of by"):
            compiled_here(PROGRAM, MACHINE, never)


def test_leftovers_of_killed_processes_go_and_those_of_living_ones_stay(directory):
    directory.mkdir(parents=True, mode=0o700)
    dead, alive = f"{8:064x}", f"{9:064x}"
    for key in (dead, alive):
        (directory / f"{key}.lock").touch()
        (directory / f".{key}.1234.abcd1234.tmp").write_bytes(b"half")
    with open(directory / f"{alive}.lock", "rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        keep(1, b"ours")
        names = {path.name for path in directory.iterdir()}
        assert not {name for name in names if dead in name}
        assert len({name for name in names if alive in name}) == 2
    keep(2, b"ours")
    assert len(list(directory.iterdir())) == 2


def replaced_by(make, path):
    path.rename(path.with_name("aside"))
    make(path)


SPOILED = {
    "others may write it": lambda path: path.chmod(0o602),
    "no frame": lambda path: path.write_bytes(hashlib.sha256(b"no frame").digest() + b"no frame"),
    "a FIFO": partial(replaced_by, os.mkfifo),
    "a link": partial(replaced_by, lambda path: path.symlink_to(path.with_name("aside"))),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_what_somebody_else_may_have_made_is_never_served(directory, spoiled):
    """It is machine code."""
    keep(1, b"ours")
    [path] = directory.iterdir()
    SPOILED[spoiled](path)
    keep(1, b"made again")
    assert compiled_here(PROGRAM, MACHINE, never) == (b"made again", False)
    assert stat.filemode(path.lstat().st_mode) == "-rw-------"


@pytest.mark.parametrize("obstacle", ["a directory in its place", "a file above", "a full disk"])
def test_a_cache_that_cannot_be_written_costs_time_and_is_said(obstacle, directory, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    keep(1, b"ours")
    if obstacle == "a full disk":
        monkeypatch.setattr(local_compiler, "write_file", full)
        monkeypatch.setattr(os, "utime", full)
        assert compiled_here(PROGRAM, MACHINE, never) == (b"ours", False)
    elif obstacle == "a file above":
        monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(next(directory.iterdir())))
    else:
        for number in (2, 3):
            local_compiler._path(program(number), MACHINE).mkdir()
    with pytest.warns(PrejitWarning, match="cannot keep compiled programs, so every start") as told:
        keep(2, b"not kept")
    assert len(told) == 1
    keep(3, b"nor this")  # another warning would be an error
    assert (kept(2), kept(3)) == (False, False)
