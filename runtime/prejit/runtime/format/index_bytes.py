"""The bytes of a bundle's index, and of the `index.json` that leads to it."""

from __future__ import annotations

from collections.abc import Iterable

from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.bundle_schema import Descriptor, Index
from prejit.runtime.format.names import (
    ARTIFACT_TYPE,
    BUNDLE_FORMAT,
    BUNDLE_NAME,
    FORMAT_VERSION,
    INDEX_MEDIA_TYPE,
    REF_NAME,
)


def encode_index(
    name: str, manifests: tuple[Descriptor, ...], written: int = FORMAT_VERSION
) -> bytes:
    """Return the bytes of a bundle's index."""
    annotations = {BUNDLE_NAME: name, BUNDLE_FORMAT: str(written)}
    return to_json(Index(2, INDEX_MEDIA_TYPE, ARTIFACT_TYPE, manifests, annotations))


def encode_root(index: Index, content: bytes, others: Iterable[Descriptor]) -> bytes:
    """Return the bytes of the `index.json` of a bundle with all its targets.

    Args:
        index: the bundle's index.
        content: the bytes of the same index.
        others: what refers to the bundle or its targets.
    """
    name = index.annotations[BUNDLE_NAME]
    bundle = Descriptor(
        INDEX_MEDIA_TYPE,
        digest_of(content),
        len(content),
        ARTIFACT_TYPE,
        annotations={REF_NAME: name},
    )
    targets = [_listed(target, name) for target in index.manifests]
    return to_json(
        {
            "manifests": [bundle, *targets, *others],
            "mediaType": INDEX_MEDIA_TYPE,
            "schemaVersion": 2,
        }
    )


def _listed(target: Descriptor, bundle: str) -> Descriptor:
    """Return a target's entry of `index.json`. Tools copy it by its name, unless the bundle has the same."""
    name = (target.annotations or {}).get(REF_NAME, bundle)
    return Descriptor(
        target.mediaType,
        target.digest,
        target.size,
        ARTIFACT_TYPE,
        target.platform,
        None if name == bundle else {REF_NAME: name},
    )
