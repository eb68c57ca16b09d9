"""A bundle in the forms that platforms mount: an OCI image, and an artifact of titled files.

Image: a manifest for each platform, whose layers are uncompressed tars of one blob each. The tar of a blob
depends on the blob alone, so the weights' layer has the same digest in every version and every image.

    /models/oci-layout, index.json, blobs/sha256/<hex>     as KServe expects a model in an image

Artifact: one manifest as CNCF ModelPack has it (github.com/modelpack/model-spec), whose layers are the
bundle's own blobs. CRI-O, podman and `oras pull` put them side by side in one directory. `Layout` reads it.

    oci-layout, index.json, <hex>
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.names import (
    BUNDLE_NAME,
    INDEX_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    OCI_LAYOUT,
    REF_NAME,
    TITLE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.root import Root
from prejit.runtime.ship.repository import (
    MOST_TRANSFERS,
    BlobSource,
    BundleDocument,
    BundleFiles,
    Shipment,
    blob_name,
    checked,
    shipment_of,
)

IMAGE, MODELPACK = "image", "modelpack"
_MODELS = "models"
_CONFIG_MEDIA_TYPE = "application/vnd.oci.image.config.v1+json"
_LAYER_MEDIA_TYPE = "application/vnd.oci.image.layer.v1.tar"
_MODEL = "application/vnd.cncf.model"
_FILE_PATH = "org.cncf.model.filepath"
_OWN_LAYER_BYTES = 64 << 10
"""Smaller blobs share a layer with `index.json`: a layer costs a request, and a directory of the mount."""
_MOST_LAYERS = 100
"""Docker and overlayfs take some 125 layers. The smallest blobs beyond this many share one, too."""


class FormFiles:
    """Implements `repository.BlobSource` for a form: a bundle's blobs, and new ones that hold such blobs."""

    def __init__(self, files: BundleFiles) -> None:
        """`files` has the bundle's blobs."""
        self._files = files
        self._parts: dict[str, tuple[bytes | Descriptor, ...]] = {}

    def add(self, media_type: str, *parts: bytes | Descriptor) -> Descriptor:
        """Return the descriptor of a new blob. Its parts are read for it, and not kept.

        Raises:
            RejectError: a part that is a blob has another digest.
        """
        hasher, size = hashlib.sha256(), 0
        for part in parts:
            pieces = self._part(part, 0)
            if isinstance(part, Descriptor):
                pieces = checked(part, pieces, self._files.blob_path(part.digest))
            for piece in pieces:
                hasher.update(piece)
            size += _size_of(part)
        digest = f"sha256:{hasher.hexdigest()}"
        self._parts[digest] = parts
        return Descriptor(media_type, digest, size)

    def pieces(self, at: Descriptor, start: int) -> Iterator[bytes | memoryview]:
        """See `BlobSource.pieces`."""
        for part in self._parts.get(at.digest, (at,)):
            if start < _size_of(part):
                yield from self._part(part, start)
            start = max(0, start - _size_of(part))

    def _part(self, part: bytes | Descriptor, start: int) -> Iterator[bytes | memoryview]:
        if isinstance(part, bytes):
            yield part[start:]
        else:
            yield from self._files.pieces(part, start)


def _size_of(part: bytes | Descriptor) -> int:
    return len(part) if isinstance(part, bytes) else part.size


def form_of(
    form: str, files: BundleFiles, root: Root, targets: Sequence[Descriptor]
) -> tuple[BlobSource, Shipment]:
    """Return what moves of some targets of a bundle in a form, `IMAGE` or `MODELPACK`, and what reads it.

    Raises:
        RejectError: a file is damaged. An image's layers are hashed here, with the blobs in them.
        StoreError: a file cannot be read.
    """
    return (_image if form == IMAGE else _modelpack)(files, root, targets)


def _image(
    files: BundleFiles, root: Root, targets: Sequence[Descriptor]
) -> tuple[BlobSource, Shipment]:
    platforms = dict[bytes, list[Descriptor]]()
    for target in targets:
        platforms.setdefault(to_json(target.platform), []).append(target)
    shipments = [shipment_of(files, root, some) for some in platforms.values()]
    blobs = {at.digest: at for each in shipments for at in each.blobs}
    ordered = sorted(blobs.values(), key=lambda at: (-at.size, at.digest))
    own = [at for at in ordered[:_MOST_LAYERS] if at.size >= _OWN_LAYER_BYTES]
    # Weights first: what nodes have unpacked is theirs again only below the first layer that differs.
    own.sort(key=lambda at: at.mediaType != WEIGHTS_MEDIA_TYPE)
    form, documents, listed = FormFiles(files), list[BundleDocument](), []

    def layer_of(contents: Mapping[str, bytes | Descriptor]) -> Descriptor:
        return form.add(_LAYER_MEDIA_TYPE, *_tar_of(contents))

    with ThreadPoolExecutor(MOST_TRANSFERS, "prejit-layers") as pool:
        made = pool.map(layer_of, ({blob_name(at.digest): at} for at in own))
        layers = {at.digest: layer for at, layer in zip(own, made, strict=True)}
    moved = dict[str, Descriptor]()
    for shipment, (target, *_) in zip(shipments, platforms.values(), strict=True):
        rest: dict[str, bytes | Descriptor] = {
            "oci-layout": OCI_LAYOUT,
            "index.json": shipment.index_file,
            **{blob_name(each.at.digest): each.content for each in shipment.documents},
            **{blob_name(at.digest): at for at in shipment.blobs if at.digest not in layers},
        }
        names = {at.digest for at in shipment.blobs}
        stack = [layer for digest, layer in layers.items() if digest in names]
        stack.append(layer_of(rest))
        config = {
            **(target.platform or {}),
            "config": {},
            # Tools that put layers on top, such as olot, count these.
            "history": [{"created_by": "prejit push --image"}] * len(stack),
            "rootfs": {"type": "layers", "diff_ids": [at.digest for at in stack]},
        }
        described = form.add(_CONFIG_MEDIA_TYPE, to_json(config))
        moved |= {at.digest: at for at in (described, *stack)}
        document = _document({"config": described, "layers": stack}, MANIFEST_MEDIA_TYPE)
        documents.append(document)
        listed.append(Descriptor(*_named(document), platform=target.platform))
    if len(listed) > 1:
        documents.append(_document({"manifests": listed}, INDEX_MEDIA_TYPE))
    return form, _shipment(root, documents, moved)


