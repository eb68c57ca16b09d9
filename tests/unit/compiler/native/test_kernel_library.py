"""The library of native kernels: what makes it, what it is cached under, what it asks of a machine."""

import dataclasses
import importlib.util
import os
import re
import shutil
from importlib import metadata
from pathlib import Path

import pytest

from prejit.compiler.native import kernel_library as library
from prejit.compiler.native.kernel_library import KernelLibrary, NoKernels, build_kernels
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import host_toolchain
from prejit.runtime.errors import BuildError, UsageError
from prejit.runtime.format.checks.elf import read_shared_library
from prejit.runtime.format.names import kernel_target
from prejit.runtime.machine.fingerprint import Fingerprint

TOY = Path(__file__).parents[3] / "toy_kernels"
VERSIONS = {name: metadata.version(name) for name in ("jax", "jaxlib")}


def toolchain(name="cpu-x86-64-v2", **changes):
    return host_toolchain(dataclasses.replace(target(name), **changes), VERSIONS)


def built(cache, chain=None, **more):
    """The library of the toy kernels, or of other `sources`."""
    found = build_kernels(chain or toolchain(), cache, **{"sources": TOY, **more})
    assert isinstance(found, KernelLibrary)
    return found


@pytest.fixture
def cache(tmp_path):
    return DirectoryStore.open(tmp_path / "cache")


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch, toy_library):
    """A g++ alone on PATH that copies the toy library, and notes what it was told."""
    content = tmp_path / "made.so"
    content.write_bytes(toy_library[1])
    return write_compiler(tmp_path, monkeypatch, f"cp {content} $out")


def write_compiler(tmp_path, monkeypatch, makes):
    directory = tmp_path / "bin"
    directory.mkdir(exist_ok=True)
    for tool in ("cp", "cat"):
        if not (directory / tool).exists():
            (directory / tool).symlink_to(shutil.which(tool) or tool)
    path = directory / "g++"
    path.write_text(
        '#!/bin/sh\ncase "$*" in *--version) echo "g++ (Fake 1-2) 1.2.3"; exit;; esac\n'
        f'echo "$@" >> {tmp_path}/told\n'
        f'for word; do [ "$last" = -o ] && out=$word; last=$word; done\n{makes}\n'
    )
    path.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    without_compilers(monkeypatch, directory)
    return tmp_path / "told"


def without_compilers(monkeypatch, path):
    """There are those on `path` alone, and no zig."""
    find = importlib.util.find_spec
    without = lambda name: None if name == "ziglang" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setenv("PATH", str(path))


def test_a_library_is_compiled_once_by_the_compiler_that_is_asked_for(fake_compiler, cache):
    first = built(cache)
    compiled = fake_compiler.read_text()
    assert compiled.count("\n") == 2, "one source, one link"
    assert built(cache) == first
    assert library.find_kernels(toolchain(), cache, sources=TOY) == first
    assert fake_compiler.read_text() == compiled
    assert (first.compiler, first.level) == ("g++ 1.2.3", "x86-64-v2")
    assert kernel_target("scale", first.digest) == f"prejit_scale.{first.digest[7:23]}"
    cache.blob_path(first.digest).write_bytes(b"x" * first.size)  # a damaged one is made again
    assert library.find_kernels(toolchain(), cache, sources=TOY) is None
    assert built(cache) == first
    assert cache.read_blob(first.digest) is not None
    # A rebuild takes the compiler of the bundle, where it is, and not the first one of its machine.
    directory = Path(os.environ["PATH"])
    other = shutil.copy(directory / "g++", directory / "clang++")
    other.write_text(other.read_text().replace("g++ (Fake 1-2) 1.2.3", "clang version 19.1.7"))
    wanted = f"clang version 19.1.7; {os.confstr('CS_GNU_LIBC_VERSION')}"
    chosen = built(cache, first=wanted)
    assert chosen.compiler == "clang 19.1.7"
    assert built(cache, first="g++ 1.2.4") == built(cache) == first, "it is not here"
    found = library.kernel_conditions(chosen, toolchain(), cache, sources=TOY)
    assert found["compiler"] == wanted
    assert found.keys() >= {"flags", "link flags", "FFI headers", "our code", "source toy.cc"}
    other.unlink()
    assert library.kernel_conditions(chosen, toolchain(), cache, sources=TOY) == {}


