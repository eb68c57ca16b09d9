"""Sign a bundle: its index and each target's manifest for cosign, all its files for the OpenSSF.

An adapter of PEFT is signed by its digest, and trust policies then let a bundle load it beside its weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prejit.compiler.base.statement_writing import encode_statement
from prejit.compiler.pipeline.pack.bundle_writing import Part, attach, remove_abandoned
from prejit.runtime.base.files import digest_of, is_digest, store_errors
from prejit.runtime.base.written_files import write_file
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format.audit import audit
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    BUNDLE_NAME,
    PARTS_MEDIA_TYPE,
    REF_NAME,
    SIGNATURE_MEDIA_TYPE,
    STATEMENT_MEDIA_TYPE,
)
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import Root
from prejit.runtime.generation.options import check_generation
from prejit.runtime.lora.peft_files import CONFIG, SIGNATURES, adapter_digest
from prejit.runtime.trust.reasons import RefusedError
from prejit.runtime.trust.signed_statements import (
    BUNDLE_ANNOTATION,
    MAX_ENVELOPE_BYTES,
    PARTS_PREDICATE,
    PROVENANCE_PREDICATE,
    SIGNATURE_PREDICATE,
    SignedSubject,
    Statement,
    read_statement,
)

if TYPE_CHECKING:
    from prejit.compiler.signing.signers import KeylessSigner, PrivateKey

    Signer = PrivateKey | KeylessSigner


MODEL_PREDICATE = "https://model_signing/signature/v1.0"
"""The predicate of the OpenSSF's model signing: digests of the files of a directory."""


def files_of(path: Path) -> dict[str, str]:
    """Return the digest of each file of a bundle's directory, by its name in the notation of POSIX.

    Raises:
        StoreError: the directory cannot be read.
        RejectError: it has a file that does not belong there.
    """
    found = {}
    with store_errors(path, "read"):
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if file.is_dir() and not file.is_symlink():
                continue
            digest = f"sha256:{file.name}"
            if file.is_symlink():
                raise RejectError(str(file), "expected a file, found a symbolic link")
            if name in ("index.json", "oci-layout"):
                digest = digest_of(file.read_bytes())
            elif name != f"blobs/sha256/{file.name}" or not is_digest(digest):
                raise RejectError(
                    str(file),
                    "expected files of the bundle alone, found another",
                    hint="remove it: the signature is of every file in the directory",
                )
            found[name] = digest
    return found


def model_statement(name: str, files: Mapping[str, str]) -> Statement:
    """Return the statement about the files of a directory."""
    ordered = {each: files[each].removeprefix("sha256:") for each in sorted(files)}
    root = hashlib.sha256(b"".join(map(bytes.fromhex, ordered.values()))).hexdigest()
    return Statement(
        MODEL_PREDICATE,
        (SignedSubject(f"sha256:{root}", name),),
        {
            "resources": [
                {"algorithm": "sha256", "digest": digest, "name": each}
                for each, digest in ordered.items()
            ],
            "serialization": {
                "allow_symlinks": False,
                "hash_type": "sha256",
                "ignore_paths": [],
                "method": "files",
            },
        },
    )


def model_signature(path: Path, signer: Signer) -> bytes:
    """Return the content of `NAME.sig` for a bundle's directory."""
    statement = model_statement(path.resolve().name, files_of(path))
    return signer.model_bundle(encode_statement(statement))


_MAX_DESCRIPTION_BYTES = MAX_ENVELOPE_BYTES // 4 * 3 - (4 << 10)
"""Maximum size of a description that is signed: in base64 it must fit into an envelope."""
_CREATED = "org.opencontainers.image.created"


@dataclass(frozen=True)
class Signed:
    """The result of signing a bundle.

    Attributes:
        digest: the bundle's digest.
        subjects: digests of the bundle's index and of the manifests of its targets.
        added: how many signatures were attached; 0: this signer had signed all before.
        model_signature: the file with the signature of the directory.
        key: id of the key; of a keyless signature, the issuer and the identity.
    """

    digest: str
    subjects: tuple[str, ...]
    added: int
    model_signature: Path
    key: str