def _modelpack(
    files: BundleFiles, root: Root, targets: Sequence[Descriptor]
) -> tuple[BlobSource, Shipment]:
    shipment, form = shipment_of(files, root, targets), FormFiles(files)
    layers = list[Descriptor]()

    def add(at: Descriptor, name: str, kind: str) -> None:
        # CRI-O and podman go by the title, tools of ModelPack by the path.
        noted = {TITLE: name, _FILE_PATH: name}
        layers.append(Descriptor(f"{_MODEL}.{kind}.v1.raw", at.digest, at.size, annotations=noted))

    for at in shipment.blobs:
        kind = "weight" if at.mediaType == WEIGHTS_MEDIA_TYPE else "weight.config"
        add(at, at.digest.removeprefix("sha256:"), kind)
    contents = {each.at.digest.removeprefix("sha256:"): each.content for each in shipment.documents}
    contents |= {"index.json": shipment.index_file, "oci-layout": OCI_LAYOUT}
    for name, content in contents.items():
        add(form.add("", content), name, "weight.config")
    config = {
        "config": {"format": "prejit"},
        "descriptor": {"name": root.bundle.annotations[BUNDLE_NAME]},
        "modelfs": {"type": "layers", "diffIds": [at.digest for at in layers]},
    }
    described = form.add(f"{_MODEL}.config.v1+json", to_json(config))
    parts = {"artifactType": f"{_MODEL}.manifest.v1+json", "config": described, "layers": layers}
    moved = {at.digest: at for at in (described, *layers)}
    document = _document(parts, MANIFEST_MEDIA_TYPE)
    return form, _shipment(root, [document], moved)


def _shipment(
    root: Root, documents: Sequence[BundleDocument], blobs: Mapping[str, Descriptor]
) -> Shipment:
    """Return what moves of a form, whose last document leads to all of it."""
    noted = {REF_NAME: root.bundle.annotations[BUNDLE_NAME]}
    entry = Descriptor(*_named(documents[-1]), annotations=noted)
    index_file = to_json({"manifests": [entry], "mediaType": INDEX_MEDIA_TYPE, "schemaVersion": 2})
    return Shipment(entry.digest, tuple(documents), tuple(blobs.values()), index_file)


def _document(parts: Mapping[str, object], media_type: str) -> BundleDocument:
    content = to_json({**parts, "mediaType": media_type, "schemaVersion": 2})
    return BundleDocument(Descriptor(media_type, digest_of(content), len(content)), content)


def _named(document: BundleDocument) -> tuple[str, str, int]:
    return document.at.mediaType, document.at.digest, document.at.size


# ------------------------------------------------------------------ tars


def _tar_of(contents: Mapping[str, bytes | Descriptor]) -> list[bytes | Descriptor]:
    """Return the parts of a tar of some files, in the order of their names."""
    parts: list[bytes | Descriptor] = [_directories()]
    for name, content in sorted(contents.items()):
        size = _size_of(content)
        parts += [_head(name, size), content, bytes(-size % tarfile.BLOCKSIZE)]
    return [*parts, bytes(2 * tarfile.BLOCKSIZE)]


def _directories() -> bytes:
    """Return the headers of all directories, which every layer has. Else its unpacker chooses their modes."""
    names = ("", "/blobs", "/blobs/sha256")
    return b"".join(_header(f"{_MODELS}{name}", 0, tarfile.DIRTYPE, 0o755) for name in names)


def _head(name: str, size: int) -> bytes:
    return _header(f"{_MODELS}/{name}", size, tarfile.REGTYPE, 0o444)


def _header(name: str, size: int, kind: bytes, mode: int) -> bytes:
    """Return a header of a tar, of user 0 and time 0; of a file above 8 GiB with one of pax before it."""
    member = tarfile.TarInfo(name)
    member.size, member.type, member.mode = size, kind, mode
    return member.tobuf(tarfile.PAX_FORMAT)
