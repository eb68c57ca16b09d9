"""Checks of the files that OCI defines: `oci-layout`, indexes, manifests and their descriptors.

Each check raises RejectError, which names the file at fault.
"""

from __future__ import annotations

import json
import re

from prejit.runtime.base.files import digest_of, is_digest
from prejit.runtime.base.typed_json import from_json
from prejit.runtime.errors import RejectError, rejecting
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Descriptor, ImageManifest, Index
from prejit.runtime.format.names import (
    ARTIFACT_TYPE,
    BUNDLE_FORMAT,
    BUNDLE_NAME,
    CHAT_MEDIA_TYPE,
    CONFIG_MEDIA_TYPE,
    EXECUTABLES_MEDIA_TYPE,
    FORMAT_VERSION,
    GENERATION_MEDIA_TYPE,
    INDEX_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
    LAYER_MEDIA_TYPES,
    LIBRARY_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    OCI_LAYOUT,
    PORTABLE_MEDIA_TYPE,
    RECORDED_MEDIA_TYPE,
    REF_NAME,
    REQUIREMENT,
    TOKENIZER_MEDIA_TYPE,
)
from prejit.runtime.machine.fingerprint import Requirement

NEWER_FORMAT_HINT = "this bundle was written by a newer prejit: upgrade prejit on this machine"
"""The hint for a bundle of a format that did not exist when this version was released."""

_LAYER_CAPS = {
    CHAT_MEDIA_TYPE: limits.MAX_CHAT_BYTES,
    GENERATION_MEDIA_TYPE: limits.MAX_GENERATION_BYTES,
    KERNELS_MEDIA_TYPE: limits.MAX_KERNELS_BYTES,
    LIBRARY_MEDIA_TYPE: limits.MAX_LIBRARY_BYTES,
    TOKENIZER_MEDIA_TYPE: limits.MAX_TOKENIZER_BYTES,
}
"""Maximum sizes of the layers that are read whole, by media type."""


@rejecting
def check_layout_version(content: bytes, path: str) -> None:
    """1. Check that `oci-layout` has the version of OCI layouts; other tools write it with other spaces."""
    try:
        is_known = bool(json.loads(content)["imageLayoutVersion"] == "1.0.0")
    except (ValueError, RecursionError, LookupError, TypeError):
        is_known = False
    if not is_known:
        raise ValueError(f"expected {OCI_LAYOUT!r}, found {content[:64]!r}")


@rejecting
def check_index(content: bytes, path: str) -> Index:
    """2. Check that a bundle's index is canonical, of the format that prejit reads, and lists targets.

    Whoever reads it checks the digest of its blob before.
    """
    written = _format_of(content)
    if written is not None and written != str(FORMAT_VERSION):
        newer = re.fullmatch("[1-9][0-9]{0,8}", written) and int(written) > FORMAT_VERSION
        raise RejectError(
            path,
            f"expected bundle format {FORMAT_VERSION}, found {written!r:.80}",
            hint=NEWER_FORMAT_HINT if newer else None,
        )
    index = from_json(Index, content, path)
    if written is None:
        raise ValueError(f"expected {BUNDLE_FORMAT} in the annotations, found none")
    if (index.schemaVersion, index.mediaType, index.artifactType) != (
        2,
        INDEX_MEDIA_TYPE,
        ARTIFACT_TYPE,
    ):
        raise ValueError(f"expected an OCI image index of {ARTIFACT_TYPE}")
    if not index.annotations.get(BUNDLE_NAME):
        raise ValueError(f"expected {BUNDLE_NAME} in the annotations, found none")
    if not 0 < len(index.manifests) <= limits.MAX_TARGETS:
        raise ValueError(
            f"expected at least one target and at most {limits.MAX_TARGETS}, "
            f"found {len(index.manifests)}"
        )
    for descriptor in index.manifests:
        check_descriptor(descriptor, MANIFEST_MEDIA_TYPE, limits.MAX_MANIFEST_BYTES, path)
    names = [(descriptor.annotations or {}).get(REF_NAME) for descriptor in index.manifests]
    if len(set(names)) != len(names):
        raise ValueError("expected each target once")
    return index


def _format_of(content: bytes) -> str | None:
    """Return the format that an index names, even if its other keys are those of a newer format."""
    try:
        found = json.loads(content)["annotations"][BUNDLE_FORMAT]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


@rejecting
def target_of(descriptor: Descriptor, path: str) -> tuple[str, Requirement]:
    """3. Return a target's name and requirement, from its descriptor in the index."""
    annotations = descriptor.annotations or {}
    name = annotations.get(REF_NAME)
    requirement = annotations.get(REQUIREMENT)
    if not name or requirement is None:
        raise ValueError(f"expected {REF_NAME} and {REQUIREMENT} on each target")
    # Text that is not ASCII is not canonical either.
    encoded = requirement.encode("ascii", "replace")
    return name, from_json(Requirement, encoded, path)


@rejecting
def check_descriptor(descriptor: Descriptor, media_type: str, max_bytes: int, path: str) -> None:
    """4. Check that a descriptor has a sha256 digest, the expected media type and an allowed size."""
    if descriptor.mediaType != media_type:
        raise ValueError(f"expected media type {media_type}, found {descriptor.mediaType}")
    if not is_digest(descriptor.digest):
        raise ValueError(f"expected a sha256 digest, found {descriptor.digest!r:.80}")
    if not 0 <= descriptor.size <= max_bytes:
        raise ValueError(f"expected at most {max_bytes} bytes, found {descriptor.size}")


@rejecting
def check_digest(content: bytes | memoryview, digest: str, path: str) -> None:
    """5 and 8. Check that the digest of a blob's bytes is the expected one."""
    found = digest_of(content)
    if found != digest:
        raise ValueError(f"expected {digest}, found {found}")


@rejecting
def check_manifest(content: bytes, path: str) -> ImageManifest:
    """6. Check that a manifest is canonical and has known layers, and those that it must have.

    Each is there once, but for libraries of the user. It must have executables and portable programs, or
    recorded files alone.
    """
    manifest = from_json(ImageManifest, content, path)
    if (manifest.schemaVersion, manifest.mediaType, manifest.artifactType) != (
        2,
        MANIFEST_MEDIA_TYPE,
        ARTIFACT_TYPE,
    ):
        raise ValueError(f"expected an OCI image manifest of {ARTIFACT_TYPE}")
    check_descriptor(manifest.config, CONFIG_MEDIA_TYPE, limits.MAX_CONFIG_BYTES, path)
    media_types = [layer.mediaType for layer in manifest.layers]
    for layer in manifest.layers:
        repeated = media_types.count(layer.mediaType) > 1 and layer.mediaType != LIBRARY_MEDIA_TYPE
        if layer.mediaType not in LAYER_MEDIA_TYPES or repeated:
            raise ValueError(f"unexpected layer {layer.mediaType}")
        cap = _LAYER_CAPS.get(layer.mediaType, 1 << 50)
        check_descriptor(layer, layer.mediaType, cap, path)
    if RECORDED_MEDIA_TYPE in media_types:
        if not {*media_types} <= {RECORDED_MEDIA_TYPE, PORTABLE_MEDIA_TYPE}:
            raise ValueError("expected no other layer beside recorded files but StableHLO")
        return manifest
    for media_type in (EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE):
        if media_type not in media_types:
            raise ValueError(f"expected a layer {media_type}, found none")
    return manifest
