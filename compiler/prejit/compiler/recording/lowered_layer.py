"""The layer of a recorded target that holds its programs as jax lowered them. `prejit run` does not read it.

one zstd frame:  [[name of the file of jax's cache, size in bytes], ...] as JSON, newline, the programs
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import zstandard

from prejit.compiler.pipeline.pack.bundle_files import PackedLayer, layer
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.bundle_schema import ImageManifest
from prejit.runtime.format.checks.oci import check_digest
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import PORTABLE_MEDIA_TYPE

_ZSTD_LEVEL = 9


def lowered_layer(programs: Mapping[str, bytes]) -> PackedLayer:
    """Return the layer of programs, by the names of their files. Equal programs give equal bytes."""
    names = sorted(programs)
    header = json.dumps([[name, len(programs[name])] for name in names]).encode()
    content = b"\n".join([header, b"".join(programs[name] for name in names)])
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(content)
    return layer(PORTABLE_MEDIA_TYPE, frame, "programs.lowered")


def read_lowered(layout: Layout, manifest: ImageManifest) -> dict[str, bytes]:
    """Return the programs of a target as jax lowered them; none: an older prejit recorded it.

    Raises:
        RejectError: the layer is damaged.
        StoreError: it cannot be read.
    """
    if not manifest.has_layer(PORTABLE_MEDIA_TYPE):
        return {}
    at = manifest.layer(PORTABLE_MEDIA_TYPE)
    pack = Layer.in_layout(layout, at)
    frame = bytes(pack.content)
    check_digest(frame, at.digest, pack.path)
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size > limits.MAX_PROGRAM_BYTES:
            raise ValueError(f"expected at most {limits.MAX_PROGRAM_BYTES} bytes, found {size}")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
        header, _, rest = content.partition(b"\n")
        programs, start = {}, 0
        for name, length in json.loads(header):
            programs[name] = rest[start : start + length]
            start += length
        if start != len(rest):
            raise ValueError(f"expected programs of {start} bytes, found {len(rest)}")
    except (zstandard.ZstdError, ValueError, TypeError) as error:
        raise RejectError(pack.path, f"expected programs as jax lowered them: {error}") from error
    return programs
