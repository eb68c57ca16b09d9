"""Write a bundle into its directory, unless it is there already."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from prejit.compiler.pipeline.layout_writing import remove_abandoned, write_layout
from prejit.compiler.pipeline.pack.contents import PackedBundle
from prejit.compiler.progress import Progress
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format.audit import check_attached, check_index_file
from prejit.runtime.format.blobs import check_blobs
from prejit.runtime.format.index_writing import is_ours
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.limits import MAX_INDEX_BYTES
from prejit.runtime.format.names import BUNDLE_NAME, RECORDED_MEDIA_TYPE, SIGNATURE_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.kept_files import Receipts

_log = logging.getLogger(__name__)


def write(bundle: PackedBundle, output: Path, progress: Progress) -> tuple[Path, bool]:
    """Write a bundle into `output/NAME`, unless it is there already.

    Returns:
        The directory, and whether it was changed.
    """
    path = output / bundle.name
    if is_current(path, bundle.index):
        remove_abandoned(path)
        _log.info("%s: is there already, byte for byte", path)
        return path, False
    _log.info("%s: written anew, because its index differs or there is none", path)
    signed = _is_signed(path)
    with progress.phase(f"writing {path}"):
        write_layout(path, bundle.index, bundle.blobs, digest_of_file=Receipts(path).digest_of)
    if signed and not _is_signed(path):
        progress.note(
            f"{path} is not signed any more: it has changed, and neither signatures of the bundle before nor "
            f"{path}.sig count for it. Sign it again: prejit sign {path}"
        )
    return path, True


def _is_signed(path: Path) -> bool:
    """Return whether the bundle in a directory, as a whole, has a signature."""
    try:
        with Layout(path) as layout:
            root = read_root(layout)
            attached = referrers(layout, root, root.digest)
            return any(each.artifact_type == SIGNATURE_MEDIA_TYPE for each in attached)
    except (RejectError, StoreError):
        return False


def check_place(name: str, output: Path) -> None:
    """Check that a bundle of this name may be written to `output/NAME`: nothing else is there.

    A damaged bundle may be replaced: that repairs it.

    Raises:
        UsageError: another bundle is there, or something that is none; or the output is no directory.
    """
    path = output / name
    if output.exists() and not output.is_dir():
        raise UsageError(
            f"{output}: expected a directory of bundles (--output), found a file; nothing was built",
            hint="give another directory (-o DIR), or move the file away",
        )
    if found := _found_at(path, name):
        raise UsageError(
            f"{path}: expected no bundle but an older {name!r} of `prejit build`, found {found}; nothing was "
            "changed",
            hint="build into another directory (-o DIR), give the bundle another name, or move this away",
        )


def _found_at(path: Path, name: str) -> str:
    """Return what keeps a bundle of this name from being written here; empty: nothing does."""
    try:
        with Layout(path) as layout:
            content = layout.read("index.json", MAX_INDEX_BYTES)
            try:
                root = read_root(layout)
            except RejectError:
                return (
                    "" if is_ours(content) or not _is_index(content) else "what another tool wrote"
                )
            there = root.bundle.annotations[BUNDLE_NAME]
            targets = match(root, Fingerprint.current())
            layers = [at.mediaType for each in targets for at in read_manifest(layout, each).layers]
    except (RejectError, StoreError):
        return ""
    if RECORDED_MEDIA_TYPE in layers:
        return "a recording of `prejit record`"
    return "" if there == name else f"the bundle {there!r}"


def _is_index(content: bytes) -> bool:
    try:
        return "manifests" in json.loads(content)
    except (ValueError, RecursionError, TypeError):
        return False


def is_current(path: Path, index: bytes) -> bool:
    """Return whether a directory holds exactly this bundle, undamaged."""
    try:
        with Layout(path) as layout:
            root = read_root(layout)
            if to_json(root.bundle) != index:  # another one, or a copy of some of its targets
                return False
            targets = match(root, Fingerprint.current())
            manifests = [read_manifest(layout, target) for target in targets]
            check_index_file(layout, root, check_attached(layout, root, manifests))
            check_blobs(layout, manifests, Receipts(path))
    except (RejectError, StoreError):
        return False
    return True
