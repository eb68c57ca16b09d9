"""The native kernels as one shared library, built from the sources in `kernels/` for a target's CPU.

    kernels/*.cc, *.h  +  FFI headers of the target's jaxlib  +  its x86-64 level  ->  a blob of the cache

XLA calls a kernel by a name that holds the library's digest, so that bundles with different kernels can
live in one process. The same compiler makes the same bytes from the same sources, wherever they lie.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from prejit.compiler.progress import Progress, Quiet
from prejit.compiler.store.directory import ZIG
from prejit.compiler.store.interface import Store
from prejit.compiler.store.key import Key
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.digests import digest_of
from prejit.runtime.errors import BuildError, StoreError, UsageError
from prejit.runtime.format.checks.elf import read_shared_library
from prejit.runtime.format.names import KERNEL_PREFIX
from prejit.runtime.format.schema import Kernels
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.targets import Target, catalogue

SOURCES = Path(__file__).parent / "kernels"

_COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffunction-sections",
    "-fdata-sections",
)
_LINK_FLAGS = (
    "-shared",
    "-pthread",
    "-Wl,--gc-sections",
    "-Wl,--build-id=none",
    "-Wl,--as-needed",
    "-Wl,-z,defs",  # a symbol that nobody has is an error now, not on a server
    "-Wl,-z,now",
    "-Wl,-z,relro",
    "-Wl,-z,noexecstack",
    "-s",
)
_HANDLERS = "_ffi.cc"
"""End of the names of sources that hold FFI handlers."""
_OWN_LIBRARIES = ("-static-libstdc++", "-static-libgcc")
"""Of a compiler of the machine: a server's libstdc++ may be older, or missing."""
_EXPORTS = f"{{ global: {KERNEL_PREFIX}*; local: *; }};\n"
"""For the linker. Templates of libstdc++ are visible whatever -fvisibility says, as is its operator new."""

_ZIG_GLIBC = "2.17"
"""As manylinux2014 has it."""
_JAXLIB_GLIBC = "2.27"
"""That jaxlib's wheels want: their tag is manylinux_2_27 (0.10.2 to 0.12.0.1)."""

KERNELS_ARCHITECTURE = "x86_64"
"""The architecture of CPUs that kernels are for."""

_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
"""Of the x86-64 psABI, rising; the catalogue has a target of each."""

_BUILD_SECONDS = 900
_TOLD_LINES = 12
"""Of what a compiler said that failed."""


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """A library of kernels in the build cache.

    Attributes:
        level: of the instructions that it uses without asking the CPU: `x86-64-v4`.
        digest: of its content: a blob of the cache.
        size: of its content, in bytes.
        compiler: that made it: `g++ 12.2.0`, `zig 0.17.0`.
        glibc: the oldest that it can be loaded with.
        handlers: the kernels that it holds, sorted: `attention`, `linear`. Each is exported as `prejit_NAME`.
    """

    level: str
    digest: str
    size: int
    compiler: str
    glibc: str | None
    handlers: tuple[str, ...]

    def described(self) -> Kernels:
        """As a bundle tells of it."""
        return Kernels(self.digest, self.level, self.compiler, self.handlers)

    @property
    def needed_glibc(self) -> str | None:
        """The oldest glibc that it can be loaded with; None: it asks for no more than jaxlib does."""
        if self.glibc is None or _numbers(self.glibc) <= _numbers(_JAXLIB_GLIBC):
            return None
        return self.glibc

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """The extensions that a machine must have for it, in LLVM's names."""
        return level_features(self.level)


@dataclass(frozen=True, slots=True)
class NoKernels:
    """There are no kernels for a target.

    Attributes:
        reason: a sentence for the reader of a build.
        worth_telling: whether installing something would change it.
    """

    reason: str
    worth_telling: bool = False


@dataclass(frozen=True, slots=True)
class _Compiler:
    """A C++ compiler.

    Attributes:
        command: that starts it.
        name: `g++ 12.2.0`.
        identity: all that decides what it makes of the same sources and flags.
        flags: beside ours, with the level.
        link_flags: for linking alone.
        environment: variables beside this process's own.
    """

    command: tuple[str, ...]
    name: str
    identity: str
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    environment: Mapping[str, str]


