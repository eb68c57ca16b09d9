"""Envelopes of signatures: DSSE, alone and in a sigstore bundle, as cosign and OpenSSF model signing use it.

    sigstore bundle v0.3 = {"mediaType", "verificationMaterial": {"publicKey": {"hint"}}, "dsseEnvelope": ...}
    DSSE envelope        = {"payload": base64, "payloadType": text, "signatures": [{"sig": base64}]}

A signature is of `pae(payload, payload type)`. What is beside the envelope in a sigstore bundle is not
signed. The hint only says which key to look for. Of a keyless signature there is a certificate instead of
the hint, and an entry of a transparency log: `keyless` verifies these.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, NamedTuple

from prejit.runtime.format.names import SIGNATURE_MEDIA_TYPE, STATEMENT_MEDIA_TYPE
from prejit.runtime.trust.foreign_json import field, read_object
from prejit.runtime.trust.reasons import RefusedError

MAX_ENVELOPE_BYTES = 1 << 20
"""Maximum size of a sigstore bundle. One of a key has 1 kB, and one of a provenance about 20 kB."""
MAX_SIGNATURES = 16
"""Maximum number of signatures of an envelope."""
_MAX_SIGNATURE_BYTES = 256
"""Maximum size of a signature. One of P-521 has 139 bytes."""


class Envelope(NamedTuple):
    """A DSSE envelope.

    Attributes:
        payload: what is signed, of the type `STATEMENT_MEDIA_TYPE`.
        signatures: at least one.
        hint: which key made them, as a sigstore bundle has it; nobody signed that.
        is_keyless: whether a certificate says who made them.
    """

    payload: bytes
    signatures: tuple[bytes, ...]
    hint: str = ""
    is_keyless: bool = False


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
    kind = field(found, "mediaType", str, "bundle-type", what)
    if kind != SIGNATURE_MEDIA_TYPE:
        raise RefusedError(
            "bundle-type", f"{what}: expected {SIGNATURE_MEDIA_TYPE}, found {kind!r:.80}"
        )
    material = field(found, "verificationMaterial", dict, "bundle-material", what)
    envelope = _envelope(field(found, "dsseEnvelope", dict, "bundle-envelope", what), "")
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
    """Return a DSSE envelope from parsed JSON.

    Raises:
        RefusedError: it is none, or has another payload than an in-toto statement.
    """
    if type(found) is not dict:
        raise RefusedError("envelope", "DSSE envelope: expected an object, found none")
    return _envelope(found, "")


def _envelope(found: dict[str, Any], hint: str) -> Envelope:
    what = "DSSE envelope"
    kind = field(found, "payloadType", str, "payload-type", what)
    if kind != STATEMENT_MEDIA_TYPE:
        raise RefusedError(
            "payload-type", f"{what}: expected {STATEMENT_MEDIA_TYPE}, found {kind!r:.80}"
        )
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
    return Envelope(payload, tuple(signatures), hint)


def _decoded(text: str, case: str) -> bytes:
    """Return the bytes of base64 in its one spelling."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError(case, f"DSSE envelope: expected base64: {error!s:.80}") from error
    if base64.b64encode(content).decode("ascii") != text:
        raise RefusedError(case, "DSSE envelope: expected base64 in its canonical spelling")
    return content


def encode_envelope(envelope: Envelope) -> dict[str, Any]:
    """Return an envelope as plain data, for JSON."""
    return {
        "payload": base64.b64encode(envelope.payload).decode("ascii"),
        "payloadType": STATEMENT_MEDIA_TYPE,
        "signatures": [
            {"keyid": "", "sig": base64.b64encode(signature).decode("ascii")}
            for signature in envelope.signatures
        ],
    }


def encode_bundle(envelope: Envelope) -> bytes:
    """Return the sigstore bundle of an envelope, as `read_bundle` and other tools read it."""
    found = {
        "mediaType": SIGNATURE_MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": envelope.hint}, "tlogEntries": []},
        "dsseEnvelope": encode_envelope(envelope),
    }
    return json.dumps(found, separators=(",", ":"), sort_keys=True).encode("ascii")
