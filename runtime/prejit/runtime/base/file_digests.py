"""Digests of bytes and files: SHA-256 in the spelling of OCI, `sha256:<hex>`, and fs-verity.

fs-verity: file systems keep a hash tree of a file; the kernel compares each page that it reads with it. Such
a file can no longer be written. ext4, f2fs and btrfs have it, once `fsverity enable FILE` was run.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time


def digest_of(content: bytes | bytearray | memoryview) -> str:
    """Return the OCI digest of bytes: `sha256:` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def is_digest(text: str) -> bool:
    """Return whether text has the form of an OCI sha256 digest."""
    head, _, digits = text.partition(":")
    return head == "sha256" and len(digits) == 64 and not set(digits) - set("0123456789abcdef")


_MEASURE_VERITY = 0xC0046686
"""FS_IOC_MEASURE_VERITY of linux/fsverity.h. It takes and returns algorithm, size and digest."""
_SHA256 = 1
_HEAD = struct.Struct("=HH")
_MAX_DIGEST_BYTES = 64


def measure(descriptor: int) -> str | None:
    """Return the fs-verity digest of an open file, as `fsverity measure` prints it, without reading the file.

    None: the kernel or the file system has no fs-verity, it is not enabled for this file, or its hash
    function is not SHA-256.
    """
    import fcntl  # a shared library, which bundles without such digests need not open

    answer = bytearray(_HEAD.pack(0, _MAX_DIGEST_BYTES) + bytes(_MAX_DIGEST_BYTES))
    try:
        fcntl.ioctl(descriptor, _MEASURE_VERITY, answer)
    except OSError:
        return None
    algorithm, size = _HEAD.unpack_from(answer)
    if algorithm != _SHA256:
        return None
    return f"sha256:{answer[_HEAD.size : _HEAD.size + size].hex()}"


_READ_BYTES = 1 << 20


def digest_file(descriptor: int) -> str:
    """Return the digest of an open file, read from its start."""
    return timed_digest_file(descriptor)[0]


def timed_digest_file(descriptor: int) -> tuple[str, float]:
    """Return the digest of an open file, and the seconds that reading it took."""
    hasher = hashlib.sha256()
    buffer = bytearray(_READ_BYTES)
    offset, seconds = 0, 0.0
    while True:
        started = time.perf_counter()
        count = os.preadv(descriptor, [buffer], offset)
        seconds += time.perf_counter() - started
        if not count:
            return f"sha256:{hasher.hexdigest()}", seconds
        hasher.update(memoryview(buffer)[:count])
        offset += count
