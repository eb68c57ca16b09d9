"""Open a bundle and choose its target, in a fixed order, each file checked before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prejit.runtime.base.digests import digest_of
from prejit.runtime.format import copied, limits
from prejit.runtime.format.checks.config import check_config, check_kernels_layer
from prejit.runtime.format.checks.layers import check_kernels
from prejit.runtime.format.checks.oci import (
    check_digest,
    check_index,
    check_layout_file,
    check_manifest,
    target_of,
)
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import BUNDLE_FORMAT, KERNELS_MEDIA_TYPE
from prejit.runtime.format.schema import Config, Descriptor, Index, Manifest
from prejit.runtime.machine.compare import compare, preference
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Target:
    """One target of an opened bundle.

    Attributes:
        name: of the target.
        verdict: whether its executables run on the machine that was asked about.
        descriptor: of its manifest.
        format: of the bundle, as its index says.
    """

    name: str
    verdict: Verdict
    descriptor: Descriptor
    format: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What a target's manifest leads to.

    Attributes:
        manifest: the OCI manifest.
        config: the program table.
    """

    manifest: Manifest
    config: Config


def open_index(layout: Layout) -> tuple[Index, str]:
    """Reads and checks `oci-layout` and `index.json`.

    Returns:
        The index and the bundle's digest; of a copy that another tool made, those of its targets alone.

    Raises:
        RejectError: either is missing or damaged.
    """
    path = str(layout.path / "oci-layout")
    version = layout.read("oci-layout", copied.MAX_LAYOUT_BYTES)
    content = layout.read("index.json", limits.MAX_INDEX_BYTES)
    manifests = copied.manifests_of_copy(content)
    if manifests is None or not copied.is_layout_file(version):
        check_layout_file(version, path)
    if manifests is not None:
        content = copied.index_of_copy(layout, manifests)
    index = check_index(content, str(layout.path / "index.json"))
    return index, digest_of(content)


def match(layout: Layout, index: Index, machine: Fingerprint) -> tuple[Target, ...]:
    """Every target of a bundle with its verdict, in the order of `fingerprint.preference`.

    Raises:
        RejectError: a requirement in the index is damaged.
    """
    targets = []
    for descriptor in index.manifests:
        name, needs = target_of(descriptor, str(layout.path / "index.json"))
        written = index.annotations[BUNDLE_FORMAT]
        target = Target(name, compare(name, needs, machine), descriptor, written)
        targets.append((preference(needs, machine), target))
    targets.sort(key=lambda item: item[0])
    return tuple(target for _, target in targets)


def read_manifest(layout: Layout, target: Target) -> Manifest:
    """Reads and checks a target's manifest.

    Raises:
        RejectError: it is missing or damaged.
    """
    at = target.descriptor
    content = layout.read_blob(at.digest, at.size)
    check_digest(content, at.digest, layout.blob_path(at.digest))
    return check_manifest(content, layout.blob_path(at.digest))


def read_manifests(layout: Layout, targets: Sequence[Target]) -> dict[str, Manifest]:
    """Reads and checks the manifests of targets, by name; each file once. Raises as that one."""
    read: dict[str, Manifest] = {}
    for target in targets:
        if target.descriptor.digest not in read:
            read[target.descriptor.digest] = read_manifest(layout, target)
    return {target.name: read[target.descriptor.digest] for target in targets}


def read_contents(layout: Layout, target: Target) -> Contents:
    """Reads and checks a target's manifest and config.

    Raises:
        RejectError: either is missing or damaged, or they disagree with the index.
    """
    manifest = read_manifest(layout, target)
    at = manifest.config
    content = layout.read_blob(at.digest, at.size)
    return Contents(manifest, check_config_blob(layout, target, manifest, content))


def check_config_blob(layout: Layout, target: Target, manifest: Manifest, content: bytes) -> Config:
    """Return a checked config that agrees with its descriptor in the index."""
    name, needs = target_of(target.descriptor, str(layout.path / "index.json"))
    path = layout.blob_path(manifest.config.digest)
    check_digest(content, manifest.config.digest, path)
    config = check_config(content, target.format, name, needs, path)
    check_kernels_layer(config, manifest, layout.blob_path(target.descriptor.digest))
    return config


def read_kernels(layout: Layout, config: Config, manifest: Manifest) -> bytes | None:
    """Reads and checks the library of kernels of a target; None: it has none.

    Raises:
        RejectError: it is missing or damaged.
    """
    if config.kernels is None:
        return None
    at = manifest.layer(KERNELS_MEDIA_TYPE)
    content = layout.read_blob(at.digest, at.size)
    check_kernels(content, config.kernels, layout.blob_path(at.digest))
    return content
