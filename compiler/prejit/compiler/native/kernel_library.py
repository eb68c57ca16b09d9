"""Build the native kernels as one shared library, from the sources in `kernels/`, for a target's CPU.

    kernels/*.cc, *.h  +  FFI headers of the target's jaxlib  +  its x86-64 level  ->  a blob of the cache

XLA calls a kernel by a name that contains the library's digest, so that bundles with different kernels can
run in one process. One compiler makes the same bytes from the same sources, wherever they lie.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from prejit.compiler.native.compilers import (
    Compiler,
    deciding_environment,
    find_compilers,
    run_version,
)
from prejit.compiler.progress import Progress, Quiet
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.prejit_code import KERNELS, code_digest
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets.target_classes import Target, catalogue
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.files import digest_of, store_errors
from prejit.runtime.errors import BuildError
from prejit.runtime.format.bundle_schema import Kernels
from prejit.runtime.format.checks.elf import SharedLibrary, read_shared_library
from prejit.runtime.format.names import KERNEL_PREFIX
from prejit.runtime.machine.fingerprint import Fingerprint

SOURCES = Path(__file__).parent / "kernels"
"""Directory of the kernels' C++ sources."""

KERNELS_ARCHITECTURE = "x86_64"
"""The CPU architecture that kernels are written for."""

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
    "-Wl,-z,defs",  # a missing symbol is an error of the build, not of the server
    "-Wl,-z,now",
    "-Wl,-z,relro",
    "-Wl,-z,noexecstack",
    "-s",
)
_HANDLERS = "_ffi.cc"
"""The names of sources with FFI handlers end with this."""
_EXPORTS = f"{{ global: {KERNEL_PREFIX}*; local: *; }};\n"
"""The linker's version script. Without it libstdc++'s templates and operator new are exported, whatever
-fvisibility is."""

_JAXLIB_GLIBC = "2.27"
"""The glibc that jaxlib's wheels need: their tag is manylinux_2_27 (0.10.2 to 0.12.0.1)."""

_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
"""Levels of the x86-64 psABI, lowest first; the catalogue has a target for each."""


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """A library of kernels in the build cache.

    Attributes:
        level: the x86-64 level whose instructions it uses without checking the CPU: `x86-64-v4`.
        digest: digest of its content, a blob of the cache.
        size: size of its content in bytes.
        compiler: the compiler that made it: `g++ 12.2.0`, `zig 0.17.0`.
        glibc: the oldest glibc that can load it; None if it needs none.
        handlers: the kernels that it exports, sorted: `attention`, `linear`. Symbols are `prejit_NAME`.
    """

    level: str
    digest: str
    size: int
    compiler: str
    glibc: str | None
    handlers: tuple[str, ...]

    def described(self) -> Kernels:
        """Return the description that a bundle holds."""
        return Kernels(self.digest, self.level, self.compiler, self.handlers)

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """The CPU extensions that a machine needs to run it, in LLVM's names."""
        return level_features(self.level)


@dataclass(frozen=True, slots=True)
class NoKernels:
    """Why there are no kernels for a target."""

    reason: str
    worth_telling: bool = False


def build_kernels(
    toolchain: Toolchain,
    cache: Store,
    progress: Progress | None = None,
    *,
    sources: Path = SOURCES,
    first: str | None = None,
) -> KernelLibrary | NoKernels:
    """Return the kernels for a target, from the cache or compiled now.

    The first compiler of `find_compilers` that succeeds makes them.

    Raises:
        StoreError: the cache, the sources or the headers cannot be read, or the cache cannot be written.
        UsageError: CXX has a quote that is not closed.
        BuildError: a compiler made something other than a library of kernels.
    """
    inputs = _inputs(toolchain)
    if isinstance(inputs, NoKernels):
        return inputs
    level, headers = inputs
    files = sorted(sources.glob("*.cc"))
    if not files:
        return NoKernels(f"expected sources of kernels in {sources}, found none")
    failures = []
    progress = progress or Quiet()
    compilers = find_compilers(level, cache.root, partial(_noted_version, cache))
    if first is not None:
        compilers = iter(sorted(compilers, key=lambda each: each.identity != first))
    for compiler in compilers:
        key = _key(toolchain, level, compiler, sources, headers)
        if (known := _find(cache, key)) is not None:
            return known
        with (
            progress.phase(f"compiling kernels for {level} with {compiler.name}"),
            cache.making(key),
        ):
            # Another build may have compiled them meanwhile.
            if (known := _find(cache, key)) is not None:
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


