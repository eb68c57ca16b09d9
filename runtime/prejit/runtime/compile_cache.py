"""Executables that this machine had to compile by itself, kept for its next start.

One file for each program and machine: sha256 of the rest, then a zstd frame. A file that is damaged is
compiled again and replaced. Processes that start at once wait for each other by a lock, so that each
program is compiled once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

from prejit.runtime import bundle
from prejit.runtime.errors import StoreError
from prejit.runtime.fingerprint import Fingerprint
from prejit.runtime.layout import write_file
from prejit.runtime.receipt import cache_root, read_own

_DIGEST_BYTES = 32


def compiled_here(
    portable_digest: str,
    machine: Fingerprint,
    compile_program: Callable[[], bytes],
    *,
    again: bool = False,
) -> tuple[bytes, bool]:
    """The executable of a portable program for this machine: from the cache, or compiled and kept.

    Args:
        portable_digest: digest of the portable program, decompressed.
        machine: this machine's real fingerprint.
        compile_program: gives the serialized executable.
        again: whether to compile although there is one, because XLA does not load that one.

    Returns:
        The serialized executable, and whether it was compiled now.
    """
    named = f"{portable_digest} {bundle.digest_of(bundle.to_json(machine))}"
    path = cache_root() / "compiled" / "v1" / hashlib.sha256(named.encode()).hexdigest()
    if not again and (kept := _read(path)) is not None:
        return kept, False
    with _lock(path):
        if not again and (kept := _read(path)) is not None:  # another process compiled it meanwhile
            return kept, False
        serialized = compile_program()
        # A cache that cannot be written costs only time.
        with contextlib.suppress(OSError, StoreError):
            frame = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(serialized)
            write_file(path, hashlib.sha256(frame).digest() + frame)
            path.chmod(0o600)
    return serialized, True


def _read(path: Path) -> bytes | None:
    content = read_own(path, bundle.MAX_PROGRAM_BYTES) or b""
    digest, frame = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(frame).digest() != digest:
        return None
    try:
        return zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=bundle.MAX_PROGRAM_BYTES
        )
    except zstandard.ZstdError:
        return None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds the lock of a cache file; the kernel releases it when the process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(
            path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
        )
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks, such as some NFS
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
