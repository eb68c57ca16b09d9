"""Executables that this machine had to compile by itself, kept for its next start.

In `compiled/v1` of the runtime's cache; KEY is a digest of the program and of what matters of the machine:

    KEY             sha256 of the rest, then a zstd frame with the executable
    KEY.lock        held while KEY is made: who starts at the same time waits, so that it is made once
    .KEY.*.tmp      KEY while it is written; a rename makes it KEY
    sweep.lock      held by who removes

A process may be killed at any moment. The kernel releases its locks; whoever can take the lock of a KEY
finds nothing but leftovers beside it, and the next who writes removes them. Files that were used
longest ago go when all together are larger than `$PREJIT_COMPILE_CACHE_BYTES`. A file that is damaged or
was put there by others is compiled again and replaced. Where nothing can be written, that costs only time.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

from prejit.runtime.base.digests import digest_of
from prejit.runtime.base.files import write_file
from prejit.runtime.errors import PrejitWarning, StoreError, UsageError
from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.machine.environment import read_xla_flags
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.store.directory import cache_root, read_own

DEFAULT_LIMIT_BYTES = 2 << 30
_DIGEST_BYTES = 32
_KEY = re.compile("[0-9a-f]{64}")
_LEFTOVER = re.compile(r"\.?([0-9a-f]{64})\.(?:lock|.*\.tmp)")
_warned: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Portable:
    """A portable program, by all that decides what it compiles to on a machine.

    Attributes:
        digest: of the program, decompressed.
        platforms: that it was lowered for, in the order of its platform index.
        device: what it is compiled for, where a machine has several: the platform of the device.
        mesh: the devices that it is split over; None: one.
    """

    digest: str
    platforms: tuple[str, ...]
    device: str
    mesh: Mesh | None


def compiled_here(
    program: Portable,
    machine: Fingerprint,
    compile_program: Callable[[], bytes],
    *,
    refused: bytes | None = None,
) -> tuple[bytes, bool]:
    """The executable of a portable program for this machine: from the cache, or compiled and kept.

    Args:
        program: what is compiled.
        machine: this machine's real fingerprint.
        compile_program: gives the serialized executable.
        refused: an executable that this function gave and that XLA does not load: that one is replaced.

    Returns:
        The serialized executable, and whether it was compiled now.

    Raises:
        UsageError: PREJIT_COMPILE_CACHE_BYTES is no number of bytes.
    """
    limit = limit_bytes()
    if limit == 0:
        return compile_program(), True
    path = _path(program, machine)
    if (kept := _read(path)) is not None and kept != refused:
        return kept, False
    with _locked(path.with_suffix(".lock")):
        # Another process may have compiled it meanwhile.
        if (kept := _read(path)) is not None and kept != refused:
            return kept, False
        serialized = compile_program()
        try:
            _write(path, serialized, limit)
        except (OSError, StoreError) as error:
            _warn_once(path.parent, error)
    _sweep(path.parent, limit)
    return serialized, True


def is_kept(program: Portable, machine: Fingerprint) -> bool:
    """Whether there is an executable of a program already; nothing is read, so it may be damaged."""
    return limit_bytes() != 0 and os.path.isfile(_path(program, machine))


def limit_bytes() -> int:
    """How large the cache may get: `$PREJIT_COMPILE_CACHE_BYTES`, else 2 GiB. 0: nothing is kept or read.

    Raises:
        UsageError: it is no number of bytes.
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
    """Digest of our own code that compiles, so that a mended one serves nothing that the old one made.

    Not of what it imports: none of that decides what it compiles.
    """
    found = importlib.util.find_spec("prejit.runtime.device.executable")
    assert found is not None
    assert found.origin is not None
    content: bytes = found.loader.get_data(found.origin)  # type: ignore[union-attr]
    return digest_of(content)


def _path(program: Portable, machine: Fingerprint) -> Path:
    """The file of a program. Not in its key: what may change without the executable being another.

    That is memory, which a container may get more of, the driver, and the name of the CPU, which says
    less than its features. Where a driver does not load the executable, it is compiled again.
    """
    flags = read_xla_flags(os.environ).split()
    ingredients = {
        "program": program.digest,
        # Not in the digest: a bundle says it, and another bundle may say it of the same program.
        "platforms": program.platforms,
        "device": program.device,
        "mesh": program.mesh and [program.mesh.data, program.mesh.tensor],
        "code": _our_code(),
        "platform": machine.platform,
        "architecture": machine.architecture,
        "cpu_features": machine.cpu_features,
        # XLA:CPU fixes when it compiles into how many parts it splits loops: the number of cores. What was
        # compiled on 2 is right on 64, and leaves 62 idle.
        "cpu_count": machine.cpu_count,
        "threads": [
            os.environ.get(name) for name in ("NPROC", "PJRT_NPROC")
        ],  # XLA asks them first
        "jaxlib": machine.jaxlib,
        "plugin": machine.plugin,
        "device_kind": machine.device_kind,
        "compute_capability": machine.compute_capability,
        "device_count": machine.device_count,
        "topology": machine.topology,
        "xla_flags": machine.xla_flags,
        # Not among those flags, and it makes slower code: nobody without it should get that.
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
        # The time of last use: file systems keep no true atime.
        os.utime(path, follow_symlinks=False)
    return executable


def _write(path: Path, serialized: bytes, limit: int) -> None:
    frame = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(serialized)
    size = _DIGEST_BYTES + len(frame)
    if size > limit:
        raise StoreError(f"expected at most PREJIT_COMPILE_CACHE_BYTES={limit}, found {size}")
    write_file(path, hashlib.sha256(frame).digest() + frame)
    with contextlib.suppress(FileNotFoundError):  # removed by another process already
        path.chmod(0o600)


def _warn_once(directory: Path, error: Exception) -> None:
    if directory not in _warned:
        _warned.add(directory)
        warnings.warn(
            f"{directory}: what is compiled here cannot be kept, so every start compiles it again: {error}. "
            "Set PREJIT_RUNTIME_CACHE to a directory that can be written, "
            "or PREJIT_COMPILE_CACHE_BYTES=0 to keep nothing.",
            PrejitWarning,
            stacklevel=2,
        )


def _sweep(directory: Path, limit: int) -> None:
    """Removes what killed processes left, then what was used longest ago, until the rest is in the limit.

    Nothing that is being written is touched, and who has opened a file keeps its bytes.
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
            elif _KEY.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(directory / name, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        # A time that is still to come says nothing: such files go first.
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
    """Holds a lock file, which is removed with the lock; the kernel releases it when the process ends.

    Yields:
        Whether it is held: not where another holds it and `wait` is false, nor where the directory cannot
        be written or its file system has no locks.
    """
    descriptor = None
    with contextlib.suppress(OSError):
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = _acquire(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                lock.unlink()
            os.close(descriptor)


def _acquire(lock: Path, operation: int) -> int:
    while True:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, operation)
            # Who held it removed the file: another may hold a new one by now.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
