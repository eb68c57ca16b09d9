"""Attach the descriptions of a bundle that it has not yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from prejit.compiler.pipeline.describe.sbom import parts_list
from prejit.compiler.pipeline.layout_writing import EMPTY, Part, attach
from prejit.compiler.pipeline.pack.bundle_files import DESCRIPTIONS
from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.bundle_schema import Config, Descriptor, Index
from prejit.runtime.format.checks.oci import check_digest
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import PARTS_MEDIA_TYPE, STATEMENT_MEDIA_TYPE
from prejit.runtime.format.opening import Contents, match, read_contents
from prejit.runtime.format.referrers import Referrer, referrers
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.trust.signed_statements import PROVENANCE_PREDICATE

PREDICATE_ANNOTATION = "in-toto.io/predicate-type"
"""The annotation that names the predicate of an attached statement, as other tools write it."""


def attach_descriptions(
    path: Path, digest: str, provenance_of: Callable[[Index, Sequence[Config]], bytes]
) -> None:
    """Attach the list of parts and the provenance of a bundle, if it has none that is whole.

    Nothing happens if another build has replaced the bundle meanwhile.

    Args:
        path: directory of the bundle.
        digest: the bundle's digest.
        provenance_of: returns the statement of its provenance, from its index and the configs of its targets.

    Raises:
        RejectError, StoreError: the bundle is damaged, or the disk is full.
    """

    def read(layout: Layout, root: Root) -> tuple[Root, list[Contents], set[str]]:
        if root.digest != digest:
            return root, [], set()
        targets = sorted(match(root, Fingerprint.current()), key=lambda target: target.name)
        contents = [read_contents(layout, target) for target in targets]
        ours = [
            each
            for each in referrers(layout, root, digest)
            if each.artifact_type in DESCRIPTIONS and _is_whole(layout, each)
        ]
        return root, contents, {each.artifact_type for each in ours}

    root, contents, there = read_whole(path, read)
    if root.digest != digest or root.subject is None:
        return
    with contextlib.suppress(UsageError):  # another build has replaced it just now
        if PARTS_MEDIA_TYPE not in there:
            parts = parts_list(digest, [(each.manifest, each.config) for each in contents])
            _attach(path, root.subject, PARTS_MEDIA_TYPE, parts, {})
        if STATEMENT_MEDIA_TYPE not in there:
            configs = [each.config for each in contents]
            statement = provenance_of(root.bundle, configs)
            noted = {PREDICATE_ANNOTATION: PROVENANCE_PREDICATE}
            _attach(path, root.subject, STATEMENT_MEDIA_TYPE, statement, noted)


def _is_whole(layout: Layout, referrer: Referrer) -> bool:
    """Return whether the layers of something attached are there and undamaged."""
    try:
        for at in referrer.layers:
            content = layout.read_blob(at.digest, at.size)
            check_digest(content, at.digest, layout.blob_path(at.digest))
    except RejectError:
        return False
    return True


def _attach(
    path: Path, subject: Descriptor, kind: str, content: bytes, noted: dict[str, str]
) -> None:
    layers: Sequence[Part] = [Part(kind, content, noted or None)]
    attach(path, subject, kind, EMPTY, layers, noted)
