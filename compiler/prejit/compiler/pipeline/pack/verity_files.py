"""The fs-verity digest of a file, as `fsverity digest` prints it: SHA-256, blocks of 4096 bytes, no salt.

    blocks of the file, the last one padded with zeros    ->  their hashes
    blocks of hashes, 128 in each, padded with zeros      ->  their hashes, and so on to one hash, the root
    fsverity_descriptor: header, size, root, zeros        ->  the digest

The definition is Documentation/filesystems/fsverity.rst of Linux.
"""

from __future__ import annotations

import hashlib
import struct
from typing import final

BLOCK_BYTES = 4096

_DESCRIPTOR = struct.Struct("<BBBBIQ64s176x")
"""Version, hash function, log2 of the block size, size of the salt, 0, size of the file, root, zeros."""


@final
class VerityHash:
    """The fs-verity digest of bytes that come in pieces. It keeps 32 bytes for each 4096."""

    def __init__(self) -> None:
        """Begin with an empty file."""
        self._size = 0
        self._hashes = bytearray()

    def update(self, piece: bytes) -> None:
        """Append a piece. All but the last one are a multiple of `BLOCK_BYTES` long."""
        assert self._size % BLOCK_BYTES == 0, "only the last piece may end inside of a block"
        self._size += len(piece)
        self._hashes += _hashes(piece)

    def digest(self) -> str:
        """Return the digest: `sha256:` and 64 hexadecimal digits."""
        level = bytes(self._hashes)
        while len(level) > hashlib.sha256().digest_size:
            level = _hashes(level)
        descriptor = _DESCRIPTOR.pack(1, 1, BLOCK_BYTES.bit_length() - 1, 0, 0, self._size, level)
        return f"sha256:{hashlib.sha256(descriptor).hexdigest()}"


def _hashes(content: bytes) -> bytes:
    """Return the hashes of the blocks of some bytes, one after the other."""
    sha256, view = hashlib.sha256, memoryview(content)
    whole = len(content) - len(content) % BLOCK_BYTES
    hashes = [
        sha256(view[start : start + BLOCK_BYTES]).digest() for start in range(0, whole, BLOCK_BYTES)
    ]
    if rest := content[whole:]:
        hashes.append(sha256(rest.ljust(BLOCK_BYTES, b"\0")).digest())
    return b"".join(hashes)