def sign(path: str | os.PathLike[str], signer: Signer) -> Signed:
    """Verify a bundle, attach signatures to it, and write `NAME.sig` beside its directory.

    Its provenance and its list of parts are signed too, so that policies can demand them.
    The digest of the bundle stays. Signing again as the same signer attaches nothing. `NAME.sig` covers the
    files as they are afterwards, so it is written anew each time.

    Raises:
        NetworkError: a keyless signature could not be made. Those that were attached before stay.
        RejectError: the bundle is damaged.
        StoreError: it cannot be read or written.
        UsageError: nothing can be attached to it, because it is a copy without the bundle's index.
    """
    path = Path(path)
    with Layout(path):  # without a bundle there is nothing to remove
        remove_abandoned(path)
    audited = audit(path, check_generation).digest
    descriptors, names, signed, described, digest = read_whole(path, partial(_read, signer=signer))
    if digest != audited:
        raise StoreError(
            f"{path}: expected {audited}, which was verified, found {digest}",
            hint="a build has replaced the bundle meanwhile: sign again",
        )
    statements = signature_statements(digest, names)
    payloads = [
        (subject, SIGNATURE_PREDICATE, encode_statement(statement))
        for subject, statement in statements.items()
    ]
    payloads += [(digest, predicate, payload) for predicate, payload in described]
    added = 0
    beside = path.resolve().with_name(f"{path.resolve().name}.sig")
    try:
        for subject, predicate, payload in payloads:
            if payload in signed:
                continue
            content = signer.bundle(payload)
            annotations = {
                "dev.sigstore.bundle.content": "dsse-envelope",
                "dev.sigstore.bundle.predicateType": predicate,
                _CREATED: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            layer = Part(SIGNATURE_MEDIA_TYPE, content)
            attach(path, descriptors[subject], SIGNATURE_MEDIA_TYPE, [layer], annotations)
            added += 1
        write_file(beside, model_signature(path, signer))
    except StoreError as error:
        raise StoreError(
            f"{error}; before that {added} signatures were attached to {path}, and they stay",
            hint=f"{error.hint or 'mend that'}, then sign again: it adds what is missing and writes {beside}",
        ) from error
    return Signed(digest, tuple(statements), added, beside, signer.id)


class _Bundle(NamedTuple):
    """The parts of a bundle that `sign` reads.

    Attributes:
        descriptors: what is to be signed, by digest.
        targets: name and digest of each target's manifest.
        signed: the payloads that this signer has signed.
        described: predicates and statements of its provenance and its list of parts.
        digest: the bundle's digest.
    """

    descriptors: dict[str, Descriptor]
    targets: list[tuple[str, str]]
    signed: set[bytes]
    described: list[tuple[str, bytes]]
    digest: str


def _read(layout: Layout, root: Root, signer: Signer) -> _Bundle:
    if root.subject is None:
        raise UsageError(
            f"{layout.path}: expected a bundle that signatures can be attached to, found a copy of several "
            "targets without the bundle's index",
            hint="copy the whole bundle",
        )
    descriptors = {at.digest: at for at in root.bundle.manifests} | {root.digest: root.subject}
    targets = [
        ((at.annotations or {}).get(REF_NAME, ""), at.digest)
        for at in root.bundle.manifests
        if at.digest != root.digest
    ]
    signed = set(_signed_by(layout, root, signer))
    return _Bundle(descriptors, targets, signed, list(_described(layout, root)), root.digest)


def _described(layout: Layout, root: Root) -> Iterable[tuple[str, bytes]]:
    """Yield predicates and statements of a bundle's provenance and of its lists of parts."""
    for each in referrers(layout, root, root.digest):
        if each.artifact_type not in (PARTS_MEDIA_TYPE, STATEMENT_MEDIA_TYPE):
            continue
        for at in each.layers:
            if at.size > _MAX_DESCRIPTION_BYTES:
                continue
            content = layout.read_blob(at)
            if each.artifact_type == PARTS_MEDIA_TYPE:
                subject = SignedSubject(root.digest, root.bundle.annotations[BUNDLE_NAME])
                statement = Statement(PARTS_PREDICATE, (subject,), json.loads(content))
                yield PARTS_PREDICATE, encode_statement(statement)
                continue
            with contextlib.suppress(RefusedError):
                if read_statement(content, PROVENANCE_PREDICATE).about(root.digest):
                    yield PROVENANCE_PREDICATE, content


def _signed_by(layout: Layout, root: Root, signer: Signer) -> Iterable[bytes]:
    """Yield the payloads of attached signatures by a signer."""
    for each in referrers(layout, root):
        if each.artifact_type != SIGNATURE_MEDIA_TYPE or len(each.layers) != 1:
            continue
        [at] = each.layers
        if at.size > MAX_ENVELOPE_BYTES:
            continue
        try:
            payload = signer.signed(layout.read_blob(at))
        except RejectError:
            continue
        if payload is not None:
            yield payload


def signature_statements(index: str, manifests: Iterable[tuple[str, str]]) -> dict[str, Statement]:
    """Return the statements that sign a bundle, by the digest that each is attached to.

    One is about the bundle's index. Others are about the manifests of its targets (name and digest), so that
    a copy of one target is signed too. They name the bundle, so that revoking it revokes them.
    """
    signed = {index: Statement(SIGNATURE_PREDICATE, (SignedSubject(index),))}
    for name, digest in manifests:
        subject = SignedSubject(digest, name, {BUNDLE_ANNOTATION: index})
        signed[digest] = Statement(SIGNATURE_PREDICATE, (subject,))
    return signed


class SignedAdapter(NamedTuple):
    """The result of signing an adapter: its digest, and the file with its signatures."""

    digest: str
    signatures: Path


def is_adapter(directory: Path) -> bool:
    """Return whether a directory is an adapter, and no bundle."""
    return (directory / CONFIG).is_file() and not (directory / "index.json").exists()


def sign_adapter(directory: Path, signer: Signer) -> SignedAdapter:
    """Add a signature to `adapter.sig` in an adapter's directory, unless the signer has signed it before.

    Raises:
        CheckpointError: a file of the adapter is missing.
        NetworkError: a keyless signature could not be made.
        StoreError: the file cannot be read or written.
    """
    digest, file = adapter_digest(directory), directory / SIGNATURES
    payload = encode_statement(Statement(SIGNATURE_PREDICATE, (SignedSubject(digest, "adapter"),)))
    with store_errors(file, "read"):
        before = file.read_bytes().splitlines() if file.exists() else []
    if not any(signer.signed(line) == payload for line in before):
        write_file(file, b"\n".join([*before, signer.bundle(payload)]) + b"\n")
    return SignedAdapter(digest, file)
