"""The fallback: compile portable programs on this machine, and keep the results for its next start.

The executables are in `compiled/v1` of the runtime's cache. KEY is a digest of the program and of the
properties of the machine that decide what it compiles to:

    KEY             sha256 of the rest, then a zstd frame with the executable
    KEY.lock        held while KEY is made: processes that start at the same time wait, so it is made once
    .KEY.*.tmp      KEY while it is written; a rename makes it KEY
    sweep.lock      held while files are removed

A process may be killed at any moment. The kernel releases its locks: whoever gets the lock of a KEY finds
only leftovers beside it, and the next process that writes removes them. If all files together are larger than
`$PREJIT_COMPILE_CACHE_BYTES`, those used longest ago are removed. A damaged or foreign file is compiled again
and replaced. If the directory cannot be written, every start compiles again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import stat
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import zstandard

from prejit.runtime.base.files import digest_of
from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.base.written_files import lock_file, remove_and_unlock, write_file
from prejit.runtime.device import _jax_parts
from prejit.runtime.device.device import Device, Executable
from prejit.runtime.device.portable import bind_calls, custom_calls, version_of
from prejit.runtime.errors import BuildError, MismatchError, PrejitWarning, StoreError, UsageError
from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.machine.fingerprint import Fingerprint, read_xla_flags
from prejit.runtime.machine.kept_files import cache_root, read_own

CheckSignature = Callable[[ProgramEntry, Executable, str], None]
"""Compares an executable with the program table. It takes the program, the executable and the file."""
DEFAULT_LIMIT_BYTES = 2 << 30
"""Maximum size of the cache if `$PREJIT_COMPILE_CACHE_BYTES` is not set."""
_DIGEST_BYTES = 32
_KEY_NAME = re.compile("[0-9a-f]{64}")
_LEFTOVER = re.compile(r"\.?([0-9a-f]{64})\.(?:lock|.*\.tmp)")
_warned: set[Path] = set()


@final
class LocalCompiler:
    """Compiles the portable programs of a bundle for a device, or reads what an earlier start compiled."""

    def __init__(
        self,
        device: Device,
        path: str,
        portable_of: Callable[[ProgramEntry], bytes],
        calls: Mapping[str, str],
        no_calls: str,
        check: CheckSignature,
    ) -> None:
        """Keep what every compilation needs.

        Args:
            device: what to compile for.
            path: the file of the portable programs, for errors.
            portable_of: returns the StableHLO of a program.
            calls: for each name by which programs call a handler of the user, that by which XLA knows it.
            no_calls: why this process has none of these handlers; empty: it has all of them.
            check: called with every executable before it is returned.
        """
        self._device = device
        self._path = path
        self._portable_of = portable_of
        self._calls, self._no_calls = calls, no_calls
        self._check = check

    def obtain(self, program: ProgramEntry, results: tuple[Array, ...]) -> tuple[Executable, str]:
        """Return the executable of a program and whether it was `compiled` now or `kept`.

        Raises:
            RejectError: the portable program is damaged.
            BuildError: XLA fails to compile it, or it calls a library that this machine cannot load.
        """
        self._check_calls(program)
        if self._device.in_cluster:
            # The processes of a cluster compile together, because XLA shares its autotuning among them. A
            # process with the cache's lock would wait for those that wait for the lock.
            return self._compile(program, results), "compiled"
        compiled: list[Executable] = []

        def compile_program() -> bytes:
            compiled.append(self._compile(program, results))
            return compiled[0].serialize()

        refused = None
        while True:
            serialized, now = compiled_here(
                self._key(program), self._machine, compile_program, refused=refused
            )
            if now:
                return compiled[0], "compiled"
            try:
                executable = self._device.load(serialized, self._path, results)
            except MismatchError:  # kept by another build of jaxlib, for example
                refused = serialized
                continue
            self._check(program, executable, self._path)
            return executable, "kept"

    def is_kept(self, program: ProgramEntry) -> bool:
        """Return whether an earlier start compiled a program and kept it."""
        return is_kept_here(self._key(program), self._machine)

    def _compile(self, program: ProgramEntry, results: tuple[Array, ...]) -> Executable:
        portable = bind_calls(self._portable_of(program), self._names(program))
        try:
            executable = self._device.compile(portable, program.platforms or (), results)
        except BuildError as error:
            text = f"{self._path}: {program.name}: {error}"
            raise BuildError(text, hint=error.hint or self._of_later(portable)) from error
        self._check(program, executable, self._path)
        return executable

    def _of_later(self, portable: bytes) -> str | None:
        """Return the hint for a program that a later jax has lowered; None: it is of none."""
        versions = version_of(portable), _jax_parts.stablehlo_version()
        found, here = (tuple(map(int, each.split("."))) for each in versions)
        if found <= here:
            return None
        return (
            "a later jax than this one lowered it: install the one that `prejit inspect` shows, or build the "
            f"bundle for jaxlib {self._machine.jaxlib}"
        )

    def _key(self, program: ProgramEntry) -> PortableKey:
        # Its own digest does not cover the libraries that it calls.
        digest = program.portable.raw_digest
        if names := self._names(program):
            digest = digest_of(to_json({"program": digest, "calls": names}))
        return PortableKey(
            digest, program.platforms or (), self._device.platform, self._device.mesh
        )

    def _names(self, program: ProgramEntry) -> dict[str, str]:
        """Return the names by which XLA knows the handlers of the user that a program calls."""
        return {name: self._calls[name] for name in program.calls or () if name in self._calls}

    def _check_calls(self, program: ProgramEntry) -> None:
        """Check that this process has the handlers of the user that a program calls on this platform."""
        if program.calls is None or not (missing := {*program.calls} - self._calls.keys()):
            return
        platform = self._device.platform  # another than the target's may need no handlers
        called = custom_calls(self._portable_of(program), program.platforms or (), platform)
        if names := sorted(missing & called):
            raise BuildError(
                f"{self._path}: {program.name}: it calls {', '.join(names)} of a library of yours, which "
                f"cannot be used on this machine: {self._no_calls}",
                hint="add a [[target]] for this machine and a [[library]] built for it, and build again; or "
                "give the function a form without the library, with jax.lax.platform_dependent",
            )

    @once
    def _machine(self) -> Fingerprint:
        return Fingerprint.current()


@dataclass(frozen=True, slots=True)
class PortableKey:
    """Everything about a portable program that decides what it compiles to on a given machine.

    Attributes:
        digest: digest of the decompressed program.
        platforms: the platforms that it was lowered for, in the order of its platform index.
        device: the platform of the device to compile for; a machine may have several.
        mesh: the devices that it is split over; None: one device.
    """

    digest: str
    platforms: tuple[str, ...]
    device: str
    mesh: Mesh | None


def compiled_here(
    program: PortableKey,
    machine: Fingerprint,
    compile_program: Callable[[], bytes],
    *,
    refused: bytes | None = None,
) -> tuple[bytes, bool]:
    """Return the executable of a portable program for this machine: from the cache, or compiled and kept.

    `machine` is the real one. `refused` is an earlier result of this function that XLA could not load; it is
    replaced.

    Returns:
        The serialized executable, and whether it was compiled now.

    Raises:
        UsageError: PREJIT_COMPILE_CACHE_BYTES is not a number of bytes.
    """
    limit = limit_bytes()
    if limit == 0:
        return compile_program(), True
    path = _path(program, machine)
    if (kept := _read(path)) is not None and kept != refused:
        return kept, False
    with _locked(path.with_suffix(".lock")):
        # Another process may have compiled it while this one waited for the lock.
        if (kept := _read(path)) is not None and kept != refused:
            return kept, False
        serialized = compile_program()
        try:
            _write(path, serialized, limit)
        except (OSError, StoreError) as error:
            _warn_once(path.parent, error)
    _sweep(path.parent, limit)
    return serialized, True


def is_kept_here(program: PortableKey, machine: Fingerprint) -> bool:
    """Return whether the cache has a file for a program. Nothing is read, so the file may be damaged."""
    return limit_bytes() != 0 and os.path.isfile(_path(program, machine))


def limit_bytes() -> int:
    """Return the maximum size of the cache: `$PREJIT_COMPILE_CACHE_BYTES`, else 2 GiB. 0 turns it off.

    Raises:
        UsageError: the variable is not a number of bytes.
    """
    text = os.environ.get("PREJIT_COMPILE_CACHE_BYTES", "")
    if not text:
        return DEFAULT_LIMIT_BYTES
    if not re.fullmatch("[0-9]{1,18}", text):
        raise UsageError(
            f"PREJIT_COMPILE_CACHE_BYTES: expected a number of bytes, found {text!r}",
            hint=f"unset it for {DEFAULT_LIMIT_BYTES}, or set 0 to keep nothing",
        )
    return int(text)


@functools.cache
def _our_code() -> str:
    """Return the digest of our modules that compile, so that a fixed version does not use old results.

    The modules that they import are not included, because they do not decide what is compiled.
    """
    content = b""
    for name in ("_jaxlib", "portable"):
        found = importlib.util.find_spec(f"prejit.runtime.device.{name}")
        assert found is not None
        assert found.origin is not None
        content += found.loader.get_data(found.origin)  # type: ignore[union-attr]
    return digest_of(content)


def _path(program: PortableKey, machine: Fingerprint) -> Path:
    """Return the file of a program.

    Properties that do not change the executable are not in its key: the memory, since a container may get
    more; the name of the CPU, since its features decide; and the driver. If a new driver cannot load the
    executable, it is compiled again.
    """
    flags = read_xla_flags(os.environ).split()
    ingredients = {
        "program": program.digest,
        # The program's digest does not cover its platforms: two bundles may list different ones for it.
        "platforms": program.platforms,
        "device": program.device,
        "mesh": program.mesh and str(program.mesh),
        "code": _our_code(),
        "platform": machine.platform,
        "architecture": machine.architecture,
        "cpu_features": machine.cpu_features,
        # When XLA:CPU compiles, it splits loops into as many parts as there are cores. An executable for 2
        # cores is correct on 64, but leaves 62 of them idle.
        "cpu_count": machine.cpu_count,
        # These variables override the number of cores in XLA.
        "threads": [os.environ.get(name) for name in ("NPROC", "PJRT_NPROC")],
        "jaxlib": machine.jaxlib,
        "plugin": machine.plugin,
        "device_kind": machine.device_kind,
        "compute_capability": machine.compute_capability,
        "device_count": machine.device_count,
        "topology": machine.topology,
        "xla_flags": machine.xla_flags,
        # `xla_flags` does not include this one. It makes slower code, which others should not get.
        "max_isa": [flag for flag in flags if flag.startswith("--xla_cpu_max_isa")][-1:],
        "environment": machine.environment,
    }
    named = json.dumps(ingredients, sort_keys=True).encode()
    return cache_root() / "compiled" / "v1" / hashlib.sha256(named).hexdigest()


def _read(path: Path) -> bytes | None:
    content = read_own(path, limits.MAX_PROGRAM_BYTES) or b""
    digest, frame = content[:_DIGEST_BYTES], memoryview(content)[_DIGEST_BYTES:]
    if hashlib.sha256(frame).digest() != digest:
        return None
    try:
        executable = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=limits.MAX_PROGRAM_BYTES
        )
    except zstandard.ZstdError:
        return None
    with contextlib.suppress(OSError):
        # Record the time of last use, because most file systems do not maintain atime.
        os.utime(path, follow_symlinks=False)
    return executable


def _write(path: Path, serialized: bytes, limit: int) -> None:
    frame = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(serialized)
    size = _DIGEST_BYTES + len(frame)
    if size > limit:
        raise StoreError(f"expected at most PREJIT_COMPILE_CACHE_BYTES={limit}, found {size}")
    write_file(path, hashlib.sha256(frame).digest() + frame, mode=0o600)


def _warn_once(directory: Path, error: Exception) -> None:
    if directory not in _warned:
        _warned.add(directory)
        warnings.warn(
            f"{directory}: cannot keep compiled programs, so every start compiles them again: {error}. "
            "Set PREJIT_RUNTIME_CACHE to a directory that can be written, "
            "or PREJIT_COMPILE_CACHE_BYTES=0 to keep nothing.",
            PrejitWarning,
            stacklevel=2,
        )


def _sweep(directory: Path, limit: int) -> None:
    """Remove leftovers of killed processes, then the files used longest ago, until the rest is in the limit.

    Files that are being written are not touched. A process that has a file open keeps its bytes.
    """
    with _locked(directory / "sweep.lock") as held, contextlib.suppress(OSError):
        if not held:
            return
        files: list[tuple[bool, int, int, str]] = []
        leftovers: defaultdict[str, list[str]] = defaultdict(list)
        now = time.time_ns()
        for name in os.listdir(directory):
            if found := _LEFTOVER.fullmatch(name):
                leftovers[found[1]].append(name)
            elif _KEY_NAME.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(directory / name, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        # A time in the future cannot be right: such files are removed first.
                        known = status.st_mtime_ns <= now
                        files.append((known, status.st_mtime_ns, status.st_size, name))
        for key, names in leftovers.items():
            with _locked(directory / f"{key}.lock", wait=False) as free:
                for name in names if free else ():
                    if name.endswith(".tmp"):  # the lock file goes with the lock
                        (directory / name).unlink(missing_ok=True)
        total = sum(size for _, _, size, _ in files)
        for _, _, size, name in sorted(files):
            if total <= limit:
                return
            (directory / name).unlink(missing_ok=True)
            total -= size


@contextlib.contextmanager
def _locked(lock: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file, and remove it with the lock. The kernel releases the lock when the process ends.

    Yields:
        Whether the lock is held. It is not if another process holds it and `wait` is false, if the directory
        cannot be written, or if its file system has no locks.
    """
    descriptor = None
    with contextlib.suppress(OSError):
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = lock_file(lock, wait=wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            remove_and_unlock(lock, descriptor)
