"""Kernels compiled for one level, for the tests of each kernel; a test is skipped where that cannot be."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import jax
import pytest

from prejit.compiler.native.library import SOURCES, level_features
from prejit.runtime.machine.fingerprint import Fingerprint

TESTS = Path(__file__).resolve().parents[3] / "kernels"
"""Drivers for sanitizers, and what only tests export."""
LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")

_LIBRARY = (
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
)
# GCC 12 warns of its own AVX-512 headers; clang of a warning that it does not know.
_WARNINGS = (
    *("-Wall", "-Wextra", "-Werror"),
    *("-Wno-unknown-warning-option", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)


def missing_features(level: str) -> set[str]:
    """Extensions of a level that this machine lacks."""
    return set(level_features(level)) - set(Fingerprint.current().cpu_features)


def highest_level() -> str:
    """The highest that this machine runs."""
    return next(level for level in reversed(LEVELS) if not missing_features(level))


def load(level: str, out: Path, sources: Iterable[Path], *kernels: str) -> ctypes.CDLL:
    """Compiles sources to a library, and makes kernels of it known to XLA as `KERNEL/LEVEL`."""
    include = ("-isystem", jax.ffi.include_dir(), f"-I{SOURCES}")
    _compile(level, out, *_LIBRARY, *include, *sources)
    library = ctypes.CDLL(str(out))
    for name in kernels:
        handler = jax.ffi.pycapsule(getattr(library, f"prejit_{name}"))
        jax.ffi.register_ffi_target(f"{name}/{level}", handler, platform="cpu")
    return library


def run_sanitized(
    driver: Path, names: Iterable[str], sanitizers: str, out: Path, *arguments: str
) -> None:
    """Runs a driver with some sources under sanitizers, which must find nothing."""
    flags = ("-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f"-I{SOURCES}")
    _compile(highest_level(), out, *flags, driver, *(SOURCES / name for name in names))
    done = subprocess.run([out, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _compile(level: str, out: Path, *more: object) -> None:
    if missing := missing_features(level):
        pytest.skip(f"this machine runs no {level}: it lacks {', '.join(sorted(missing))}")
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if found is None:
        pytest.skip("no C++ compiler on this machine")
    command = [found, "-std=c++17", *_WARNINGS, f"-march={level}", "-pthread", *map(str, more)]
    done = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
