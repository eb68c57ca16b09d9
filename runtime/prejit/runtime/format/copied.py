"""Copies of some targets of a bundle that another OCI tool, such as skopeo or oras, made without its index.

Such a tool copies the manifest, config and layers of a target byte for byte, and lists the manifest in an
`index.json` of its own. The config of a target repeats the target's entry of the bundle's index, so this
module makes an index from the configs.
"""

from __future__ import annotations

from collections.abc import Sequence

from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Config, Descriptor
from prejit.runtime.format.checks.oci import check_descriptor, check_digest, check_manifest
from prejit.runtime.format.index_bytes import encode_index
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    ARTIFACT_TYPE,
    MANIFEST_MEDIA_TYPE,
    REF_NAME,
    REQUIREMENT,
    oci_platform,
)


def index_of_copy(layout: Layout, manifests: Sequence[Descriptor]) -> bytes:
    """Return the bundle's index that prejit would have written for the targets of a copy.

    Args:
        layout: the copy.
        manifests: the descriptors of the targets' manifests.

    Raises:
        RejectError: a file is damaged, or they are not targets of one bundle.
    """
    where = str(layout.path / "index.json")
    if len(manifests) > limits.MAX_TARGETS:
        raise RejectError(
            where, f"expected at most {limits.MAX_TARGETS} targets, found {len(manifests)}"
        )
    descriptors, found = [], set[tuple[str, int]]()
    for at in manifests:
        check_descriptor(at, MANIFEST_MEDIA_TYPE, limits.MAX_MANIFEST_BYTES, where)
        read = layout.read_blob(at.digest, at.size)
        check_digest(read, at.digest, layout.blob_path(at.digest))
        table = check_manifest(read, layout.blob_path(at.digest)).config
        path = layout.blob_path(table.digest)
        content = layout.read_blob(table.digest, table.size)
        check_digest(content, table.digest, path)
        config = from_json(Config, content, path)
        found.add((config.bundle, config.format))
        annotations = {
            REF_NAME: config.target,
            REQUIREMENT: to_json(config.requirement).decode("ascii"),
        }
        descriptors.append(
            Descriptor(
                at.mediaType,
                at.digest,
                at.size,
                ARTIFACT_TYPE,
                oci_platform(config.requirement.architecture),
                annotations,
            )
        )
    if len(found) > 1:
        names = ", ".join(sorted(f"{name} of format {number}" for name, number in found))
        raise RejectError(
            where,
            f"expected targets of one bundle, found {names}",
            hint="copy the targets of each bundle into a directory of its own",
        )
    [(name, written)] = found
    return encode_index(name, tuple(descriptors), written)
