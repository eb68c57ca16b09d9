"""Read signed statements of other tools: JSON, DSSE envelopes, sigstore bundles, in-toto statements.

    sigstore bundle v0.3 = {"mediaType", "verificationMaterial": {"publicKey": {"hint"}}, "dsseEnvelope": ...}
    DSSE envelope        = {"payload": base64, "payloadType": text, "signatures": [{"sig": base64}]}
    in-toto statement    = {"_type", "subject": [{"name", "digest": {"sha256": hex}, "annotations"}],
                            "predicateType": URI, "predicate": {...}}

A signature is of `pae(payload, payload type)`. What is beside the envelope in a sigstore bundle is not
signed. The hint only says which key to look for. Of a keyless signature there is a certificate instead of
the hint, and an entry of a transparency log: `keyless_trust` verifies these.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from prejit.runtime.base.files import is_digest
from prejit.runtime.base.typed_json import MAX_INTEGER, depth, each_key_once, shown
from prejit.runtime.format.names import SIGNATURE_MEDIA_TYPE, STATEMENT_MEDIA_TYPE
from prejit.runtime.trust.reasons import RefusedError

if TYPE_CHECKING:
    from prejit.runtime.trust.public_keys import PublicKey

MAX_DEPTH = 32
"""Maximum number of lists and objects inside each other. Statements of SLSA have 8."""

_T = TypeVar("_T")
_NAMES = {str: "text", int: "an integer", list: "a list", dict: "an object"}


def read_object(content: bytes, max_bytes: int, case: str, what: str) -> dict[str, Any]:
    """Return a JSON object in UTF-8. `case` and `what` name it in the reason of a refusal.

    Raises:
        RefusedError: it is too large or no JSON object, has a key twice, or is nested too deeply.
    """
    if len(content) > max_bytes:
        raise RefusedError(
            f"{case}-size", f"{what}: expected at most {max_bytes} bytes, found {len(content)}"
        )
    try:
        text = content.decode("utf-8")
        found = json.loads(text, object_pairs_hook=each_key_once, parse_constant=_no_number)
        text.encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise RefusedError(case, f"{what}: expected JSON: {error!s:.80}") from error
    if type(found) is not dict:
        raise RefusedError(case, f"{what}: expected a JSON object, found {shown(found)}")
    if depth(found) > MAX_DEPTH:
        raise RefusedError(case, f"{what}: expected at most {MAX_DEPTH} levels, found more")
    return found


def field(found: dict[str, Any], name: str, kind: type[_T], case: str, what: str) -> _T:
    """Return a value of an object, of the type str, int, list or dict. `case` and `what` as of `read_object`.

    Raises:
        RefusedError: the key is missing, or its value has another type.
    """
    value = found.get(name)
    if type(value) is kind and (not isinstance(value, int) or abs(value) <= MAX_INTEGER):
        return value
    raise RefusedError(case, f"{what}: {name}: expected {_NAMES[kind]}, found {shown(value)}")


def _check_text(found: dict[str, Any], name: str, expected: str, case: str, what: str) -> None:
    """Check that a value of an object is this text. Errors as of `field`."""
    if (text := field(found, name, str, case, what)) != expected:
        raise RefusedError(case, f"{what}: expected {expected}, found {text!r:.80}")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


MAX_ENVELOPE_BYTES = 1 << 20
"""Maximum size of a sigstore bundle. One of a key has 1 kB, and one of a provenance about 20 kB."""
MAX_SIGNATURES = 16
"""Maximum number of signatures of an envelope."""
_MAX_SIGNATURE_BYTES = 256
"""Maximum size of a signature. One of P-521 has 139 bytes."""


class Envelope(NamedTuple):
    """A DSSE envelope: a payload of the type `STATEMENT_MEDIA_TYPE`, and at least one signature.

    `hint` says which key made them, as a sigstore bundle has it; nobody signed that. `is_keyless`: a
    certificate says who made them.
    """

    payload: bytes
    signatures: tuple[bytes, ...]
    hint: str = ""
    is_keyless: bool = False

    def is_signed_by(self, key: PublicKey) -> bool:
        """Return whether one of the signatures is of this key."""
        message = pae(self.payload)
        return any(key.verifies(signature, message) for signature in self.signatures)


def pae(payload: bytes, payload_type: str = STATEMENT_MEDIA_TYPE) -> bytes:
    """Return the bytes that a signature is of: DSSE's pre-authentication encoding."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def read_bundle(content: bytes) -> Envelope:
    """Return the envelope in a sigstore bundle v0.3.

    Raises:
        RefusedError: it is none, or has another payload than an in-toto statement.
    """
    what = "sigstore bundle"
    found = read_object(content, MAX_ENVELOPE_BYTES, "bundle-json", what)
    _check_text(found, "mediaType", SIGNATURE_MEDIA_TYPE, "bundle-type", what)
    material = field(found, "verificationMaterial", dict, "bundle-material", what)
    envelope = envelope_of(field(found, "dsseEnvelope", dict, "bundle-envelope", what))
    if "certificate" in material and "publicKey" not in material:
        return envelope._replace(is_keyless=True)
    if "certificate" in material:
        raise RefusedError(
            "bundle-material", f"{what}: expected a key or a certificate, found both"
        )
    key = field(material, "publicKey", dict, "bundle-material", f"{what} of a key")
    hint = field(key, "hint", str, "bundle-material", what) if "hint" in key else ""
    return envelope._replace(hint=hint)


