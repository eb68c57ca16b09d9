"""in-toto statements: what a signature says about which digests.

{"_type": "https://in-toto.io/Statement/v1", "subject": [{"name", "digest": {"sha256": hex}, "annotations"}],
 "predicateType": URI, "predicate": {...}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from prejit.runtime.base.files import is_digest
from prejit.runtime.base.typed_json import shown
from prejit.runtime.trust import foreign_json
from prejit.runtime.trust.dsse import MAX_ENVELOPE_BYTES
from prejit.runtime.trust.reasons import RefusedError

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
SIGNATURE_PREDICATE = "https://sigstore.dev/cosign/sign/v1"
"""The predicate of `cosign sign`: the holder of the key signs the subject. It has no content."""
MODEL_PREDICATE = "https://model_signing/signature/v1.0"
"""The predicate of the OpenSSF's model signing: digests of the files of a directory."""
PROVENANCE_PREDICATE = "https://slsa.dev/provenance/v1"
"""The predicate of SLSA's provenance: how something was built."""
PARTS_PREDICATE = "https://cyclonedx.org/bom"
"""The predicate of a list of parts (SBOM), as `cosign attest --type cyclonedx` has it."""
RELEASE_PREDICATE = "urn:prejit:channel-release:v1"
"""The predicate of a channel's release: see `channel`."""
KEYS_PREDICATE = "urn:prejit:channel-keys:v1"
"""The predicate of a channel's keys: see `channel`."""

BUNDLE_ANNOTATION = "dev.prejit.bundle"
"""The annotation of a subject that is a target's manifest: the digest of the bundle that it was signed in."""

MAX_SUBJECTS = 4096
"""Maximum number of subjects of a statement. A channel's release has one for each target."""


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class SignedSubject(NamedTuple):
    """What a statement is about.

    Attributes:
        digest: `sha256:` and 64 digits.
        name: its name; may be empty.
        annotations: text about it, by name.
    """

    digest: str
    name: str = ""
    annotations: Mapping[str, str] = _NOTHING


class Statement(NamedTuple):
    """An in-toto statement.

    Attributes:
        predicate_type: a URI that says what the predicate means.
        subjects: at least one.
        predicate: JSON.
    """

    predicate_type: str
    subjects: tuple[SignedSubject, ...]
    predicate: Mapping[str, Any] = _NOTHING

    def about(self, digest: str) -> SignedSubject | None:
        """Return the subject that has this digest, or None."""
        return next((each for each in self.subjects if each.digest == digest), None)


def read_statement(payload: bytes, predicate_type: str) -> Statement:
    """Return the statement of a payload.

    Args:
        payload: of an envelope.
        predicate_type: the only predicate that counts here.

    Raises:
        RefusedError: it is no statement, is one of another predicate, or a subject has no sha256 digest.
    """
    what = "in-toto statement"
    found = foreign_json.read_object(payload, MAX_ENVELOPE_BYTES, "statement-json", what)
    kind = foreign_json.field(found, "_type", str, "statement-type", what)
    if kind != STATEMENT_TYPE:
        raise RefusedError(
            "statement-type", f"{what}: expected {STATEMENT_TYPE}, found {kind!r:.80}"
        )
    predicate_found = foreign_json.field(found, "predicateType", str, "predicate-type", what)
    if predicate_found != predicate_type:
        raise RefusedError(
            "predicate-type",
            f"{what}: expected the predicate {predicate_type}, found {predicate_found!r:.80}",
        )
    listed = foreign_json.field(found, "subject", list, "subjects", what)
    if not listed:
        raise RefusedError("subject-empty", f"{what}: expected a subject, found none")
    if len(listed) > MAX_SUBJECTS:
        raise RefusedError(
            "subject-count",
            f"{what}: expected at most {MAX_SUBJECTS} subjects, found {len(listed)}",
        )
    subjects = tuple(_subject(each) for each in listed)
    predicate = found.get("predicate", {})
    if type(predicate) is not dict:
        raise RefusedError("predicate", f"{what}: predicate: expected an object")
    return Statement(predicate_found, subjects, predicate)


def _subject(found: Any) -> SignedSubject:
    what = "in-toto statement: subject"
    if type(found) is not dict:
        raise RefusedError("subjects", f"{what}: expected an object, found {shown(found)}")
    digests = foreign_json.field(found, "digest", dict, "subject-digest", what)
    digest = f"sha256:{digests.get('sha256')}"
    if not is_digest(digest):
        # Other algorithms beside sha256 are not read: what is loaded has sha256 digests alone.
        names = ", ".join(sorted(map(str, digests))[:4])
        raise RefusedError(
            "subject-algorithm", f"{what}: expected a digest of sha256, found {names!r:.80}"
        )
    name = found.get("name", "")
    annotations = found.get("annotations", {})
    if type(name) is not str or type(annotations) is not dict:
        raise RefusedError("subjects", f"{what}: expected a name and annotations of text")
    texts = {key: value for key, value in annotations.items() if type(value) is str}
    return SignedSubject(digest, name, texts)


def encode_statement(statement: Statement) -> bytes:
    """Return the canonical JSON of a statement, which is what gets signed."""
    found = {
        "_type": STATEMENT_TYPE,
        "predicateType": statement.predicate_type,
        "subject": [_plain(each) for each in statement.subjects],
        "predicate": dict(statement.predicate),
    }
    text = json.dumps(found, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _plain(subject: SignedSubject) -> dict[str, Any]:
    algorithm, _, digits = subject.digest.partition(":")
    # The name is there even if it is empty: sigstore's own package signs no statement without it.
    found: dict[str, Any] = {"digest": {algorithm: digits}, "name": subject.name}
    if subject.annotations:
        found["annotations"] = dict(subject.annotations)
    return found


def signature_statements(index: str, manifests: Iterable[tuple[str, str]]) -> dict[str, Statement]:
    """Return the statements that sign a bundle, by the digest that each is attached to.

    One is about the bundle's index. Others are about the manifests of its targets, so that a copy of one
    target is signed too. They name the bundle, so that revoking it revokes them.

    Args:
        index: digest of the bundle's index.
        manifests: name and digest of each target's manifest.
    """
    signed = {index: Statement(SIGNATURE_PREDICATE, (SignedSubject(index),))}
    for name, digest in manifests:
        subject = SignedSubject(digest, name, {BUNDLE_ANNOTATION: index})
        signed[digest] = Statement(SIGNATURE_PREDICATE, (subject,))
    return signed