def build_kernels(
    toolchain: Toolchain,
    cache: Store,
    progress: Progress | None = None,
    *,
    sources: Path = SOURCES,
) -> KernelLibrary | NoKernels:
    """The kernels for a target, from the cache or compiled now.

    The compiler is $CXX, g++, clang++ or c++, the first of them that can; else the `ziglang` wheel. CXX=zig
    takes that at once, for servers with an older glibc than this machine has.

    Args:
        toolchain: of the target; its jaxlib has the headers.
        cache: where the library is kept.
        progress: who is told.
        sources: directory of the sources.

    Raises:
        StoreError: the cache, the sources or the headers cannot be read, or the cache not be written.
        UsageError: CXX has a quote that is not closed.
        BuildError: a compiler made something that is no library of kernels.
    """
    level = level_of(toolchain.target)
    if isinstance(level, NoKernels):
        return level
    headers = ffi_headers(toolchain)
    if headers is None:
        return NoKernels(f"jaxlib {toolchain.jaxlib} comes without its FFI headers")
    files = sorted(sources.glob("*.cc"))
    if not files:
        return NoKernels(f"expected sources of kernels in {sources}, found none")
    failures = []
    progress = progress or Quiet()
    for compiler in _compilers(level, cache):
        key = _key(toolchain, level, compiler, sources, headers)
        if (known := _find(cache, key)) is not None:
            return known
        with (
            progress.phase(f"compiling kernels for {level} with {compiler.name}"),
            cache.making(key),
        ):
            if (
                known := _find(cache, key)
            ) is not None:  # another build has compiled them meanwhile
                return known
            made = _compile(compiler, files, headers)
            if isinstance(made, bytes):
                library = _library(made, level, compiler, cache)
                cache.put(key, asdict(library), blobs=[library.digest])
                return library
        failures.append(f"{compiler.name}: {made}")
    if failures:
        return NoKernels(
            "kernels do not compile here and are left out, int8 and bfloat16 will be slow; install "
            "another g++ or pip install 'prejit[kernels]'. " + "\n".join(failures),
            worth_telling=True,
        )
    return _no_compiler()


def _no_compiler() -> NoKernels:
    return NoKernels(
        "no C++ compiler: kernels are left out, int8 and bfloat16 will be slow; install g++ or "
        "pip install 'prejit[kernels]'",
        worth_telling=True,
    )


def find_kernels(
    toolchain: Toolchain, cache: Store, *, sources: Path = SOURCES
) -> KernelLibrary | NoKernels | None:
    """Return what `build_kernels` would return if that is in the cache, else None.

    Compilers are asked for their versions and for nothing else.

    Raises:
        StoreError: the cache, the sources or the headers cannot be read.
    """
    level = level_of(toolchain.target)
    if isinstance(level, NoKernels):
        return level
    headers = ffi_headers(toolchain)
    if headers is None:
        return NoKernels(f"jaxlib {toolchain.jaxlib} comes without its FFI headers")
    compilers = list(_compilers(level, cache))
    for compiler in compilers:
        if known := _find(cache, _key(toolchain, level, compiler, sources, headers)):
            return known
    return None if compilers else _no_compiler()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def level_of(target: Target) -> str | NoKernels:
    """The highest x86-64 level whose instructions a target has."""
    if target.platform != "cpu" or target.architecture != KERNELS_ARCHITECTURE:
        what = target.platform if target.platform != "cpu" else target.architecture
        return NoKernels(f"kernels are for CPUs of x86-64, and {target.name} is {what}")
    features = target.cpu_features
    if features is None:
        features = Fingerprint.current().cpu_features
    held = [level for level in _LEVELS if set(level_features(level)) <= set(features)]
    return held[-1] if held else NoKernels(f"kernels need {_LEVELS[0]}, which {target.name} lacks")


def level_features(level: str) -> tuple[str, ...]:
    """The extensions of a level, in LLVM's names, sorted."""
    return catalogue()[f"cpu-{level}"].cpu_features or ()


def ffi_headers(toolchain: Toolchain) -> Path | None:
    """The directory of the FFI headers of the jaxlib that compiles for a target; None: it has none."""
    if toolchain.isolated:
        prefix = Path(toolchain.command[0]).parents[1]
        places = sorted(prefix.glob("lib/python3*/site-packages/jaxlib"))
    else:
        found = importlib.util.find_spec("jaxlib")
        places = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    headers = [place / "include" for place in places if (place / "include/xla/ffi/api").is_dir()]
    return headers[0] if headers else None


def _compilers(level: str, cache: Store) -> Iterator[_Compiler]:
    """The C++ compilers of this machine, as they are to be tried."""
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
        if path is None or (says := _first_line([path, *command[1:], "--version"])) is None:
            continue
        called = " ".join((os.path.realpath(path), *command[1:]))  # c++ is often g++
        if called in seen:
            continue
        seen.add(called)
        # With its glibc come the versions of symbols that the library asks for; with its arguments, anything.
        identity = "; ".join((says, os.confstr("CS_GNU_LIBC_VERSION") or "", *command[1:]))
        yield _Compiler(
            (path, *command[1:]),
            _short_name(says),
            identity,
            (f"-march={level}",),
            _OWN_LIBRARIES,
            {},
        )
    if importlib.util.find_spec("ziglang") is None:
        return
    zig = (sys.executable, "-m", "ziglang")
    if (version := _first_line([*zig, "version"])) is not None:
        machine = f"x86_64-linux-gnu.{_ZIG_GLIBC}"
        places = {
            f"ZIG_{kind}_CACHE_DIR": str(cache.root / ZIG / kind.lower())
            for kind in ("GLOBAL", "LOCAL")
        }
        # It builds with the checks of UBSan unless told otherwise.
        flags = ("-target", machine, f"-mcpu={level.replace('-', '_')}", "-fno-sanitize=undefined")
        yield _Compiler((*zig, "c++"), f"zig {version}", f"zig {version}", flags, (), places)


