"""The audit of a bundle: every check of every byte, for all targets and programs. Runs nothing.

It also checks what no load reads: what refers to the bundle, and that there is no file that nothing leads to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prejit.runtime.base.typed_json import from_json
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.blobs import Blobs, read_whole
from prejit.runtime.format.bundle_schema import Chunks, ImageManifest, Index, Segment
from prejit.runtime.format.checks.attached import (
    check_content,
    check_names,
    check_root,
    check_subject,
    check_types,
    is_described,
    is_ours,
)
from prejit.runtime.format.checks.call_programs import check_programs
from prejit.runtime.format.checks.chat_layer import check_chat
from prejit.runtime.format.checks.layers import check_weights, unpack
from prejit.runtime.format.checks.oci import check_digest, check_layout_file
from prejit.runtime.format.checks.program_table import check_weight_sets, segments_of
from prejit.runtime.format.hashing import check_blob
from prejit.runtime.format.index_bytes import encode_root
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    CHAT_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    INDEX_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import match
from prejit.runtime.format.referrers import Referrer, reached, referrers, unattached
from prejit.runtime.format.root import Root
from prejit.runtime.format.target_contents import (
    Contents,
    check_libraries,
    read_contents,
    read_kernels,
)
from prejit.runtime.format.writing import locked
from prejit.runtime.machine.fingerprint import Fingerprint

CheckGeneration = Callable[[bytes, str], object]
"""Check 12. It takes the layer's bytes and the path for errors. It is an argument because the options of
generation belong to a room above this one."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit that found no fault.

    Attributes:
        digest: the bundle's digest.
        target_count: the number of targets.
        program_count: the number of programs of all targets.
        attached_count: the number of what refers to the bundle, such as signatures and provenance.
        hashed_bytes: the size of the blobs that were hashed.
    """

    digest: str
    target_count: int
    program_count: int
    attached_count: int
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
        attached = check_attached(layout, root, [content.manifest for content in contents])
        check_index_file(layout, root, attached)
        _check_files(layout, root)
        programs = sum(len(c.config.programs or c.config.recorded or ()) for c in contents)
        hashed = blobs.hashed_bytes + sum(_attached_bytes(attached))
        return Audit(root.digest, len(targets), programs, len(attached), hashed)

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
        check_generation(read, path)


def check_attached(
    layout: Layout, root: Root, manifests: Sequence[ImageManifest]
) -> tuple[Referrer, ...]:
    """Check what `index.json` lists beside the bundle: checks 14 and 15.

    Args:
        layout: the bundle.
        root: what its `index.json` leads to.
        manifests: the manifests of its targets.

    Returns:
        What refers to the bundle.

    Raises:
        RejectError: something of it is missing or damaged, or refers to something else.
    """
    for at in (*root.others, *unattached(layout, root)):
        check_blob(layout, at)
    attached = referrers(layout, root)
    targets = root.bundle.manifests
    is_whole = root.subject is not None and root.subject.mediaType == INDEX_MEDIA_TYPE
    if root.subject is not None and is_whole:  # a pull of some targets keeps the index
        content = layout.read_blob(root.digest, root.subject.size)
        targets = from_json(Index, content, root.path).manifests
    known = {at.digest: at for at in (*targets, *(each.descriptor for each in attached))}
    if root.subject is not None:
        known[root.digest] = root.subject
    for each in attached:
        path = layout.blob_path(each.descriptor.digest)
        if is_whole:  # a copy of a target may have what refers to the bundle
            check_subject(each.subject, known, path)
        for at in (each.config, *each.layers):
            check_blob(layout, at)
            if is_described(at.mediaType) and at.size <= limits.MAX_CONFIG_BYTES:
                content = layout.read_blob(at.digest, at.size)
                check_content(content, at.mediaType, layout.blob_path(at.digest))
    if is_whole:
        types = {each.artifact_type for each in attached if each.subject.digest == root.digest}
        check_types(manifests, types, str(layout.path / "index.json"))
    return attached


def check_index_file(layout: Layout, root: Root, attached: Sequence[Referrer]) -> None:
    """Check that `index.json` and `oci-layout`, if prejit wrote them, are as it writes them: check 16.

    Args:
        layout: the bundle.
        root: what its `index.json` leads to.
        attached: what refers to the bundle.

    Raises:
        RejectError: they are not.
    """
    path = str(layout.path / "index.json")
    content = layout.read("index.json", limits.MAX_INDEX_BYTES)
    if is_ours(content):
        if root.subject is None or root.subject.mediaType != INDEX_MEDIA_TYPE:
            raise RejectError(path, f"expected an entry of {INDEX_MEDIA_TYPE}, found none")
        index = layout.read_blob(root.digest, root.subject.size)
        entries = [at.entry for at in sorted(attached, key=lambda at: at.descriptor.digest)]
        check_root(content, encode_root(root.bundle, index, entries), path)
        version = layout.read("oci-layout", limits.MAX_OCI_LAYOUT_BYTES)
        check_layout_file(version, str(layout.path / "oci-layout"))


def _check_files(layout: Layout, root: Root) -> None:
    """Check that a layout has no file that nothing leads to: check 17."""
    blobs = (digest.removeprefix("sha256:") for digest in reached(layout, root))
    known = {"index.json", "oci-layout", *(f"blobs/sha256/{name}" for name in blobs)}
    with locked(layout.path):  # a writer may be at work
        found = [*layout.names()]
    check_names(found, known, str(layout.path))


def _attached_bytes(attached: Sequence[Referrer]) -> Iterator[int]:
    for each in attached:
        yield from (at.size for at in (each.descriptor, each.config, *each.layers))
