"""Manifest, config and native code of a target, for those who read bundles and load none."""

from __future__ import annotations

from dataclasses import dataclass

from prejit.runtime.format.bundle_schema import Config, ImageManifest
from prejit.runtime.format.checks.layers import check_kernels
from prejit.runtime.format.checks.seldom_parts import check_library
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import KERNELS_MEDIA_TYPE
from prejit.runtime.format.opening import OpenTarget, check_config_blob, read_manifest


@dataclass(frozen=True, slots=True)
class Contents:
    """The manifest of a target, and its config.

    Attributes:
        manifest: the OCI manifest.
        config: the program table.
    """

    manifest: ImageManifest
    config: Config


def read_contents(layout: Layout, target: OpenTarget) -> Contents:
    """Read and check a target's manifest and config: checks 5 to 7.

    Raises:
        RejectError: either is missing or damaged, or they disagree with the index.
    """
    manifest = read_manifest(layout, target)
    at = manifest.config
    content = layout.read_blob(at.digest, at.size)
    return Contents(manifest, check_config_blob(layout, target, manifest, content))


def read_kernels(layout: Layout, config: Config, manifest: ImageManifest) -> bytes | None:
    """Read and check a target's library of kernels, for check 9; None: the target has none.

    Raises:
        RejectError: it is missing or damaged.
    """
    if config.kernels is None:
        return None
    at = manifest.layer(KERNELS_MEDIA_TYPE)
    content = layout.read_blob(at.digest, at.size)
    check_kernels(content, config.kernels, layout.blob_path(at.digest))
    return content


def check_libraries(layout: Layout, config: Config, manifest: ImageManifest) -> None:
    """Read and check a target's libraries of the user, for check 9.

    Raises:
        RejectError: one is missing or damaged.
    """
    sizes = {at.digest: at.size for at in manifest.layers}
    for library in config.libraries or ():
        content = layout.read_blob(library.digest, sizes[library.digest])
        path = layout.blob_path(library.digest)
        check_library(content, library, config.requirement.architecture, path)
