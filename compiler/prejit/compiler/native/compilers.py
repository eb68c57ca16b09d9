"""Find the C++ compilers of this machine and run them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from prejit.compiler.store.directory_store import ZIG
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import UsageError

_STATIC_RUNTIME = ("-static-libstdc++", "-static-libgcc")
"""Link flags of the machine's own compilers. The libstdc++ of a server may be older, or missing."""
_ZIG_GLIBC = "2.17"
"""The glibc that zig links for: that of manylinux2014."""
_TIMEOUT_SECONDS = 900
_DECIDING = (
    # Further directories of headers and libraries (gcc, "Environment Variables"; clang reads them too).
    *("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    "SOURCE_DATE_EPOCH",
)
"""Environment variables that decide what a compiler makes of the same sources."""
_MAX_ERROR_LINES = 12
"""Maximum lines of a compiler's errors that are shown."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: the command that starts it.
        name: name and version: `g++ 12.2.0`.
        identity: everything that decides what it makes of the same sources and flags.
        flags: flags for compiling and linking beside prejit's own: they name the level.
        link_flags: flags for linking only.
        environment: variables added to those of this process.
    """

    command: tuple[str, ...]
    name: str
    identity: str
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    environment: Mapping[str, str]

    def run(self, arguments: list[str]) -> str:
        """Run the compiler; return the first lines of its errors, or an empty text on success."""
        try:
            done = subprocess.run(
                [*self.command, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_SECONDS,
                env={**os.environ, **self.environment},
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"cannot be run: {error}"
        if done.returncode == 0:
            return ""
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return "\n".join(lines[:_MAX_ERROR_LINES]) or f"ended with exit code {done.returncode}"


def deciding_environment(environ: Mapping[str, str]) -> str:
    """Return the environment variables that decide what a compiler makes, each as NAME=value."""
    return " ".join(f"{name}={environ[name]}" for name in _DECIDING if environ.get(name))


VersionOf = Callable[[list[str], str], str | None]
"""Returns the first line that a command prints about its version; None: the command fails.

Its arguments are the command and what identifies the program: the digest of its file, or its release."""


def run_version(command: list[str], program: str) -> str | None:
    """Run a command and return the first line that it prints; None: it cannot be run, or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [""])[0].strip()


def find_compilers(
    level: str, cache_root: Path, version_of: VersionOf = run_version
) -> Iterator[Compiler]:
    """Yield the C++ compilers of this machine, in the order in which to try them.

    They are $CXX, g++, clang++ and c++, then the `ziglang` wheel. With CXX=zig it is the wheel only: its
    libraries run with an older glibc than this machine has.

    Raises:
        UsageError: CXX has a quote that is not closed.
    """
    seen = set[str]()
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise UsageError(
            f"CXX: expected a command as a shell reads it, found {os.environ['CXX']!r}: {error}",
            hint="balance its quotes, or unset it to take g++, clang++ or c++",
        ) from error
    of_machine = (chosen, ["g++"], ["clang++"], ["c++"]) if chosen != ["zig"] else ()
    for command in of_machine:
        path = shutil.which(command[0]) if command else None
        if path is None:
            continue
        version = version_of([path, *command[1:], "--version"], _digest(path))
        if version is None:
            continue
        called = " ".join((os.path.realpath(path), *command[1:]))  # c++ is often g++
        if called in seen:
            continue
        seen.add(called)
        # The glibc decides the versions of symbols that the library needs; arguments may decide anything.
        identity = "; ".join((version, os.confstr("CS_GNU_LIBC_VERSION") or "", *command[1:]))
        yield Compiler(
            (path, *command[1:]),
            _short_name(version),
            identity,
            (f"-march={level}",),
            _STATIC_RUNTIME,
            {},
        )
    if importlib.util.find_spec("ziglang") is None:
        return
    zig = (sys.executable, "-m", "ziglang")
    if (version := version_of([*zig, "version"], _release("ziglang"))) is not None:
        machine = f"x86_64-linux-gnu.{_ZIG_GLIBC}"
        places = {
            f"ZIG_{kind}_CACHE_DIR": str(cache_root / ZIG / kind.lower())
            for kind in ("GLOBAL", "LOCAL")
        }
        # Without the last flag zig builds with the checks of UBSan.
        flags = ("-target", machine, f"-mcpu={level.replace('-', '_')}", "-fno-sanitize=undefined")
        yield Compiler((*zig, "c++"), f"zig {version}", f"zig {version}", flags, (), places)


def _digest(path: str) -> str:
    try:
        return digest_of(Path(path).read_bytes())
    except OSError:
        return ""


def _release(package: str) -> str:
    """Return the version of an installed package; an empty text where it has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _short_name(version: str) -> str:
    """Return name and number: `g++ (Debian 12.2.0-14+deb12u1) 12.2.0` becomes `g++ 12.2.0`."""
    text = re.sub(r"\(.*?\)", ")", version)
    # clang prints `Debian clang version 14.0.6`.
    number = re.search(r"(?:version |\) |\s)(\d+\.\d+(?:\.\d+)?)", text)
    name = "clang" if "clang" in version else "g++"
    return f"{name} {number[1]}" if number else name