def find_kernels(
    toolchain: Toolchain, cache: Store, *, sources: Path = SOURCES
) -> KernelLibrary | NoKernels | None:
    """Return what `build_kernels` would return if that is in the cache, else None.

    It starts no compiler: builds note the versions of compilers in the cache.

    Raises:
        StoreError: the cache, the sources or the headers cannot be read.
        UsageError: CXX has a quote that is not closed.
    """
    inputs = _inputs(toolchain)
    if isinstance(inputs, NoKernels):
        return inputs
    level, headers = inputs
    found = False
    try:
        for compiler in find_compilers(level, cache.root, partial(_known_version, cache)):
            found = True
            if known := _find(cache, _key(toolchain, level, compiler, sources, headers)):
                return known
    except _UnknownVersionError:  # of a compiler that a build tries first
        return None
    return None if found else _no_compiler()


def kernel_conditions(
    library: KernelLibrary, toolchain: Toolchain, cache: Store, *, sources: Path = SOURCES
) -> dict[str, str]:
    """Return what decided a library that this machine made: compiler, flags, headers, each source.

    Nothing where this machine no longer has the compiler that made it.
    """
    inputs = _inputs(toolchain)
    if isinstance(inputs, NoKernels):
        return {}
    level, headers = inputs
    with suppress(_UnknownVersionError):
        for compiler in find_compilers(level, cache.root, partial(_known_version, cache)):
            key = _key(toolchain, level, compiler, sources, headers)
            if _find(cache, key) == library:
                return dict(key.ingredients)
    return {}


class _UnknownVersionError(Exception):
    """No build has noted the version of a compiler."""


def _noted_version(cache: Store, command: list[str], program: str) -> str | None:
    """Return what a compiler prints about its version, and note it in the cache for `find_kernels`."""
    version, key = run_version(command, program), _version_key(command, program)
    if cache.get(key) != {"version": version}:
        cache.put(key, {"version": version})
    return version


def _known_version(cache: Store, command: list[str], program: str) -> str | None:
    """Return the version of a compiler that a build has noted."""
    if (known := cache.get(_version_key(command, program))) is None:
        raise _UnknownVersionError(command[0])
    return known["version"]


def _version_key(command: list[str], program: str) -> Key:
    ingredients = (
        ("program", program),
        ("name", Path(command[0]).name),  # c++ is often g++, and prints its own name
        ("arguments", " ".join(command[1:])),
    )
    return Key("compiler", command[0], ingredients)


def _inputs(toolchain: Toolchain) -> tuple[str, Path] | NoKernels:
    """Return the level and the FFI headers to compile with."""
    level = level_of(toolchain.target)
    if isinstance(level, NoKernels):
        return level
    headers = ffi_headers(toolchain)
    if headers is None:
        return NoKernels(f"jaxlib {toolchain.jaxlib} comes without its FFI headers")
    return level, headers


def _no_compiler() -> NoKernels:
    return NoKernels(
        "no C++ compiler: kernels are left out, int8 and bfloat16 will be slow; install g++ or "
        "pip install 'prejit[kernels]'",
        worth_telling=True,
    )


def needed_glibc(*found: str | None) -> str | None:
    """Return the latest of some versions of glibc; None: jaxlib needs at least as new a one anyway."""
    latest = max((_JAXLIB_GLIBC, *filter(None, found)), key=_numbers)
    return None if _numbers(latest) == _numbers(_JAXLIB_GLIBC) else latest


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def level_of(target: Target) -> str | NoKernels:
    """Return the highest x86-64 level whose instructions a target has."""
    if target.platform != "cpu" or target.architecture != KERNELS_ARCHITECTURE:
        what = target.platform if target.platform != "cpu" else target.architecture
        return NoKernels(f"kernels are for CPUs of x86-64, and {target.name} is {what}")
    features = target.cpu_features
    if features is None:
        features = Fingerprint.current().cpu_features
    held = [level for level in _LEVELS if set(level_features(level)) <= set(features)]
    return held[-1] if held else NoKernels(f"kernels need {_LEVELS[0]}, which {target.name} lacks")