def test_what_decides_the_library_is_in_its_key(fake_compiler, cache, tmp_path, monkeypatch):
    """Level, sources, flags, headers, the compiler's version and arguments; not the place of the sources."""
    sources = tmp_path / "elsewhere"
    shutil.copytree(TOY, sources)

    def compiles(chain=None, at=sources):
        before = fake_compiler.read_text() if fake_compiler.exists() else ""
        built(cache, chain, sources=at)
        return fake_compiler.read_text() != before

    assert compiles(at=TOY)
    assert not compiles()
    assert not compiles(toolchain(driver="1"))
    assert compiles(toolchain("cpu-x86-64-v3"))
    for name in ("other.h", "toy.cc"):
        (sources / name).write_text("// changed")
        assert compiles()
    headers = tmp_path / "jaxlib" / "include"
    shutil.copytree(library.ffi_headers(toolchain()) or TOY, headers)
    (headers / "xla/ffi/api/c_api.h").write_text("// of another jaxlib")
    for place, name, value in (
        (library, "ffi_headers", lambda _: headers),
        (library, "_COMPILE_FLAGS", ("-O0",)),
        (library, "code_digest", lambda *roots: f"sha256:of mended {roots}"),
        (None, "CPLUS_INCLUDE_PATH", "/x"),
        (None, "CXX", "g++ -O0 -ffast-math"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value) if place else patch.setenv(name, value)
            assert compiles(), name
    compiler = Path(os.environ["PATH"]) / "g++"
    compiler.write_text(compiler.read_text().replace("1.2.3", "1.2.4"))
    assert compiles()


def without_kernels(cache):
    found = build_kernels(toolchain(), cache, sources=TOY)
    assert isinstance(found, NoKernels)
    assert found.worth_telling
    return found


def test_no_compiler_is_told(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    without_compilers(monkeypatch, "/nonexistent")
    found = without_kernels(cache)
    monkeypatch.setenv("CXX", "g++ -DNAME='a")
    with pytest.raises(UsageError, match=r"CXX: expected a command as a shell .*-DNAME='a"):
        build_kernels(toolchain(), cache, sources=TOY)
    monkeypatch.delenv("CXX")
    assert found.reason.startswith("no C++ compiler: kernels are left out, int8 and bfloat16 will")
    assert "pip install 'prejit[kernels]'" in found.reason
    assert library.find_kernels(toolchain(), cache, sources=TOY) == found


def test_after_a_failing_compiler_the_next_is_tried(cache, tmp_path, monkeypatch, toy_library):
    told = write_compiler(tmp_path, monkeypatch, "echo 'toy.cc:1: no such level' >&2; exit 1")
    found = without_kernels(cache)
    assert "g++ 1.2.3: toy.cc:1: no such level" in found.reason
    assert told.read_text().count("\n") == 1
    (tmp_path / "made.so").write_bytes(toy_library[1])
    other = shutil.copy(tmp_path / "bin" / "g++", tmp_path / "bin" / "my-c++")
    text = other.read_text().replace("1.2.3", "9.9.9")
    other.write_text(text.replace("exit 1", f"cp {tmp_path}/made.so $out"))
    monkeypatch.setenv("CXX", "my-c++ -m64")
    assert built(cache).compiler == "g++ 9.9.9"
    assert told.read_text().splitlines()[-1].startswith("-m64 ")


def test_what_is_no_library_of_kernels_is_an_error(cache, tmp_path, monkeypatch, toy_library):
    write_compiler(tmp_path, monkeypatch, "echo nothing > $out")
    with pytest.raises(BuildError, match="expected a shared library: not an ELF"):
        build_kernels(toolchain(), cache, sources=TOY)
    (tmp_path / "made.so").write_bytes(toy_library[1].replace(b"prejit_", b"perjit_"))
    write_compiler(tmp_path, monkeypatch, f"cp {tmp_path}/made.so $out")
    with pytest.raises(BuildError, match=r"exports prejit_\* and nothing else, found perjit_root"):
        build_kernels(toolchain(), cache, sources=TOY)


def test_a_target_gets_its_level(monkeypatch):
    for level in ("x86-64-v2", "x86-64-v3", "x86-64-v4"):
        assert library.level_of(toolchain(f"cpu-{level}").target) == level
    gpu, v2 = "cuda-l4", "cpu-x86-64-v2"
    for name, changes, expected in (
        (v2, {"cpu_features": ("sse2",)}, "kernels need x86-64-v2, which"),
        (v2, {"architecture": "aarch64"}, "for CPUs of x86-64, and .* is aarch64"),
        (gpu, {}, f"for CPUs of x86-64, and {gpu} is cuda"),
    ):
        found = library.level_of(toolchain(name, **changes).target)
        assert isinstance(found, NoKernels)
        assert re.search(expected, found.reason)
        assert not found.worth_telling
    features = library.level_features("x86-64-v3")
    here = dataclasses.replace(Fingerprint.current(), cpu_features=features)
    monkeypatch.setattr(Fingerprint, "current", classmethod(lambda cls: here))
    assert library.level_of(target("cpu-host")) == "x86-64-v3", "the level of its own features"


def test_the_headers_are_those_of_the_jaxlib_that_compiles(tmp_path):
    own = library.ffi_headers(toolchain())
    assert (own / "xla/ffi/api/ffi.h").is_file()
    elsewhere = tmp_path / "lib/python3.12/site-packages/jaxlib/include/xla/ffi/api"
    elsewhere.mkdir(parents=True)
    command = (str(tmp_path / "bin" / "python"), "-c", "")
    pinned = dataclasses.replace(toolchain(), command=command, isolated=True)
    assert library.ffi_headers(pinned) == elsewhere.parents[2]
    shutil.rmtree(tmp_path / "lib")
    assert library.ffi_headers(pinned) is None


def test_a_library_needs_nothing_but_a_glibc_that_jaxlib_lacks(toy_library):
    """Not libstdc++ or libgcc, which a server may lack; and glibc no later than that it was built on."""
    told = read_shared_library(toy_library[1])
    c_libraries = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"}
    assert set(told.needed) <= {*c_libraries, "ld-linux-x86-64.so.2"}
    assert all(version.startswith("GLIBC_") for version in told.versions)
    glibc = library.glibc_of(told)
    assert glibc == toy_library[0].glibc
    here = Fingerprint.current().glibc or "0"
    assert library._numbers(glibc or "0") <= library._numbers(here)
    for glibc, needed in (("2.35", "2.35"), ("2.28", "2.28"), ("2.27", None), ("2.9", None)):
        assert library.needed_glibc(glibc) == needed
    whole = toy_library[1]
    for start, wrong in (
        (4, b"\1"),  # of 32 bits
        (40, (1 << 62).to_bytes(8, "little")),  # section headers, far behind the end
        (60, b"\xff\xff"),  # as many of them
        (58, b"\0\0"),  # of no size: every one is the first
        (58, b"\1\0"),
    ):
        with pytest.raises(ValueError, match="ELF"):
            read_shared_library(whole[:start] + wrong + whole[start + len(wrong) :])
    with pytest.raises(ValueError, match="ELF"):
        read_shared_library(whole[:1000])
