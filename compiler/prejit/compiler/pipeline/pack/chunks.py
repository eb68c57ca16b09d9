"""The chunks of large layers, with whose digests a server verifies them piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from prejit.compiler.pipeline.pack.bundle_files import PackedLayer
from prejit.compiler.pipeline.pack.verity_files import BLOCK_BYTES, VerityHash
from prejit.compiler.pipeline.program_keys import chunks_key
from prejit.compiler.store.interface import Store
from prejit.runtime.errors import StoreError
from prejit.runtime.format.bundle_schema import Chunks
from prejit.runtime.format.checks.program_table import CHUNK_ALGORITHM
from prejit.runtime.format.names import LIBRARY_MEDIA_TYPE

CHUNK_BYTES = 8 << 20
"""The size of a chunk. A thread takes 1.1 ms to hash one, and then up to 0.5 ms for the GIL, so
smaller ones cost time; larger ones make a thread wait longer for the bytes that it needs."""

CHUNKED_BYTES = 1 << 20
"""The size from which a layer has chunks. SHA-256 of a smaller one takes less than 0.6 ms."""


def chunks_of(layers: Iterable[PackedLayer], store: Store) -> dict[str, Chunks] | None:
    """Return the chunks of large layers, by media type; None: no layer is large.

    A library of the user has none: it is read whole, and several have one media type.

    Args:
        layers: the layers of a target.
        store: keeps the digests of those that are files.

    Raises:
        StoreError: a file cannot be read.
    """
    found = {
        layer.media_type: _chunks(layer, store)
        for layer in layers
        if layer.size >= CHUNKED_BYTES and layer.media_type != LIBRARY_MEDIA_TYPE
    }
    return found or None


def _chunks(layer: PackedLayer, store: Store) -> Chunks:
    key = chunks_key(layer.digest, CHUNK_ALGORITHM, CHUNK_BYTES, BLOCK_BYTES)
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
    try:
        with content.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece
    except OSError as error:
        raise StoreError(f"{content}: cannot read: {error.strerror}") from error
