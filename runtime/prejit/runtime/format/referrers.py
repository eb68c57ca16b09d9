"""Read the manifests that refer to a bundle or to one of its targets: signatures, provenance, lists of parts.

Each is an OCI manifest with a `subject`, which `index.json` lists beside the bundle. A load reads none of
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prejit.runtime.base.typed_json import shown
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.checks.oci import check_manifest
from prejit.runtime.format.layout import LayoutFiles
from prejit.runtime.format.names import MANIFEST_MEDIA_TYPE, REF_NAME
from prejit.runtime.format.root import Root, check_texts, read_descriptor

ATTACHED = "attached-"
"""The names of what is attached begin so, in `index.json`. The first digits of its digest follow."""


@dataclass(frozen=True, slots=True)
class Referrer:
    """A manifest that refers to another.

    Attributes:
        descriptor, subject: of this manifest, and of the manifest or index that it refers to.
        artifact_type: what it is: its artifact type, or the media type of its config if it has none.
        config, layers: their descriptors; the reader must check the bytes of the layers.
        annotations: its annotations.
    """

    descriptor: Descriptor
    subject: Descriptor
    artifact_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str]

    @property
    def entry(self) -> Descriptor:
        """Its entry of `index.json`, as our writer writes it."""
        return attached_entry(self.descriptor.digest, self.descriptor.size, self.artifact_type)


def attached_entry(digest: str, size: int, artifact_type: str) -> Descriptor:
    """Return the entry of `index.json` of a manifest that refers to another."""
    noted = {REF_NAME: f"{ATTACHED}{digest[7:19]}"}
    return Descriptor(MANIFEST_MEDIA_TYPE, digest, size, artifact_type, annotations=noted)


def referrers(layout: LayoutFiles, root: Root, digest: str | None = None) -> tuple[Referrer, ...]:
    """Return what refers to a digest (None: to anything), in the order of `index.json`.

    Raises:
        RejectError: a manifest that `index.json` lists is missing or damaged. Manifests of more than 64 KiB
            are passed over, as are entries of other media types.
    """
    found = []
    for at, plain, path in _manifests(layout, root):
        if plain.get("subject") is not None:
            referrer = _referrer(at, plain, path)
            if digest in (None, referrer.subject.digest):
                found.append(referrer)
    return tuple(found)


def unattached(layout: LayoutFiles, root: Root) -> Iterator[Descriptor]:
    """Yield the configs and layers of manifests without a subject, such as signatures of older cosigns."""
    for _, plain, path in _manifests(layout, root):
        layers = plain.get("layers")
        if plain.get("subject") is None and type(layers) is list:
            yield from (read_descriptor(each, path) for each in (plain.get("config"), *layers))


def _manifests(layout: LayoutFiles, root: Root) -> Iterator[tuple[Descriptor, dict[str, Any], str]]:
    """Yield the manifests that `index.json` lists beside the bundle, each with its entry and its path."""
    for at in root.others:
        if at.mediaType != MANIFEST_MEDIA_TYPE or at.size > limits.MAX_MANIFEST_BYTES:
            continue
        path = layout.blob_path(at.digest)
        try:
            plain: Any = json.loads(layout.read_blob(at))
        except (ValueError, RecursionError) as error:
            raise RejectError(path, f"expected JSON: {error}") from error
        if not isinstance(plain, dict):
            raise RejectError(path, f"expected a manifest, found {shown(plain)}")
        yield at, plain, path


def reached(layout: LayoutFiles, root: Root) -> set[str]:
    """Return the digests of all blobs that `index.json` leads to. Raises RejectError as `referrers`."""
    found = {at.digest for at in (*root.bundle.manifests, *root.others)}
    if root.subject is not None:
        found.add(root.digest)
    for at in root.bundle.manifests:
        manifest = check_manifest(layout.read_blob(at), layout.blob_path(at.digest))
        found |= {each.digest for each in (manifest.config, *manifest.layers)}
    for referrer in referrers(layout, root):
        found |= {each.digest for each in (referrer.config, *referrer.layers)}
    return found | {each.digest for each in unattached(layout, root)}


def _referrer(at: Descriptor, plain: dict[str, Any], path: str) -> Referrer:
    """Return what a manifest refers to."""
    subject, config = (read_descriptor(plain.get(key), path) for key in ("subject", "config"))
    layers, annotations = plain.get("layers"), plain.get("annotations") or {}
    artifact_type = plain.get("artifactType") or config.mediaType
    if type(layers) is not list or not isinstance(artifact_type, str):
        raise RejectError(path, f"expected a manifest with layers, found {shown(plain)}")
    check_texts(annotations, path)
    return Referrer(
        at,
        subject,
        artifact_type,
        config,
        tuple(read_descriptor(layer, path) for layer in layers),
        annotations,
    )
