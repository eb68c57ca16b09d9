"""The audit of a bundle: every check of every byte, for all targets and programs. Runs nothing.

Checks 14 to 17 are of what no load reads: what refers to the bundle, an `index.json` of ours, and files that
nothing leads to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prejit.runtime.base.files import is_digest, store_errors
from prejit.runtime.base.typed_json import from_json, shown
from prejit.runtime.errors import RejectError, rejecting
from prejit.runtime.format import limits
from prejit.runtime.format.blob_hashing import check_blob
from prejit.runtime.format.blobs import Blobs, Layer, read_whole
from prejit.runtime.format.bundle_schema import Chunks, Descriptor, ImageManifest, Index, Segment
from prejit.runtime.format.checks.call_programs import check_programs
from prejit.runtime.format.checks.layers import check_kernels, check_weights
from prejit.runtime.format.checks.program_table import check_weight_sets, segments_of
from prejit.runtime.format.checks.seldom_parts import check_chat, check_library
from prejit.runtime.format.index_writing import encode_root, is_ours, locked
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    ATTACHED_TYPES,
    CHAT_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    INDEX_MEDIA_TYPE,
    OCI_LAYOUT,
    PARTS_MEDIA_TYPE,
    SIGNATURE_MEDIA_TYPE,
    STATEMENT_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import Contents, match, read_contents
from prejit.runtime.format.referrers import Referrer, reached, referrers, unattached
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint

CheckGeneration = Callable[[bytes, str], object]
"""Check 12. It takes the layer's bytes and the path for errors. It is an argument because the options of
generation belong to a room above this one."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit that found no fault: counts, and the size of the blobs that were hashed."""

    digest: str
    target_count: int
    program_count: int
    attached_count: int
    hashed_bytes: int


def audit(path: str | os.PathLike[str], check_generation: CheckGeneration) -> Audit:
    """Check a whole bundle: the digests of all blobs, every frame of every pack, every line of every table.

    `check_generation` checks the generation config of a bundle with a decoder.

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
            _check_libraries(layout, content)
            _check_weights(layout, content)
            _check_texts(layout, content, check_generation)
        attached = check_attached(layout, root, [content.manifest for content in contents])
        check_index_file(layout, root, attached)
        _check_files(layout, root)
        programs = sum(len(c.config.programs or c.config.recorded or ()) for c in contents)
        parts = (at for each in attached for at in (each.descriptor, each.config, *each.layers))
        hashed = blobs.hashed_bytes + sum(at.size for at in parts)
        return Audit(root.digest, len(targets), programs, len(attached), hashed)

    return read_whole(path, read)


def _chunks(contents: Iterable[Contents]) -> Iterator[tuple[str, Chunks]]:
    """Yield the digest of each large layer of these targets, with its chunks."""
    for content in contents:
        for media_type, chunks in (content.config.chunks or {}).items():
            yield content.manifest.layer(media_type).digest, chunks


def _check_frames(layout: Layout, content: Contents, unpacked: set[tuple[str, Segment]]) -> None:
    """Check the frames of a target's packs, but those in `unpacked`: targets share portable programs."""
    packs = segments_of(content.config)
    for at in content.manifest.layers:
        segments = packs.get(at.mediaType)
        if not segments:
            continue
        layer = Layer.in_layout(layout, at)
        for segment in segments:
            if (layer.path, segment) not in unpacked:
                layer.unpack(segment)
                unpacked.add((layer.path, segment))


def _check_libraries(layout: Layout, content: Contents) -> None:
    config, layers = content.config, {at.digest: at for at in content.manifest.layers}
    if (kernels := config.kernels) is not None:
        check_kernels(
            layout.read_blob(layers[kernels.digest]), kernels, layout.blob_path(kernels.digest)
        )
    for library in config.libraries or ():
        read, path = layout.read_blob(layers[library.digest]), layout.blob_path(library.digest)
        check_library(read, library, config.requirement.architecture, path)


def _check_weights(layout: Layout, content: Contents) -> None:
    manifest, config = content.manifest, content.config
    shapes: dict[str, tuple[int, ...]] = {}
    path = layout.blob_path(manifest.config.digest)
    if manifest.has_layer(WEIGHTS_MEDIA_TYPE):
        layer = Layer.in_layout(layout, manifest.layer(WEIGHTS_MEDIA_TYPE))
        path = layer.path
        tensors = check_weights(memoryview(layer.content), path)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_weight_sets(config, shapes, path)


def _check_texts(layout: Layout, content: Contents, check_generation: CheckGeneration) -> None:
    """Check the chat templates and the generation config of a target."""
    manifest, config = content.manifest, content.config
    if manifest.has_layer(CHAT_MEDIA_TYPE):
        layer = Layer.in_layout(layout, manifest.layer(CHAT_MEDIA_TYPE))
        check_chat(bytes(layer.content), layer.path)
    if config.decoder is not None and manifest.has_layer(GENERATION_MEDIA_TYPE):
        at = manifest.layer(GENERATION_MEDIA_TYPE)
        check_generation(layout.read_blob(at), layout.blob_path(at.digest))


def check_attached(
    layout: Layout, root: Root, manifests: Sequence[ImageManifest]
) -> tuple[Referrer, ...]:
    """Check what `index.json` lists beside the bundle: checks 14 and 15. Return what refers to the bundle.

    Raises:
        RejectError: something of it is missing or damaged, or refers to something else.
    """
    for at in (*root.others, *unattached(layout, root)):
        check_blob(layout, at)
    attached = referrers(layout, root)
    targets = root.bundle.manifests
    is_whole = root.subject is not None and root.subject.mediaType == INDEX_MEDIA_TYPE
    if root.subject is not None and is_whole:  # a pull of some targets keeps the index
        targets = from_json(Index, layout.read_blob(root.subject), root.path).manifests
    known = {at.digest: at for at in (*targets, *(each.descriptor for each in attached))}
    if root.subject is not None:
        known[root.digest] = root.subject
    for each in attached:
        path = layout.blob_path(each.descriptor.digest)
        if is_whole:  # a copy of a target may have what refers to the bundle
            check_subject(each.subject, known, path)
        for at in (each.config, *each.layers):
            check_blob(layout, at)
            if at.mediaType in _SAYS and at.size <= limits.MAX_CONFIG_BYTES:
                check_content(layout.read_blob(at), at.mediaType, layout.blob_path(at.digest))
    if is_whole:
        types = {each.artifact_type for each in attached if each.subject.digest == root.digest}
        check_types(manifests, types, str(layout.path / "index.json"))
    return attached


def check_index_file(layout: Layout, root: Root, attached: Sequence[Referrer]) -> None:
    """Check that `index.json` and `oci-layout`, if prejit wrote them, are as it writes them: check 16.

    Raises:
        RejectError: they are not.
    """
    path = str(layout.path / "index.json")
    content = layout.read("index.json", limits.MAX_INDEX_BYTES)
    if is_ours(content):
        if root.subject is None or root.subject.mediaType != INDEX_MEDIA_TYPE:
            raise RejectError(path, f"expected an entry of {INDEX_MEDIA_TYPE}, found none")
        index = layout.read_blob(root.subject)
        entries = [at.entry for at in sorted(attached, key=lambda at: at.descriptor.digest)]
        check_root(content, encode_root(root.bundle, index, entries), path)
        version = layout.read("oci-layout", limits.MAX_OCI_LAYOUT_BYTES)
        check_layout_file(version, str(layout.path / "oci-layout"))


def _check_files(layout: Layout, root: Root) -> None:
    """Check that a layout has no file that nothing leads to: check 17."""
    blobs = (digest.removeprefix("sha256:") for digest in reached(layout, root))
    known = {"index.json", "oci-layout", *(f"blobs/sha256/{name}" for name in blobs)}
    with locked(layout.path):  # a writer may be at work
        found = [*_names(layout)]
    check_names(found, known, str(layout.path))


def _names(layout: Layout) -> Iterator[str]:
    """Yield the names of all that is in the directories of the layout, but for these directories.

    Blobs beside `index.json` have the names that they have elsewhere.

    Raises:
        StoreError: a directory cannot be read.
    """
    own = (("blobs/", layout._blobs, "sha256"), ("blobs/sha256/", layout._sha256, ""))
    inner = () if layout.has_shared_blobs or layout.is_flat else own
    with store_errors(layout.path, "read"):
        for prefix, descriptor, directory in (("", layout._root, "blobs"), *inner):
            for name in os.listdir(descriptor):
                if layout.is_flat and is_digest(f"sha256:{name}"):
                    yield f"blobs/sha256/{name}"
                elif name != directory:
                    yield f"{prefix}{name}"


_SAYS = {
    PARTS_MEDIA_TYPE: ("bomFormat", "CycloneDX"),
    STATEMENT_MEDIA_TYPE: ("_type", "https://in-toto.io/Statement/"),
    SIGNATURE_MEDIA_TYPE: ("mediaType", SIGNATURE_MEDIA_TYPE),
}
"""The key that names the kind of a JSON document, and the beginning of its value, by media type."""


def check_content(content: bytes, media_type: str, path: str) -> None:
    """14. Check that a layer of something attached is the JSON that its media type says."""
    key, beginning = _SAYS[media_type]
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RejectError(path, f"expected JSON of {media_type}: {error}") from error
    said = found.get(key) if isinstance(found, dict) else None
    if not isinstance(said, str) or not said.startswith(beginning):
        raise RejectError(
            path, f"{key}: expected {beginning}, as {media_type} has, found {shown(said)}"
        )


def check_subject(subject: Descriptor, known: Mapping[str, Descriptor], path: str) -> None:
    """14. Check that something refers to the bundle, to a target, or to something attached, as they are."""
    found = known.get(subject.digest)
    if found is None:
        raise RejectError(
            path,
            f"expected the bundle, a target or something attached as subject, found {subject.digest}",
            hint="remove its entry from index.json and its file: it belongs to another bundle",
        )
    expected, said = ((at.mediaType, at.size) for at in (found, subject))
    if said != expected:
        raise RejectError(path, f"subject: expected {expected}, found {said}")


def check_types(manifests: Iterable[ImageManifest], attached: Collection[str], path: str) -> None:
    """15. Check that a bundle still has what its build attached to it, as the manifests of its targets say.

    `attached` has the artifact types of what is attached to the bundle.
    """
    named = {each for at in manifests for each in at.annotations.get(ATTACHED_TYPES, "").split(",")}
    if missing := sorted(named - {"", *attached}):
        raise RejectError(
            path,
            f"expected what the build attached, found no {' and no '.join(missing)}",
            hint="copy the bundle again with all that refers to it, or build it again",
        )


def check_root(content: bytes, expected: bytes, path: str) -> None:
    """16. Check that an `index.json` of ours is what our writer writes about the files behind it."""
    if content == expected:
        return
    found, wanted = json.loads(content), json.loads(expected)
    if found == wanted:
        raise RejectError(
            path,
            "expected JSON with sorted keys and without spaces, found the same JSON in other bytes",
            hint="another program has written the file: copy or fetch the bundle again",
        )
    keys = sorted(key for key in wanted | found if wanted.get(key) != found.get(key))
    if "manifests" not in keys:
        raise RejectError(path, f"expected what prejit writes, found other values of {shown(keys)}")
    entries, others = wanted["manifests"], found["manifests"]
    if twice := [each for place, each in enumerate(others) if each in others[:place]]:
        raise RejectError(path, f"expected each entry once, found {shown(twice[0])} twice")
    differ = (pair for pair in zip(entries, others, strict=False) if pair[0] != pair[1])
    one, other = next(differ, (f"{len(entries)} entries", f"{len(others)}"))
    raise RejectError(path, f"expected {shown(one)}, found {shown(other)}")


def check_names(found: Iterable[str], known: Collection[str], path: str) -> None:
    """17. Check that a layout has no file that nothing leads to: all that was found is known."""
    for name in sorted(found):
        if name not in known:
            raise RejectError(
                f"{path}/{name}",
                "expected files of the bundle alone, found another",
                hint="nothing of the bundle leads to it: remove it. The next build or `prejit sign` removes "
                "what a killed writer left",
            )


@rejecting
def check_layout_file(content: bytes, path: str) -> None:
    """16. Check that `oci-layout` has exactly the bytes that prejit writes."""
    if content != OCI_LAYOUT:
        raise ValueError(f"expected {OCI_LAYOUT!r}, found {content[:64]!r}")
