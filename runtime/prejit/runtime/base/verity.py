"""fs-verity: file systems keep a hash tree of a file; the kernel compares each page that it reads with it.

Such a file can no longer be written. ext4, f2fs and btrfs have it, once `fsverity enable FILE` was run.
"""

from __future__ import annotations

import struct

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
