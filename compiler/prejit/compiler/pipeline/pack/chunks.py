"""The chunks of large layers, with whose digests a server verifies them, and fs-verity digests.

An fs-verity digest is that of `fsverity digest`: SHA-256, blocks of 4096 bytes, no salt. The definition is
Documentation/filesystems/fsverity.rst of Linux:

    blocks of the file, the last one padded with zeros    ->  their hashes
    blocks of hashes, 128 in each, padded with zeros      ->  their hashes, and so on to one hash, the root
    fsverity_descriptor: header, size, root, zeros        ->  the digest
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import final

from blake3 import blake3

from prejit.compiler.pipeline.pack.bundle_files import PackedLayer
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store
from prejit.runtime.base.files import digest_of, store_errors
from prejit.runtime.format.bundle_schema import Chunks
from prejit.runtime.format.checks.program_table import CHUNK_ALGORITHM
from prejit.runtime.format.names import LIBRARY_MEDIA_TYPE

CHUNK_BYTES = 8 << 20
"""The size of a chunk. A thread takes 1.1 ms to hash one, and then up to 0.5 ms for the GIL, so
smaller ones cost time; larger ones make a thread wait longer for the bytes that it needs."""

CHUNKED_BYTES = 1 << 20
"""The size from which a layer has chunks. SHA-256 of a smaller one takes less than 0.6 ms."""


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
        return digest_of(descriptor)


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


def chunks_of(layers: Iterable[PackedLayer], store: Store) -> dict[str, Chunks] | None:
    """Return the chunks of large layers, by media type; None: no layer is large.

    A library of the user has none: it is read whole, and several have one media type. The store keeps the
    digests.
    """
    found = {
        layer.media_type: _chunks(layer, store)
        for layer in layers
        if layer.size >= CHUNKED_BYTES and layer.media_type != LIBRARY_MEDIA_TYPE
    }
    return found or None


def _chunks(layer: PackedLayer, store: Store) -> Chunks:
    sizes = (("size", str(CHUNK_BYTES)), ("verity block", str(BLOCK_BYTES)))
    ingredients = (("layer", layer.digest), ("hash", CHUNK_ALGORITHM), *sizes)
    key = Key("chunks", layer.digest, ingredients)
    result = store.get(key)
    if result is None:
        digests, verity = list[str](), VerityHash()
        for chunk in _pieces(layer.content):
            digests.append(blake3(chunk).hexdigest())
            verity.update(chunk)
        result = {"digests": digests, "verity": verity.digest()}
        store.put(key, result)
    return Chunks(CHUNK_ALGORITHM, CHUNK_BYTES, tuple(result["digests"]), result["verity"])


def _pieces(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]
        return
    with store_errors(content, "read"):
        with content.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece
