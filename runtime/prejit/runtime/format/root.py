"""`index.json` at the top of a layout: which of its entries is the bundle, and which refer to it.

    index.json -> the bundle's index -> the manifest of each target -> config, layers
               -> the same manifests, so that tools can copy one by the name of its target
               -> manifests with a `subject`: signatures, provenance, lists of parts

The bundle's name is the digest of its index. So what refers to it can be added without changing the name.
Other tools write an `index.json` of their own when they copy a bundle or a target. So it is read leniently:
prejit uses its digests alone, and checks the bytes behind them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from prejit.runtime.base.files import digest_of, is_digest
from prejit.runtime.base.typed_json import MAX_INTEGER, check_amount, parse_object, shown
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Descriptor, Index
from prejit.runtime.format.checks.oci import check_descriptor, check_index, check_layout_version
from prejit.runtime.format.layout import LayoutFiles
from prejit.runtime.format.names import ARTIFACT_TYPE, INDEX_MEDIA_TYPE, MANIFEST_MEDIA_TYPE
from prejit.runtime.records import replace

_MAX_UNNAMED_BYTES = 4 << 20
"""Maximum size of all blobs together that are read to find out whether they are prejit's."""


class Root(NamedTuple):
    """The bundle that a layout holds.

    Attributes:
        digest: the bundle's name. Of a copy of one target without the bundle's index, it is the digest of
            the target's manifest.
        bundle: the bundle's index, checked, with the targets that are here. Of a copy that lacks the index,
            it is the one that prejit would have written: of all targets, the same.
        path: the file of the index, for errors.
        subject: the descriptor that a registry has for the bundle, or for the only target of a copy. None:
            there is none, because a copy of several targets lacks the bundle's index.
        others: the entries of `index.json` that are neither the bundle nor a target. Some may refer to it.
    """

    digest: str
    bundle: Index
    path: str
    subject: Descriptor | None
    others: tuple[Descriptor, ...]


def read_root(layout: LayoutFiles) -> Root:
    """Read and check `oci-layout`, `index.json` and the bundle's index: checks 1 and 2.

    Raises:
        RejectError: a file is missing or damaged, or there is no bundle or more than one.
    """
    path = layout.file_path("index.json")
    version = layout.read("oci-layout", limits.MAX_OCI_LAYOUT_BYTES)
    content = layout.read("index.json", limits.MAX_INDEX_BYTES)
    check_amount(content, (b":",), (b"[", b"{"), path)
    check_layout_version(version, layout.file_path("oci-layout"))
    entries = _entries(parse_object(content), path)
    indexes, others = _split(layout, entries, INDEX_MEDIA_TYPE)
    if not indexes:
        return _root_of_copy(layout, others, path)
    if len(indexes) > 1:
        raise RejectError(
            path,
            f"expected one bundle, found {len(indexes)}: {', '.join(at.digest for at, _ in indexes)}",
            hint="copy each bundle into a directory of its own",
        )
    at, read = indexes[0]
    where = layout.blob_path(at.digest)
    index = check_index(read, where)
    targets = {each.digest: each for each in index.manifests}
    here, rest = set[str](), []
    for each in others:
        target = targets.get(each.digest)
        if target is None:
            if each.artifactType == ARTIFACT_TYPE:
                raise RejectError(path, f"expected targets of the bundle, found {each.digest}")
            rest.append(each)
            continue
        if (each.mediaType, each.size) != (target.mediaType, target.size):
            raise RejectError(
                path, f"{each.digest}: expected the media type and size of the bundle's index"
            )
        here.add(each.digest)
    if here:  # a pull of some targets keeps the index, which is signed
        kept = tuple(each for each in index.manifests if each.digest in here)
        index = replace(index, manifests=kept)
    return Root(at.digest, index, where, _named(at), tuple(rest))


def _root_of_copy(layout: LayoutFiles, entries: tuple[Descriptor, ...], path: str) -> Root:
    """Return the root of a copy of some targets, or of all, that lacks the bundle's index.

    skopeo writes an index of its own when it copies all, without the artifact type.
    """
    found = {at.digest: at for at in entries}
    for at in entries:
        if at.mediaType == INDEX_MEDIA_TYPE and at.size <= _cap(at):
            where = layout.blob_path(at.digest)
            for each in _entries(parse_object(_read(layout, at)), where):
                found.setdefault(each.digest, each)
    read, others = _split(layout, tuple(found.values()), MANIFEST_MEDIA_TYPE)
    targets = [at for at, _ in read]
    if not targets:
        hint = "give the directory of a bundle: what push --image wrote is an image of its files"
        raise RejectError(path, f"expected an entry of {ARTIFACT_TYPE}, found none", hint=hint)
    from prejit.runtime.format.index_writing import index_of_copy  # few copies lack the index

    content = index_of_copy(layout, targets)
    index = check_index(content, path)
    if len(targets) > 1:
        return Root(digest_of(content), index, path, None, others)
    return Root(targets[0].digest, index, path, _named(targets[0]), others)


def _named(at: Descriptor) -> Descriptor:
    """Return what names a blob, without what one tool or another writes beside it."""
    return Descriptor(at.mediaType, at.digest, at.size)


def _entries(plain: dict[str, Any], path: str) -> tuple[Descriptor, ...]:
    """Return the entries of an `index.json`, each digest once."""
    manifests = plain.get("manifests")
    if plain.get("schemaVersion") != 2 or type(manifests) is not list:
        raise RejectError(path, "expected an OCI image index")
    if not 0 < len(manifests) <= limits.MAX_ROOT_ENTRIES:
        raise RejectError(
            path, f"expected 1 to {limits.MAX_ROOT_ENTRIES} entries, found {len(manifests)}"
        )
    found: dict[str, Descriptor] = {}
    for each in manifests:
        entry = read_descriptor(each, path)
        known = entry.mediaType in (INDEX_MEDIA_TYPE, MANIFEST_MEDIA_TYPE)
        if entry.artifactType == ARTIFACT_TYPE and not known:
            raise RejectError(
                path,
                f"expected media type {INDEX_MEDIA_TYPE} or {MANIFEST_MEDIA_TYPE}, "
                f"found {shown(entry.mediaType)}",
            )
        found.setdefault(entry.digest, entry)
    return tuple(found.values())


def read_descriptor(plain: Any, path: str) -> Descriptor:
    """Return a descriptor that any tool may have written, without keys that a reader has no use for.

    Raises:
        RejectError: it lacks a media type, a sha256 digest or a size, or a value has another type.
    """
    values = plain if isinstance(plain, dict) else {}
    media_type, digest, size = (values.get(key) for key in ("mediaType", "digest", "size"))
    artifact_type, annotations = values.get("artifactType"), values.get("annotations")
    if (
        not isinstance(media_type, str)
        or not isinstance(artifact_type, str | None)
        or not isinstance(digest, str)
        or not is_digest(digest)
        or type(size) is not int
        or not 0 <= size <= MAX_INTEGER
    ):
        raise RejectError(
            path, f"expected media type, sha256 digest and size, found {shown(plain)}"
        )
    if annotations is not None:
        check_texts(annotations, path)
    return Descriptor(media_type, digest, size, artifact_type, annotations=annotations or None)


def check_texts(annotations: Any, path: str) -> None:
    """Check that annotations are text by name. Raise RejectError where they are not."""
    if not isinstance(annotations, dict) or not all(
        isinstance(value, str) for value in annotations.values()
    ):
        raise RejectError(path, f"expected annotations as text, found {shown(annotations)}")


def _split(
    layout: LayoutFiles, entries: tuple[Descriptor, ...], media_type: str
) -> tuple[list[tuple[Descriptor, bytes]], tuple[Descriptor, ...]]:
    """Return prejit's entries of a media type, with their bytes if these were read, and all others.

    The blob of an index says what it is. So no damage of its entry makes a bundle look like a copy of some
    targets. The entry of a manifest says it, or else its blob, because skopeo drops the artifact type.
    """
    unread = _MAX_UNNAMED_BYTES
    ours, others = list[tuple[Descriptor, bytes]](), []
    for at in entries:
        artifact_type, content = at.artifactType, b""
        is_large = at.size > _cap(at) and artifact_type != ARTIFACT_TYPE
        if at.mediaType != media_type or is_large:
            others.append(at)
            continue
        if media_type == INDEX_MEDIA_TYPE or artifact_type is None:
            if (unread := unread - at.size) < 0:
                raise RejectError(
                    layout.file_path("index.json"),
                    f"expected at most {_MAX_UNNAMED_BYTES} bytes of indexes and of manifests without "
                    "an artifact type, found more",
                )
            content = _read(layout, at)
            artifact_type = parse_object(content).get("artifactType")
        if ARTIFACT_TYPE in (artifact_type, at.artifactType):
            ours.append((at, content))
        else:
            others.append(at)
    return ours, tuple(others)


def _cap(at: Descriptor) -> int:
    is_index = at.mediaType == INDEX_MEDIA_TYPE
    return limits.MAX_INDEX_BYTES if is_index else limits.MAX_MANIFEST_BYTES


def _read(layout: LayoutFiles, at: Descriptor) -> bytes:
    """Return an index or a manifest, whose size and digest are checked."""
    path = layout.blob_path(at.digest)
    check_descriptor(at, at.mediaType, _cap(at), path)
    content = layout.read_blob(at)
    check_amount(content, (b":",), (b"[", b"{"), path)
    return content
