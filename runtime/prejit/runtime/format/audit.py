"""The audit of a bundle: every check of every byte, for all targets and programs. Runs nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prejit.runtime.format.blobs import Blobs, read_whole
from prejit.runtime.format.checks.config import (
    check_programs,
    check_weight_sets,
    segments_of,
)
from prejit.runtime.format.checks.layers import check_chat, unpack
from prejit.runtime.format.checks.oci import check_digest
from prejit.runtime.format.checks.safetensors import check_weights
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    CHAT_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import (
    Contents,
    check_libraries,
    match,
    read_contents,
    read_kernels,
)
from prejit.runtime.format.root import Root
from prejit.runtime.format.schema import Chunks, Segment
from prejit.runtime.machine.fingerprint import Fingerprint

CheckGeneration = Callable[[bytes, int, str], object]
"""Check 12. It takes the layer's bytes, the bundle's format and the path for errors. It is an argument
because the options of generation belong to a room above this one."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit that found no fault.

    Attributes:
        digest: the bundle's digest.
        target_count: the number of targets.
        program_count: the number of programs of all targets.
        hashed_bytes: the size of the blobs that were hashed.
    """

    digest: str
    target_count: int
    program_count: int
    hashed_bytes: int


def audit(path: str | os.PathLike[str], check_generation: CheckGeneration) -> Audit:
    """Check a whole bundle: the digests of all blobs, every frame of every pack, every line of every table.

    Args:
        path: directory of the bundle.
        check_generation: checks the generation config of a bundle with a decoder.

    Raises:
        RejectError: the bundle is damaged.
        StoreError: the directory cannot be read.
    """

    def read(layout: Layout, root: Root) -> Audit:
        targets = match(root, Fingerprint.current())
        contents = [read_contents(layout, target) for target in targets]
        blobs = Blobs(layout, [content.manifest for content in contents], receipts=None)
        blobs.verify(_chunks(contents))
        unpacked = set[tuple[str, Segment]]()
        for content in contents:
            _check_frames(layout, content, unpacked)
            check_programs(content.config, layout.blob_path(content.manifest.config.digest))
            read_kernels(layout, content.config, content.manifest)
            check_libraries(layout, content.config, content.manifest)
            _check_weights(layout, content)
            _check_texts(layout, content, check_generation)
        programs = sum(len(c.config.programs or c.config.recorded or ()) for c in contents)
        return Audit(root.digest, len(targets), programs, blobs.hashed_bytes)

    return read_whole(path, read)


def _chunks(contents: Iterable[Contents]) -> Iterator[tuple[str, Chunks]]:
    """Yield the digest of each large layer of these targets, with its chunks."""
    for content in contents:
        for media_type, chunks in (content.config.chunks or {}).items():
            yield content.manifest.layer(media_type).digest, chunks


def _check_frames(layout: Layout, content: Contents, unpacked: set[tuple[str, Segment]]) -> None:
    """Check the frames of a target's packs.

    Args:
        layout: the bundle.
        content: the target.
        unpacked: the frames that are checked already; targets share portable programs.
    """
    packs = segments_of(content.config)
    for at in content.manifest.layers:
        segments = packs.get(at.mediaType)
        if not segments:
            continue
        pack, path = layout.map_blob(at.digest, at.size), layout.blob_path(at.digest)
        for segment in segments:
            if (path, segment) not in unpacked:
                unpack(pack[segment.offset : segment.offset + segment.size], segment, path)
                unpacked.add((path, segment))


def _check_weights(layout: Layout, content: Contents) -> None:
    manifest, config = content.manifest, content.config
    shapes: dict[str, tuple[int, ...]] = {}
    path = layout.blob_path(manifest.config.digest)
    if manifest.has_layer(WEIGHTS_MEDIA_TYPE):
        at = manifest.layer(WEIGHTS_MEDIA_TYPE)
        path = layout.blob_path(at.digest)
        tensors = check_weights(memoryview(layout.map_blob(at.digest, at.size)), path)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_weight_sets(config, shapes, path)


def _check_texts(layout: Layout, content: Contents, check_generation: CheckGeneration) -> None:
    """Check the chat templates and the generation config of a target."""
    manifest, config = content.manifest, content.config
    if manifest.has_layer(CHAT_MEDIA_TYPE):
        at = manifest.layer(CHAT_MEDIA_TYPE)
        check_chat(bytes(layout.map_blob(at.digest, at.size)), layout.blob_path(at.digest))
    if config.decoder is not None and manifest.has_layer(GENERATION_MEDIA_TYPE):
        at = manifest.layer(GENERATION_MEDIA_TYPE)
        read, path = layout.read_blob(at.digest, at.size), layout.blob_path(at.digest)
        check_digest(read, at.digest, path)
        check_generation(read, config.format, path)