def _first_line(command: list[str]) -> str | None:
    """The first line that a command says; None: it cannot be run, or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [""])[0].strip()


def _short_name(says: str) -> str:
    """`g++ (Debian 12.2.0-14+deb12u1) 12.2.0` is `g++ 12.2.0`; clang says `Debian clang version 14.0.6`."""
    version = re.search(r"(?:version |\) |\s)(\d+\.\d+(?:\.\d+)?)", re.sub(r"\(.*?\)", ")", says))
    name = "clang" if "clang" in says else "g++"
    return f"{name} {version[1]}" if version else name


def _key(
    toolchain: Toolchain, level: str, compiler: _Compiler, sources: Path, headers: Path
) -> Key:
    return Key(
        "kernels",
        f"{level}/jaxlib {toolchain.jaxlib}",
        (
            ("our code", digest_of(_read(Path(__file__)))),
            ("level", level),
            ("compiler", compiler.identity),
            ("flags", " ".join((*_COMPILE_FLAGS, *compiler.flags))),
            ("link flags", " ".join((*_LINK_FLAGS, *compiler.link_flags))),
            ("exports", _EXPORTS),
            ("FFI headers", _digest_of_files(headers, "xla/ffi/api/*.h")),
            *(
                (f"source {file.name}", digest_of(_read(file)))
                for file in sorted((*sources.glob("*.cc"), *sources.glob("*.h")))
            ),
        ),
    )


def _digest_of_files(directory: Path, pattern: str) -> str:
    hasher = hashlib.sha256()
    for file in sorted(directory.glob(pattern)):
        hasher.update(file.name.encode() + b"\0" + digest_of(_read(file)).encode() + b"\0")
    return f"sha256:{hasher.hexdigest()}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}") from error


def _find(cache: Store, key: Key) -> KernelLibrary | None:
    stored = cache.get(key, verify=True)
    if stored is None:
        return None
    return KernelLibrary(**{**stored, "handlers": tuple(stored["handlers"])})


def _compile(compiler: _Compiler, files: list[Path], headers: Path) -> bytes | str:
    """The library's content, or the first lines of what is wrong."""
    sources = files[0].parent
    with tempfile.TemporaryDirectory(prefix="prejit-kernels-") as scratch:
        directory = Path(scratch)
        out, exports = directory / "kernels.so", directory / "exports.map"
        exports.write_text(_EXPORTS)
        handlers = directory / "handlers.cc"  # XLA's headers take 3 s to compile: once for all
        included = [file.name for file in files if file.name.endswith(_HANDLERS)]
        handlers.write_text("".join(f'#include "{name}"\n' for name in included))
        parts = [file for file in files if not file.name.endswith(_HANDLERS)]
        parts += [handlers] if included else []
        objects = [directory / f"{file.stem}.o" for file in parts]
        compiling = [
            [
                *_COMPILE_FLAGS,
                *compiler.flags,
                f"-ffile-prefix-map={headers}=include",
                f"-ffile-prefix-map={sources}=kernels",
                f"-ffile-prefix-map={directory}=kernels",
                *("-I", str(sources)),
                *("-isystem", str(headers)),
                *("-c", str(file)),
                *("-o", str(made)),
            ]
            for file, made in zip(parts, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            problems = list(pool.map(partial(_run, compiler), compiling))
        if any(problems):
            return next(filter(None, problems))
        link = (*_LINK_FLAGS, *compiler.flags, *compiler.link_flags)
        version_script = f"-Wl,--version-script={exports}"
        problem = _run(compiler, [*link, version_script, *map(str, objects), "-o", str(out)])
        return problem or out.read_bytes()


def _run(compiler: _Compiler, arguments: list[str]) -> str:
    """Runs the compiler; the first lines of what is wrong, empty where nothing is."""
    try:
        done = subprocess.run(
            [*compiler.command, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_SECONDS,
            env={**os.environ, **compiler.environment},
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot be run: {error}"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "\n".join(lines[:_TOLD_LINES]) or f"ended with exit code {done.returncode}"


def _library(content: bytes, level: str, compiler: _Compiler, cache: Store) -> KernelLibrary:
    """Puts a library into the cache.

    Raises:
        BuildError: it holds no kernels, or cannot be loaded everywhere.
    """
    try:
        told = read_shared_library(content)
    except ValueError as error:
        raise BuildError(f"{compiler.name}: expected a shared library: {error}") from error
    prefix = KERNEL_PREFIX
    handlers = tuple(name.removeprefix(prefix) for name in told.exported if name.startswith(prefix))
    if not handlers or len(handlers) != len(told.exported):
        raise BuildError(
            f"{compiler.name}: expected a library of kernels that exports {prefix}* and nothing else, "
            f"found {', '.join(told.exported) or 'no symbols'}"
        )
    return KernelLibrary(
        level, cache.put_blob(content), len(content), compiler.name, told.glibc, handlers
    )
