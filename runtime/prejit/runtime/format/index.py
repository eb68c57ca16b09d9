"""The index of a bundle, in canonical bytes."""

from __future__ import annotations

from prejit.runtime.base.digests import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.names import (
    ARTIFACT_TYPE,
    BUNDLE_FORMAT,
    BUNDLE_NAME,
    FORMAT_VERSION,
    INDEX_DIGEST,
    INDEX_MEDIA_TYPE,
)
from prejit.runtime.format.schema import Descriptor, Index


def encode_index(
    name: str, manifests: tuple[Descriptor, ...], written: int = FORMAT_VERSION
) -> bytes:
    """`index.json` of a bundle. It carries a digest of itself, so that a changed byte is noticed.

    The digest is that of the same index without its `dev.prejit.index-digest` annotation. It guards
    against damage, not against forgery: for that, sign the bundle's digest.
    """
    annotations = {BUNDLE_NAME: name, BUNDLE_FORMAT: str(written)}
    index = Index(2, INDEX_MEDIA_TYPE, ARTIFACT_TYPE, manifests, annotations)
    sealed = {**annotations, INDEX_DIGEST: digest_of(to_json(index))}
    return to_json(Index(2, INDEX_MEDIA_TYPE, ARTIFACT_TYPE, manifests, sealed))


def index_digest(index: Index) -> str:
    """What an index's `dev.prejit.index-digest` annotation must say."""
    open_annotations = {k: v for k, v in index.annotations.items() if k != INDEX_DIGEST}
    return digest_of(
        to_json(
            Index(
                index.schemaVersion,
                index.mediaType,
                index.artifactType,
                index.manifests,
                open_annotations,
            )
        )
    )
