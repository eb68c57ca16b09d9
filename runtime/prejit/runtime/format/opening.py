"""Open a bundle, choose its target and read what it holds: each file is checked before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prejit.runtime.errors import RejectError
from prejit.runtime.format.bundle_schema import Config, Descriptor, ImageManifest
from prejit.runtime.format.checks.oci import check_digest, check_manifest, target_of
from prejit.runtime.format.checks.program_table import (
    check_chunks_layers,
    check_config,
    check_kernels_layer,
    check_packs,
)
from prejit.runtime.format.layout import LayoutFiles
from prejit.runtime.format.names import BUNDLE_NAME, LIBRARY_MEDIA_TYPE, RECORDED_MEDIA_TYPE
from prejit.runtime.format.root import Root
from prejit.runtime.machine.compare import compare, preference
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.verdict import Verdict


class OpenTarget(NamedTuple):
    """One target of an opened bundle: what its executables need of a machine, and the comparison with one.

    `descriptor` is that of its manifest, `bundle` the bundle's name, as its index has it.
    """

    name: str
    requirement: Requirement
    verdict: Verdict
    descriptor: Descriptor
    bundle: str


def match(root: Root, machine: Fingerprint) -> tuple[OpenTarget, ...]:
    """Return every target of a bundle with its verdict, in the order of `compare.preference`: check 3."""
    bundle = root.bundle.annotations[BUNDLE_NAME]
    targets = []
    for descriptor in root.bundle.manifests:
        name, needs = target_of(descriptor, root.path)
        verdict = compare(name, needs, machine)
        target = OpenTarget(name, needs, verdict, descriptor, bundle)
        targets.append((preference(needs, machine), target))
    targets.sort(key=lambda item: item[0])
    return tuple(target for _, target in targets)


def read_manifest(layout: LayoutFiles, target: OpenTarget) -> ImageManifest:
    """Read and check a target's manifest: checks 5 and 6."""
    at = target.descriptor
    return check_manifest(layout.read_blob(at), layout.blob_path(at.digest))


def read_manifests(layout: LayoutFiles, targets: Sequence[OpenTarget]) -> dict[str, ImageManifest]:
    """Read and check the manifests of targets, each file once. Return them by the target's name."""
    read: dict[str, ImageManifest] = {}
    for target in targets:
        if target.descriptor.digest not in read:
            read[target.descriptor.digest] = read_manifest(layout, target)
    return {target.name: read[target.descriptor.digest] for target in targets}


def check_config_blob(
    layout: LayoutFiles, target: OpenTarget, manifest: ImageManifest, content: bytes
) -> Config:
    """Check that a config is what its digest names and agrees with the index: checks 5 and 7."""
    path = layout.blob_path(manifest.config.digest)
    check_digest(content, manifest.config.digest, path)
    config = check_config(content, target.name, target.requirement, path)
    if config.bundle != target.bundle:
        raise RejectError(
            path,
            f"expected bundle {target.bundle!r:.80}, as the index, found {config.bundle!r:.80}",
        )
    check_kernels_layer(config, manifest, layout.blob_path(target.descriptor.digest))
    if config.libraries or any(at.mediaType == LIBRARY_MEDIA_TYPE for at in manifest.layers):
        from prejit.runtime.format.checks.seldom_parts import check_library_layers

        check_library_layers(config, manifest, layout.blob_path(target.descriptor.digest))
    if config.recorded is not None or manifest.has_layer(RECORDED_MEDIA_TYPE):
        from prejit.runtime.format.checks.seldom_parts import check_recorded_layer

        check_recorded_layer(config, manifest, path)
    check_chunks_layers(config, manifest, path)
    check_packs(config, manifest, path)
    return config


class Contents(NamedTuple):
    """The manifest of a target, and its config: the program table."""

    manifest: ImageManifest
    config: Config


def read_contents(layout: LayoutFiles, target: OpenTarget) -> Contents:
    """Read and check a target's manifest and config: checks 5 to 7."""
    manifest = read_manifest(layout, target)
    content = layout.read_blob(manifest.config)
    return Contents(manifest, check_config_blob(layout, target, manifest, content))
