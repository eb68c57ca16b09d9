"""Write `index.json` and the index of a bundle, and keep other writers away meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import from_json, parse_object, to_json
from prejit.runtime.base.written_files import locking
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Config, Descriptor, Index
from prejit.runtime.format.checks.oci import check_descriptor, check_manifest
from prejit.runtime.format.layout import LayoutFiles
from prejit.runtime.format.names import (
    ARTIFACT_TYPE,
    BUNDLE_FORMAT,
    BUNDLE_NAME,
    FORMAT_VERSION,
    INDEX_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    REF_NAME,
    REQUIREMENT,
)
from prejit.runtime.records import replace


def stranger(path: Path) -> str:
    """Return a name in a directory that a bundle's writer, which may have been killed, does not leave there.

    Writers write `index.json` last. Empty: the directory has nothing else, or is none.
    """
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return ""
    ours = ("blobs", "oci-layout", "lost+found")  # the last one is of a new file system
    return next((name for name in names if name not in ours and name[0] != "."), "")


def is_ours(content: bytes) -> bool:
    """Return whether prejit wrote an `index.json`: its keys are sorted, and other tools begin otherwise."""
    return next(iter(parse_object(content)), "") == "manifests"


def index_of_copy(layout: LayoutFiles, manifests: Sequence[Descriptor]) -> bytes:
    """Return the bundle's index that prejit would have written for the targets of a copy of another OCI tool.

    Such a tool (skopeo, oras) copies manifest, config and layers of a target byte for byte, and lists the
    manifest in an `index.json` of its own. The config repeats the target's entry of the bundle's index: from
    these it is made.

    Raises:
        RejectError: a file is damaged, or they are not targets of one bundle.
    """
    where = layout.file_path("index.json")
    if len(manifests) > limits.MAX_TARGETS:
        raise RejectError(
            where, f"expected at most {limits.MAX_TARGETS} targets, found {len(manifests)}"
        )
    descriptors, found = [], set[tuple[str, int]]()
    for at in manifests:
        check_descriptor(at, MANIFEST_MEDIA_TYPE, limits.MAX_MANIFEST_BYTES, where)
        table = check_manifest(layout.read_blob(at), layout.blob_path(at.digest)).config
        config = from_json(Config, layout.read_blob(table), layout.blob_path(table.digest))
        found.add((config.bundle, config.format))
        annotations = {
            REF_NAME: config.target,
            REQUIREMENT: to_json(config.requirement).decode("ascii"),
        }
        platform = oci_platform(config.requirement.architecture)
        descriptors.append(
            replace(at, artifactType=ARTIFACT_TYPE, platform=platform, annotations=annotations)
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


def encode_index(
    name: str, manifests: tuple[Descriptor, ...], written: int = FORMAT_VERSION
) -> bytes:
    """Return the bytes of a bundle's index."""
    annotations = {BUNDLE_NAME: name, BUNDLE_FORMAT: str(written)}
    return to_json(Index(2, INDEX_MEDIA_TYPE, ARTIFACT_TYPE, manifests, annotations))


def encode_root(index: Index, content: bytes, others: Iterable[Descriptor]) -> bytes:
    """Return the bytes of the `index.json` of a bundle with all its targets.

    `content` has the bytes of `index`; `others` refer to the bundle or its targets.
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
    annotations = None if name == bundle else {REF_NAME: name}
    return replace(target, artifactType=ARTIFACT_TYPE, annotations=annotations)


def oci_platform(architecture: str) -> dict[str, str]:
    """Return the platform of a target's descriptor, in OCI's words.

    Args:
        architecture: the architecture of the target, as `uname -m` names it.
    """
    names = {"x86_64": "amd64", "aarch64": "arm64"}
    return {"architecture": names.get(architecture, architecture), "os": "linux"}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep writers away from a bundle. Where the disk fails, raise StoreError."""
    try:
        while True:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with locking(descriptor):
                # Another directory may have been renamed to this path while this one waited for the lock.
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    yield
                    return
    except OSError as error:  # its text names the file
        raise StoreError(f"{path}: cannot write a bundle: {error}") from error
