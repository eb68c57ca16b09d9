"""Write in-toto statements, DSSE envelopes and sigstore bundles as `trust.signed_statements` reads them."""

from __future__ import annotations

import base64
import json
from typing import Any

from prejit.runtime.format.names import SIGNATURE_MEDIA_TYPE, STATEMENT_MEDIA_TYPE
from prejit.runtime.trust.signed_statements import (
    STATEMENT_TYPE,
    Envelope,
    SignedSubject,
    Statement,
)


def encode_bundle(envelope: Envelope) -> bytes:
    """Return the sigstore bundle of an envelope, as `read_bundle` and other tools read it."""
    found = {
        "mediaType": SIGNATURE_MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": envelope.hint}, "tlogEntries": []},
        "dsseEnvelope": encode_envelope(envelope),
    }
    return json.dumps(found, separators=(",", ":"), sort_keys=True).encode("ascii")


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
