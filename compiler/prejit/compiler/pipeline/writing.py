"""Write a bundle into its directory, unless it is there already."""

from __future__ import annotations

from pathlib import Path

from prejit.compiler.pipeline.pack.contents import PackedBundle
from prejit.compiler.progress import Progress
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.audit import check_attached, check_index_file
from prejit.runtime.format.blobs import check_blobs
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.root import read_root
from prejit.runtime.format.writing import remove_abandoned, write_layout
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.store.receipts import Receipts


def write(bundle: PackedBundle, output: Path, progress: Progress) -> tuple[Path, bool]:
    """Write a bundle into `output/NAME`, unless it is there already.

    Returns:
        The directory, and whether it was changed.

    Raises:
        StoreError: the directory cannot be written.
    """
    path = output / bundle.name
    if is_current(path, bundle.index):
        remove_abandoned(path)
        return path, False
    with progress.phase(f"writing {path}"):
        write_layout(path, bundle.index, bundle.blobs, digest_of_file=Receipts(path).digest_of)
    return path, True


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
