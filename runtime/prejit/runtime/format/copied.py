"""Layouts that another OCI tool, such as skopeo or oras, copied from a bundle.

Such a tool copies the manifest, config and layers of a target byte for byte, and writes an `index.json` of
its own. The config of a target repeats the target's entry of our index, so this module makes an index from
the configs.
"""

from __future__ import annotations

import json
from typing import Any

from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.checks.oci import check_descriptor, check_digest, check_manifest
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    ARTIFACT_TYPE,
    BUNDLE_FORMAT,
    INDEX_DIGEST,
    MANIFEST_MEDIA_TYPE,
    REF_NAME,
    REQUIREMENT,
)
from prejit.runtime.format.schema import Config, Descriptor, encode_index

MAX_LAYOUT_BYTES = 4096
"""Maximum size of an `oci-layout` that another tool wrote."""


def manifests_of_copy(content: bytes) -> list[dict[str, Any]] | None:
    """Return the descriptors of an `index.json` that another tool wrote; None: prejit wrote it.

    A damaged index of prejit is not taken for a copy, because a copy lacks two of its keys.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("artifactType") == ARTIFACT_TYPE:
        return None
    annotations = found.get("annotations")
    ours = (BUNDLE_FORMAT, INDEX_DIGEST)
    if isinstance(annotations, dict) and any(name in annotations for name in ours):
        return None
    manifests = found.get("manifests")
    if not isinstance(manifests, list) or not manifests:
        return None
    return manifests if all(isinstance(each, dict) for each in manifests) else None


def is_layout_file(content: bytes) -> bool:
    """Return whether an `oci-layout` of another tool has version 1.0.0."""
    try:
        return bool(json.loads(content)["imageLayoutVersion"] == "1.0.0")
    except (ValueError, RecursionError, LookupError, TypeError):
        return False


def index_of_copy(layout: Layout, manifests: list[dict[str, Any]]) -> bytes:
    """Return the `index.json` that prejit would have written for the targets of a copy.

    Args:
        layout: the copy.
        manifests: the descriptors in the copy's own index.

    Raises:
        RejectError: a file is damaged, or they are not targets of one bundle.
    """
    where = str(layout.path / "index.json")
    descriptors, configs = [], list[Config]()
    for each in manifests:
        digest, size = each.get("digest"), each.get("size")
        if not isinstance(digest, str) or type(size) is not int:
            raise RejectError(where, "expected a digest and a size of each manifest")
        at = Descriptor(str(each.get("mediaType")), digest, size)
        check_descriptor(at, MANIFEST_MEDIA_TYPE, limits.MAX_MANIFEST_BYTES, where)
        read = layout.read_blob(digest, size)
        check_digest(read, digest, layout.blob_path(digest))
        table = check_manifest(read, layout.blob_path(digest)).config
        path = layout.blob_path(table.digest)
        content = layout.read_blob(table.digest, table.size)
        check_digest(content, table.digest, path)
        config = from_json(Config, content, path)
        configs.append(config)
        annotations = {
            REF_NAME: config.target,
            REQUIREMENT: to_json(config.requirement).decode("ascii"),
        }
        descriptors.append(
            Descriptor(at.mediaType, digest, size, ARTIFACT_TYPE, annotations=annotations)
        )
    found = {(config.bundle, config.format) for config in configs}
    if len(found) > 1:
        names = ", ".join(sorted(f"{name} of format {number}" for name, number in found))
        raise RejectError(
            where,
            f"expected targets of one bundle, found {names}",
            hint="copy the targets of each bundle into a directory of its own",
        )
    [(name, written)] = found
    return encode_index(name, tuple(descriptors), written)
