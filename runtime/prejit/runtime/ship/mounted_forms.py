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
from dataclasses import dataclass

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
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)


class FormFiles:
    """Implements `repository.BlobSource` for a form: a bundle's blobs, tars of some, and new small files."""

    def __init__(
        self, files: BundleFiles, small: Mapping[str, bytes], tars: Mapping[str, _BlobTar]
    ) -> None:
        """Read nothing yet. `small` and `tars` are by digest."""
        self._files, self._small, self._tars = files, small, tars

    def pieces(self, at: Descriptor, start: int) -> Iterator[bytes | memoryview]:
        """See `BlobSource.pieces`."""
        if (content := self._small.get(at.digest)) is not None:
            yield content[start:]
        elif (tar := self._tars.get(at.digest)) is not None:
            yield from tar.pieces(self._files, start)
        else:
            yield from self._files.pieces(at, start)


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
    with ThreadPoolExecutor(MOST_TRANSFERS, "prejit-layers") as pool:
        layers = dict(
            zip(
                (at.digest for at in own), pool.map(_layer_of, own, [files] * len(own)), strict=True
            )
        )
    small, documents, listed = dict[str, bytes](), [], []
    moved = {at.digest: at for at, _ in layers.values()}
    for shipment, (target, *_) in zip(shipments, platforms.values(), strict=True):
        contents = {"oci-layout": OCI_LAYOUT, "index.json": shipment.index_file}
        contents |= {_blob_name(each.at): each.content for each in shipment.documents}
        contents |= {
            _blob_name(at): files.read_blob(at) for at in shipment.blobs if at.digest not in layers
        }
        names = {at.digest for at in shipment.blobs}
        stack = [at for digest, (at, _) in layers.items() if digest in names]
        stack.append(_kept(_tar_of(contents), _LAYER_MEDIA_TYPE, small))
        config = {
            **(target.platform or {}),
            "config": {},
            # Tools that put layers on top, such as olot, count these.
            "history": [{"created_by": "prejit push --image"}] * len(stack),
            "rootfs": {"type": "layers", "diff_ids": [at.digest for at in stack]},
        }
        described = _kept(to_json(config), _CONFIG_MEDIA_TYPE, small)
        moved |= {at.digest: at for at in (described, *stack)}
        document = _document({"config": described, "layers": stack}, MANIFEST_MEDIA_TYPE)
        documents.append(document)
        listed.append(Descriptor(*_named(document), platform=target.platform))
    if len(listed) > 1:
        documents.append(_document({"manifests": listed}, INDEX_MEDIA_TYPE))
    tars = {at.digest: tar for at, tar in layers.values()}
    return FormFiles(files, small, tars), _shipment(root, documents, moved)


def _modelpack(
    files: BundleFiles, root: Root, targets: Sequence[Descriptor]
) -> tuple[BlobSource, Shipment]:
    shipment, small = shipment_of(files, root, targets), dict[str, bytes]()
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
        add(_kept(content, "", small), name, "weight.config")
    config = {
        "config": {"format": "prejit"},
        "descriptor": {"name": root.bundle.annotations[BUNDLE_NAME]},
        "modelfs": {"type": "layers", "diffIds": [at.digest for at in layers]},
    }
    described = _kept(to_json(config), f"{_MODEL}.config.v1+json", small)
    parts = {
        "artifactType": f"{_MODEL}.manifest.v1+json",
        "config": described,
        "layers": layers,
    }
    moved = {at.digest: at for at in (described, *layers)}
    document = _document(parts, MANIFEST_MEDIA_TYPE)
    return FormFiles(files, small, {}), _shipment(root, [document], moved)


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


def _kept(content: bytes, media_type: str, small: dict[str, bytes]) -> Descriptor:
    at = Descriptor(media_type, digest_of(content), len(content))
    small[at.digest] = content
    return at


# ------------------------------------------------------------------ tars


@dataclass(frozen=True, slots=True)
class _BlobTar:
    """A tar of one blob: what stands before it, the blob, and zeros."""

    head: bytes
    blob: Descriptor

    @property
    def tail(self) -> bytes:
        return bytes(-self.blob.size % _BLOCK) + _END

    def pieces(self, source: BlobSource, start: int) -> Iterator[bytes | memoryview]:
        """Yield its bytes from a place on, as `Pieces`."""
        if start < len(self.head):
            yield self.head[start:]
        start = max(0, start - len(self.head))
        if start < self.blob.size:
            yield from source.pieces(self.blob, start)
        yield self.tail[max(0, start - self.blob.size) :]


def _layer_of(at: Descriptor, files: BundleFiles) -> tuple[Descriptor, _BlobTar]:
    """Return the layer of a blob. Raise RejectError where the blob has another digest."""
    tar = _BlobTar(_directories() + _head(_blob_name(at), at.size), at)
    hasher = hashlib.sha256(tar.head)
    for piece in checked(at, files.pieces(at, 0), files.blob_path(at.digest)):
        hasher.update(piece)
    hasher.update(tar.tail)
    size = len(tar.head) + at.size + len(tar.tail)
    return Descriptor(_LAYER_MEDIA_TYPE, f"sha256:{hasher.hexdigest()}", size), tar


def _tar_of(contents: Mapping[str, bytes]) -> bytes:
    """Return a tar of some small files, in the order of their names."""
    members = [
        _head(name, len(content)) + content + bytes(-len(content) % _BLOCK)
        for name, content in sorted(contents.items())
    ]
    return b"".join((_directories(), *members, _END))


def _blob_name(at: Descriptor) -> str:
    return f"blobs/sha256/{at.digest.removeprefix('sha256:')}"


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
