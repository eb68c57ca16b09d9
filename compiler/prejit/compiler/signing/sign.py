"""Sign a bundle: its index and the manifest of each target, as cosign does, and all its files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from prejit.compiler.signing.model_signing import model_signature
from prejit.compiler.signing.private_key import PrivateKey
from prejit.runtime.base.files import write_file
from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import REF_NAME
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import Root
from prejit.runtime.format.schema import Descriptor
from prejit.runtime.format.writing import EMPTY, Part, attach
from prejit.runtime.trust.channel import signers
from prejit.runtime.trust.dsse import BUNDLE_MEDIA_TYPE, encode_bundle, read_bundle
from prejit.runtime.trust.reasons import RefusedError
from prejit.runtime.trust.statement import (
    SIGNATURE_PREDICATE,
    encode_statement,
    signature_statements,
)

_CREATED = "org.opencontainers.image.created"


@dataclass(frozen=True)
class Signed:
    """What was signed.

    Attributes:
        digest: the bundle's digest.
        subjects: digests of the bundle's index and of the manifests of its targets.
        added: how many signatures were attached; 0: this key had signed all before.
        model_signature: the file with the signature of the directory.
        key: id of the key.
    """

    digest: str
    subjects: tuple[str, ...]
    added: int
    model_signature: Path
    key: str


def sign(path: str | os.PathLike[str], key: PrivateKey) -> Signed:
    """Attach signatures to a bundle, and write `NAME.sig` beside its directory.

    The digest of the bundle stays. Signing again with the same key attaches nothing. `NAME.sig` covers the
    files as they are afterwards, so it is written anew each time.

    Args:
        path: directory of the bundle.
        key: the private key.

    Raises:
        RejectError: the bundle is damaged.
        StoreError: it cannot be read or written.
        UsageError: nothing can be attached to it, because its format is too old.
    """
    path = Path(path)
    descriptors, names, signed, digest = read_whole(path, partial(_subjects, key=key))
    statements = signature_statements(digest, names)
    added = 0
    for subject, statement in statements.items():
        payload = encode_statement(statement)
        if payload in signed:
            continue
        content = encode_bundle(key.envelope(payload))
        annotations = {
            "dev.sigstore.bundle.content": "dsse-envelope",
            "dev.sigstore.bundle.predicateType": SIGNATURE_PREDICATE,
            _CREATED: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        layer = Part(BUNDLE_MEDIA_TYPE, content)
        attach(path, descriptors[subject], BUNDLE_MEDIA_TYPE, EMPTY, [layer], annotations)
        added += 1
    beside = path.resolve().with_name(f"{path.resolve().name}.sig")
    write_file(beside, model_signature(path, key))
    return Signed(digest, tuple(statements), added, beside, key.public.id)


def _subjects(
    layout: Layout, root: Root, key: PrivateKey
) -> tuple[dict[str, Descriptor], list[tuple[str, str]], set[bytes], str]:
    """Return what is to be signed, the targets, what this key has signed already, and the bundle's digest."""
    if root.subject is None:
        raise UsageError(
            f"{layout.path}: expected a bundle that signatures can be attached to, found one of an older "
            "format, or a copy of several targets without the bundle's index",
            hint="build it again, or copy the whole bundle",
        )
    descriptors = {at.digest: at for at in root.index.manifests} | {root.digest: root.subject}
    targets = [((at.annotations or {}).get(REF_NAME, ""), at.digest) for at in root.index.manifests]
    return descriptors, targets, set(_signed_by(layout, root, key)), root.digest


def _signed_by(layout: Layout, root: Root, key: PrivateKey) -> Iterable[bytes]:
    """Yield the payloads of attached signatures by a key."""
    for each in referrers(layout, root):
        if each.artifact_type != BUNDLE_MEDIA_TYPE or len(each.layers) != 1:
            continue
        try:
            envelope = read_bundle(layout.read_blob(each.layers[0].digest, each.layers[0].size))
        except (RefusedError, RejectError):
            continue
        if signers(envelope, [key.public]):
            yield envelope.payload
