"""Kernels compiled for one level, for the tests of each kernel; a test is skipped where that cannot be."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import jax
import pytest
from tests.kernel_bundles import built_kernels

from prejit.compiler.native.kernel_library import SOURCES, level_features
from prejit.runtime.machine.fingerprint import Fingerprint

TESTS = Path(__file__).resolve().parents[3] / "kernels"
"""Drivers for sanitizers, and what only tests export."""
LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
_LIBRARY = "-O3 -fno-math-errno -fno-trapping-math -fvisibility=hidden -fPIC -shared".split()  # noqa: SIM905
_NOT_MODELLED = {
    *("linear_dot_bf16.cc", "linear_int4_bf16.cc", "linear_multiplier.cc"),
    "linear_outputs_bf16.cc",
}
"""Sources in whose place model_choice.cc stands."""
# GCC 12 warns of its own AVX-512 headers; clang of a warning that it does not know.
_WARNINGS = (
    *("-Wall", "-Wextra", "-Werror"),
    *("-Wno-unknown-warning-option", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)


def missing_features(level):
    return set(level_features(level)) - set(Fingerprint.current().cpu_features)


def highest_level():
    return next(level for level in reversed(LEVELS) if not missing_features(level))


def product_library(level, cache):
    """Load the library of all kernels as `prejit build` makes it, from a build cache."""
    _need(level)
    _, content = built_kernels(f"cpu-{level}", SOURCES, cache)
    place = cache / f"{level}.so"
    temporary = place.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(content)
    temporary.rename(place)  # another process of these tests may load it
    return ctypes.CDLL(str(place))


def load(level, cache, sources, flags=()):
    """Compile sources to a library and load it."""
    flags = (*_LIBRARY, "-isystem", jax.ffi.include_dir(), f"-I{SOURCES}", *flags)
    return ctypes.CDLL(str(_compiled(level, cache, *flags, *sources)))


def sanitized(driver, sources, sanitizers, cache, level=None, flags=()):
    """Compile a driver with some sources under sanitizers, without optimizing, which takes twice as long."""
    checks = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    flags = (*flags, "-O0", "-g", *checks, f"-I{SOURCES}")
    return _compiled(level or highest_level(), cache, *flags, driver, *sources)


def with_tiles(level, sources):
    """Return the level, the sources and the flags of a library that has a model of AMX's tiles.

    Where this machine lacks AVX-512, x86-64-v4 is a model as well.
    """
    sources = [each for each in sources if each.name not in _NOT_MODELLED]
    flags = ["-O1", "-include", TESTS / "amx_model.h", "-Wno-psabi", "-Wno-ignored-attributes"]
    if level == LEVELS[-1] and missing_features(level):
        level, flags = LEVELS[-2], ["-include", TESTS / "avx512_model.h", *flags]
    return level, [*sources, TESTS / "model_choice.cc"], flags


def assert_runs_clean(driver, *arguments):
    done = subprocess.run([driver, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _need(level):
    if missing := missing_features(level):
        pytest.skip(f"this machine runs no {level}: it lacks {', '.join(sorted(missing))}")


def _compiled(level, cache, *more):
    """Return what a compiler makes of these arguments; a build cache keeps it until a source changes."""
    _need(level)
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if found is None:
        pytest.skip("no C++ compiler on this machine")
    command = [found, "-std=c++17", *_WARNINGS, f"-march={level}", "-pthread", *map(str, more)]
    version = subprocess.run([found, "--version"], capture_output=True, check=True).stdout
    hasher = hashlib.sha256(repr((command, metadata.version("jaxlib"), version)).encode())
    for source in sorted(each for place in (SOURCES, TESTS) for each in place.iterdir()):
        hasher.update(source.name.encode() + source.read_bytes())
    kept = cache / "test-kernels" / hasher.hexdigest()
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        out = kept.with_suffix(f".{os.getpid()}")
        command += ["-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        out.rename(kept)  # another process of these tests may load it
    return kept