def level_features(level: str) -> tuple[str, ...]:
    """Return the CPU extensions of a level, in LLVM's names, sorted."""
    return catalogue()[f"cpu-{level}"].cpu_features or ()


def ffi_headers(toolchain: Toolchain) -> Path | None:
    """Return the directory of the FFI headers of a toolchain's jaxlib, or None if it has none."""
    if toolchain.isolated:
        prefix = Path(toolchain.command[0]).parents[1]
        places = sorted(prefix.glob("lib/python3*/site-packages/jaxlib"))
    else:
        found = importlib.util.find_spec("jaxlib")
        places = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    headers = [place / "include" for place in places if (place / "include/xla/ffi/api").is_dir()]
    return headers[0] if headers else None


def _key(toolchain: Toolchain, level: str, compiler: Compiler, sources: Path, headers: Path) -> Key:
    return Key(
        "kernels",
        f"{level}/jaxlib {toolchain.jaxlib}",
        (
            ("our code", code_digest(*KERNELS)),
            ("level", level),
            ("compiler", compiler.identity),
            ("flags", " ".join((*_COMPILE_FLAGS, *compiler.flags))),
            ("link flags", " ".join((*_LINK_FLAGS, *compiler.link_flags))),
            ("environment", deciding_environment(os.environ)),
            ("FFI headers", _digest_of_files(headers.glob("xla/ffi/api/*.h"))),
            *(
                (f"source {file.name}", digest_of(_read(file)))
                for file in sorted((*sources.glob("*.cc"), *sources.glob("*.h")))
            ),
        ),
    )


def _digest_of_files(files: Iterable[Path]) -> str:
    lines = (f"{file.name}\0{digest_of(_read(file))}\0" for file in sorted(files))
    return digest_of("".join(lines).encode())


def _read(path: Path) -> bytes:
    with store_errors(path, "read"):
        return path.read_bytes()


def _find(cache: Store, key: Key) -> KernelLibrary | None:
    stored = cache.get(key, verify=True)
    if stored is None:
        return None
    return KernelLibrary(**{**stored, "handlers": tuple(stored["handlers"])})


def _compile(compiler: Compiler, files: list[Path], headers: Path) -> bytes | str:
    """Return the content of the library, or the first lines of the compiler's errors."""
    sources = files[0].parent
    with tempfile.TemporaryDirectory(prefix="prejit-kernels-") as scratch:
        directory = Path(scratch)
        out, exports = directory / "kernels.so", directory / "exports.map"
        exports.write_text(_EXPORTS)
        # XLA's headers take 3 s to compile, so all handlers are one source that includes them once.
        handlers = directory / "handlers.cc"
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
            problems = list(pool.map(compiler.run, compiling))
        if any(problems):
            return next(filter(None, problems))
        link = (*_LINK_FLAGS, *compiler.flags, *compiler.link_flags)
        version_script = f"-Wl,--version-script={exports}"
        problem = compiler.run([*link, version_script, *map(str, objects), "-o", str(out)])
        return problem or out.read_bytes()


def _library(content: bytes, level: str, compiler: Compiler, cache: Store) -> KernelLibrary:
    """Put a library into the cache and return its description."""
    try:
        found = read_shared_library(content)
    except ValueError as error:
        raise BuildError(f"{compiler.name}: expected a shared library: {error}") from error
    prefix = KERNEL_PREFIX
    handlers = tuple(
        name.removeprefix(prefix) for name in found.exported if name.startswith(prefix)
    )
    if not handlers or len(handlers) != len(found.exported):
        raise BuildError(
            f"{compiler.name}: expected a library of kernels that exports {prefix}* and nothing else, "
            f"found {', '.join(found.exported) or 'no symbols'}"
        )
    return KernelLibrary(
        level, cache.put_blob(content), len(content), compiler.name, glibc_of(found), handlers
    )


def glibc_of(library: SharedLibrary) -> str | None:
    """Return the oldest glibc with all symbols that a library needs; None: it needs none of glibc."""
    form = r"GLIBC_(\d{1,9}(?:\.\d{1,9})*)"
    found = [re.fullmatch(form, version) for version in library.versions]
    numbers = [match[1] for match in found if match is not None]
    return max(numbers, key=_numbers, default=None)