def envelope_of(found: Any) -> Envelope:
    """Return a DSSE envelope from parsed JSON. Raises RefusedError as `read_bundle`."""
    what = "DSSE envelope"
    if type(found) is not dict:
        raise RefusedError("envelope", f"{what}: expected an object, found none")
    _check_text(found, "payloadType", STATEMENT_MEDIA_TYPE, "payload-type", what)
    payload = _decoded(field(found, "payload", str, "payload", what), "payload")
    listed = field(found, "signatures", list, "signatures", what)
    if not 1 <= len(listed) <= MAX_SIGNATURES:
        raise RefusedError(
            "signature-count",
            f"{what}: expected 1 to {MAX_SIGNATURES} signatures, found {len(listed)}",
        )
    signatures = []
    for each in listed:
        if type(each) is not dict:
            raise RefusedError("signatures", f"{what}: expected signatures that are objects")
        signature = _decoded(field(each, "sig", str, "signatures", what), "signatures")
        if not 0 < len(signature) <= _MAX_SIGNATURE_BYTES:
            raise RefusedError(
                "signature-size",
                f"{what}: expected a signature of at most {_MAX_SIGNATURE_BYTES} bytes, "
                f"found {len(signature)}",
            )
        signatures.append(signature)
    return Envelope(payload, tuple(signatures))


def _decoded(text: str, case: str) -> bytes:
    """Return the bytes of base64 in its one spelling."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError(case, f"DSSE envelope: expected base64: {error!s:.80}") from error
    if base64.b64encode(content).decode("ascii") != text:
        raise RefusedError(case, "DSSE envelope: expected base64 in its canonical spelling")
    return content


STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
SIGNATURE_PREDICATE = "https://sigstore.dev/cosign/sign/v1"
"""The predicate of `cosign sign`: the holder of the key signs the subject. It has no content."""
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
    """What a statement is about: a digest (`sha256:` and 64 digits), its name, and text about it by name."""

    digest: str
    name: str = ""
    annotations: Mapping[str, str] = _NOTHING


class Statement(NamedTuple):
    """An in-toto statement: a predicate (JSON) of a type (a URI) about at least one subject."""

    predicate_type: str
    subjects: tuple[SignedSubject, ...]
    predicate: Mapping[str, Any] = _NOTHING

    def about(self, digest: str) -> SignedSubject | None:
        """Return the subject that has this digest, or None."""
        return next((each for each in self.subjects if each.digest == digest), None)


def read_statement(payload: bytes, predicate_type: str) -> Statement:
    """Return the statement of an envelope's payload; `predicate_type` is the only predicate that counts here.

    Raises:
        RefusedError: it is no statement, is one of another predicate, or a subject has no sha256 digest.
    """
    what = "in-toto statement"
    found = read_object(payload, MAX_ENVELOPE_BYTES, "statement-json", what)
    _check_text(found, "_type", STATEMENT_TYPE, "statement-type", what)
    if (kind := field(found, "predicateType", str, "predicate-type", what)) != predicate_type:
        raise RefusedError(
            "predicate-type", f"{what}: expected the predicate {predicate_type}, found {kind!r:.80}"
        )
    listed = field(found, "subject", list, "subjects", what)
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
    return Statement(predicate_type, subjects, predicate)


def _subject(found: Any) -> SignedSubject:
    what = "in-toto statement: subject"
    if type(found) is not dict:
        raise RefusedError("subjects", f"{what}: expected an object, found {shown(found)}")
    digests = field(found, "digest", dict, "subject-digest", what)
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
