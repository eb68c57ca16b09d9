"""What a policy lets run: every way to be refused by its name, and the few ways to be allowed."""

import base64
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaigns.junk import mutated
from tests.extent import examples
from tests.signers import key_table, signer

from prejit.compiler.base.statement_writing import encode_bundle, encode_statement
from prejit.compiler.signing.bundle_signing import signature_statements
from prejit.compiler.signing.channels import release_statement
from prejit.runtime.trust.channel import Accepted, KeySet, Outcome, Release, Verified
from prejit.runtime.trust.decision import CurrentRelease, TrustTarget, decide
from prejit.runtime.trust.policy import parse_policy
from prejit.runtime.trust.reasons import Reason
from prejit.runtime.trust.signed_statements import (
    MAX_SIGNATURES,
    PROVENANCE_PREDICATE,
    SIGNATURE_PREDICATE,
    Envelope,
    SignedSubject,
    Statement,
    pae,
    read_bundle,
    read_statement,
)

INDEX, MANIFEST, OTHER_INDEX, OTHER_MANIFEST = ("sha256:" + digit * 64 for digit in "1234")
NOW = datetime(2026, 11, 22, tzinfo=UTC).timestamp()
STATEMENTS = signature_statements(INDEX, [("cpu", MANIFEST)])
KEYS = "".join(map(key_table, "abc"))


def at(index=INDEX, manifest=MANIFEST, name="demo"):
    return TrustTarget(name, index, manifest)


def decided(rule='keys = ["a"]', names='["demo"]', keys=KEYS, more="", **bundle):
    """Decide about a bundle and what is attached to it: by default nothing is."""
    text = f"{keys}\n[[rules]]\nnames = {names}\n{rule}\n{more}"
    policy = parse_policy(text.encode(), "trust.toml", None, Path())
    found = {"target": at(), "attached": (), "current": None, **bundle}
    return decide(policy, **found, now=NOW)


def signed(statement, *names, curve="SECP256R1"):
    payload = statement if isinstance(statement, bytes) else encode_statement(statement)
    envelopes = [signer(name, curve).envelope(payload) for name in names]
    signatures = tuple(each.signatures[0] for each in envelopes)
    return encode_bundle(Envelope(payload, signatures, envelopes[0].hint))


def of_index(*names):
    return signed(STATEMENTS[INDEX], *names)


def of_manifest(*names):
    return signed(STATEMENTS[MANIFEST], *names)


def edited(content, change):
    found = json.loads(content)
    change(found)
    return json.dumps(found).encode()


def placed(found, place, value):
    """Put a value at a place such as `dsseEnvelope.signatures.0.sig`; a function makes it of the old one."""
    *path, last = (int(key) if key.isdigit() else key for key in place.split("."))
    for key in path:
        found = found[key]
    found[last] = value(found[last]) if callable(value) else value


def envelope(place, value, by="a"):
    return {"attached": [edited(of_index(by), lambda found: placed(found, place, value))]}


def statement(place, value):
    return by(signed(edited(GOOD, lambda found: placed(found, place, value)), "a"))


def made(signature):
    """A signature of the right payload, with the hint of the right key, that is made in another way."""
    key = signer("a")
    return by(encode_bundle(Envelope(GOOD, (signature(key, GOOD),), key.envelope(GOOD).hint)))


def ecdsa(key, message, algorithm="SHA256"):
    return key.private.sign(message, ec.ECDSA(getattr(hashes, algorithm)()))


def by(*contents, **changes):
    return {"attached": [*contents], **changes}


def two(*contents, **changes):
    return by(*contents, **{"rule": 'keys = ["a", "b"]\nthreshold = 2', **changes})


def b64(content):
    return base64.b64encode(content).decode()


def flipped(text):
    content = base64.b64decode(text)
    return b64(content[:-1] + bytes([content[-1] ^ 1]))


def release(digest, bundle="demo", expired=None):
    accepted, ids = Accepted(KeySet(0, (A,), 1)), frozenset({A.id})
    verified = Verified("sha256:" + "0" * 64, ids, 0, 3)
    current = Release(3, bundle, frozenset({digest}), NOW + 1)
    return Outcome(current, accepted, expired, (verified,), ids)


def channel(found, rule='channel = "stable"'):
    more = '[channels.stable]\nfile = "stable.json"\nkeys = ["a"]'
    return {"rule": rule, "more": more, "current": found}


def named(name):
    return by(of_index("a"), target=at(name=name))


SIG, SUBJECT = "dsseEnvelope.signatures.0.sig", "subject.0.digest"
SIGNATURES, PAYLOAD = "dsseEnvelope.signatures", "dsseEnvelope.payload"
HINT = "verificationMaterial.publicKey.hint"
HINT_OF_A = json.loads(of_index("a"))["verificationMaterial"]["publicKey"]["hint"]
A = signer("a").public
ANY_BY_B = '[[rules]]\nnames = ["*"]\nkeys = ["b"]'
LATE = Reason("channel-expired", "expiry", "expired")
GOOD = encode_statement(STATEMENTS[INDEX])
OF_OTHER = signature_statements(OTHER_INDEX, [])[OTHER_INDEX]
OF_OTHER_TARGET = signature_statements(INDEX, [("gpu", OTHER_MANIFEST)])[OTHER_MANIFEST]
RELEASE = release_statement(
    "stable", "demo", (SignedSubject(INDEX),), version=1, keys_version=0, expires=datetime.now(UTC)
)
TEXT_SIGNED = ecdsa(signer("a"), pae(GOOD, "text/plain"))
JUNK = edited(of_index("stranger"), lambda f: placed(f, SIGNATURES, lambda x: x * MAX_SIGNATURES))
REVOKED = f'[revoked]\ndigests = ["{INDEX}"]'
EXPIRED = key_table("a", expires="2026-11-21")
PARTIAL = at(MANIFEST)
CH_AND_KEY = 'keys = ["a"]\nchannel = "stable"'
PERMISSIVE = 'level = "permissive"\nthreshold = 2\nkeys = '
CASES = {
    "unsigned": {},
    "unsigned: partial copy without its signature": {"target": PARTIAL},
    "unsigned: channel, and keys too": channel(release(INDEX), CH_AND_KEY),
    "unknown-key": by(of_index("b")),
    "unknown-key: another curve": by(signed(STATEMENTS[INDEX], "a-384", curve="SECP384R1")),
    "unknown-key: first rule decides": by(of_index("b"), more=ANY_BY_B),
    "wrong-signature: hint of a trusted key": envelope(HINT, HINT_OF_A, "stranger"),
    "wrong-signature: one bit less": envelope(SIG, flipped),
    "wrong-signature: payload changed after signing": by(
        edited(signed(OF_OTHER, "a"), lambda found: placed(found, PAYLOAD, b64(GOOD)))
    ),
    "wrong-signature: of the bare payload": made(ecdsa),
    "wrong-signature: another hash": made(lambda key, each: ecdsa(key, pae(each), "SHA512")),
    "other-subject: swapped between bundles": by(signed(OF_OTHER, "a")),
    "other-subject: swapped between targets": by(
        signed(OF_OTHER_TARGET, "a"), target=at("sha256:" + "9" * 64)
    ),
    "other-subject: target added to a signed one": by(
        of_index("a"), of_manifest("a"), target=at(OTHER_INDEX, OTHER_MANIFEST)
    ),
    "subject-empty": statement("subject", []),
    "subject-algorithm: sha512 alone": statement(SUBJECT, {"sha512": "1" * 128}),
    "subject-algorithm: in capitals": {
        **statement(SUBJECT, {"sha256": "A" * 64}),
        "target": at("sha256:" + "a" * 64),
    },
    "subject-digest: none": statement("subject.0", {"name": "x"}),
    "subject-count: without end": statement("subject", lambda found: found * 5000),
    "subjects: text": statement("subject", [INDEX]),
    "predicate-type: provenance": by(
        signed(Statement(PROVENANCE_PREDICATE, (SignedSubject(INDEX),)), "a")
    ),
    "predicate-type: release of a channel": by(signed(RELEASE, "a")),
    "statement-type: older": statement("_type", "https://in-toto.io/Statement/v0.1"),
    "statement-json: a key twice": by(signed(GOOD[:-1] + b',"subject":[]}', "a")),
    "statement-json: UTF-16": by(signed(GOOD.decode().encode("utf-16"), "a")),
    "predicate: a list": statement("predicate", []),
    "payload-type": envelope("dsseEnvelope.payloadType", "application/json"),
    "payload-type: changed and signed": envelope(
        "dsseEnvelope",
        lambda f: {**f, "payloadType": "text/plain", "signatures": [{"sig": b64(TEXT_SIGNED)}]},
    ),
    "bundle-type: of another version": envelope(
        "mediaType", "application/vnd.dev.sigstore.bundle+json;version=0.1"
    ),
    "unknown-identity: certificate in place of a key": envelope(
        "verificationMaterial", {"certificate": {"rawBytes": "AAAA"}}
    ),
    "bundle-material: hint is a number": envelope(HINT, 1),
    "bundle-envelope: none": envelope("dsseEnvelope", None),
    "signature-count: none": envelope(SIGNATURES, []),
    "signature-count: too many": envelope(SIGNATURES, lambda x: x * (MAX_SIGNATURES + 1)),
    "signature-size: empty": envelope(SIG, ""),
    "signature-size: huge": envelope(SIG, b64(bytes(257))),
    "signatures: of another alphabet": envelope(SIG, "-_-_"),
    "payload: with line ends": envelope(PAYLOAD, lambda text: f"{text[:40]}\n{text[40:]}"),
    "payload: with bits that nobody reads": envelope(PAYLOAD, "QR=="),
    "bundle-json: key twice": by(of_index("a")[:-1] + b',"mediaType":"x"}'),
    "bundle-json: nested without end": by(b"[" * 100_000),
    "bundle-json: 5000 digits": by(of_index("a")[:-1] + b',"x":' + b"9" * 5000 + b"}"),
    "bundle-json: half a surrogate": by(b'{"mediaType":"\xed\xa0\x80"}'),
    "bundle-json-size: two megabytes": by(of_index("a") + b" " * (2 << 20)),
    "too-many-signatures": by(*[JUNK] * 11, of_index("a"), rule='keys = ["a", "b", "c"]'),
    "referrer-damaged": by(Reason("referrer-damaged", "integrity", "expected sha256:...")),
    "threshold: one of two": two(of_index("a")),
    "threshold: one key twice in one envelope": two(of_index("a", "a")),
    "threshold: two envelopes of one key": two(of_index("a"), of_index("a")),
    "threshold: one key, bundle and target": two(of_index("a"), of_manifest("a")),
    "threshold: second by a key of another rule": two(
        of_index("a"), of_index("c"), more='[[rules]]\nnames = ["other"]\nkeys = ["c"]'
    ),
    "threshold: permissive with an expired key and one missing": by(
        of_index("a"),
        keys=EXPIRED + key_table("b") + key_table("c"),
        rule=f'{PERMISSIVE}["a", "b", "c"]',
    ),
    "threshold: permissive with a revoked bundle and one missing": by(
        of_manifest("a"), rule=f'{PERMISSIVE}["a", "b"]', more=REVOKED
    ),
    "key-expired": by(of_index("a"), keys=EXPIRED),
    "key-expired: now": by(of_index("a"), keys=key_table("a", expires="2026-11-22")),
    "key-revoked": by(of_index("a"), more='[revoked]\nkeys = ["a"]'),
    "key-revoked: by its digest": by(of_index("a"), more=f'[revoked]\nkeys = ["{A.id}"]'),
    "digest-revoked: bundle": by(of_index("a"), more=REVOKED),
    "digest-revoked: target": by(of_index("a"), more=REVOKED.replace(INDEX, MANIFEST)),
    "bundle-revoked: target of a revoked bundle in a new index": by(
        of_manifest("a"), more=REVOKED, target=at(OTHER_INDEX)
    ),
    "bundle-revoked: partial copy": by(of_manifest("a"), more=REVOKED, target=PARTIAL),
    "no-rule": named("demos"),
    "no-rule: name with a line end": named("demo\n"),
    "no-rule: pattern in the middle": {**named("team-a-prod-test"), "names": '["team-*-prod"]'},
    "channel-other": by(of_index("a"), **channel(release(OTHER_INDEX), CH_AND_KEY)),
    "channel-bundle: release of another bundle": channel(release(INDEX, bundle="other")),
    "channel-expired": channel(release(INDEX, expired=LATE)),
    "channel-rollback": channel(Reason("channel-rollback", "authenticity", "older")),
}
"""What is wrong with the scene, by the reason that must refuse and a name."""


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    decision = decided(**CASES[name])
    assert decision.refusal is not None, f"{name} runs"
    assert decision.refusal.case == name.partition(": ")[0], decision.refusal.text
    assert decision.refusal.hint


def reported(*signers, **changes):
    """The reasons that do not keep a bundle from running, which these signed."""
    decision = decided(**changes)
    assert decision.refusal is None, decision.refusal
    assert decision.signers == signers
    return [reason.case for reason in decision.reported]


def as_cosign(found):
    """protojson leaves out empty fields, and the statement has no name and no annotations."""
    del found["dsseEnvelope"]["signatures"][0]["keyid"]
    del found["verificationMaterial"]["tlogEntries"]
    found["verificationMaterial"]["timestampVerificationData"] = {}


def on_curve(curve):
    keys = key_table("a", signer(curve, curve))
    return "a", by(signed(STATEMENTS[INDEX], curve, curve=curve), keys=keys)


THREE = 'keys = ["a", "b", "c"]\nthreshold = 2'
PROVENANCE = signed(Statement(PROVENANCE_PREDICATE, (SignedSubject(INDEX),)), "a")
DAMAGED = Reason("referrer-damaged", "integrity", "damaged")
BESIDE = (b"garbage", of_index("stranger"), PROVENANCE, DAMAGED)
PLAIN = Statement(SIGNATURE_PREDICATE, (SignedSubject(INDEX),))
SHARED = signed(signature_statements(OTHER_INDEX, [("cpu", MANIFEST)])[MANIFEST], "a")
ALLOWED = {
    **{curve: on_curve(curve) for curve in ("SECP256R1", "SECP384R1", "SECP521R1")},
    "signature of the target": ("a", by(of_manifest("a"))),
    "copy of one target with its own signature": ("a", by(of_manifest("a"), target=PARTIAL)),
    "garbage beside a good one": ("a", by(*BESIDE, of_index("a"))),
    "bad signature beside a good one in one envelope": ("a", by(of_index("stranger", "a"))),
    "two keys wherever they signed": ("ab", by(of_index("a"), of_manifest("b"), rule=THREE)),
    "as cosign itself makes it": ("a", by(edited(signed(PLAIN, "a"), as_cosign))),
    "one expired key of two": (
        "b",
        by(of_index("a", "b"), keys=EXPIRED + key_table("b"), rule='keys = ["a", "b"]'),
    ),
    "skip": ("", {"rule": 'level = "skip"'}),
    "target of two bundles of which one is revoked": (
        "a",
        by(of_manifest("a"), SHARED, more=REVOKED, target=at(OTHER_INDEX)),
    ),
    "any name": ("a", {**named("anything\nat all"), "names": '["*"]'}),
    "beginning of a name": ("a", {**named("team-"), "names": '["team-*"]'}),
    "parts of a name": ("a", {**named("a-b-b-c"), "names": '["a*b*c"]'}),
    "second name": ("a", {**named("demo"), "names": '["x", "de*"]'}),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name):
    signers, changes = ALLOWED[name]
    assert not reported(*signers, **changes)


def test_the_current_release_is_named_and_lenient_levels_report():
    for digest in (INDEX, MANIFEST):
        found = decided(**channel(release(digest)))
        assert (found.refusal, found.release) == (None, CurrentRelease("stable", 3, ("a",)))
    audit, permissive = 'level = "audit"\nkeys = ["a"]', 'level = "permissive"\nkeys = ["a"]'
    assert reported(rule=audit) == ["unsigned"]
    assert reported(**by(of_index("b"), rule=audit)) == ["unknown-key"]
    late = by(of_index("a"), rule=permissive)
    assert reported("a", **late, keys=EXPIRED) == ["key-expired"]
    revoked = f'[revoked]\nkeys = ["a"]\ndigests = ["{INDEX}"]'
    assert reported("a", **late, more=revoked) == ["digest-revoked", "key-revoked"]
    rule = 'level = "permissive"\nchannel = "stable"'
    assert reported(**channel(release(INDEX, expired=LATE), rule)) == ["channel-expired"]


def test_the_encoding_that_is_signed_is_that_of_dsse():
    # The example of the specification (secure-systems-lab/dsse, protocol.md).
    expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert pae(b"hello world", "http://example.com/HelloWorld") == expected
    assert pae("ä".encode(), "ä") == "DSSEv1 2 ä 2 ä".encode()


def with_bits(place, bits):
    content = bytearray(WHOLE)
    content[place] ^= bits
    return bytes(content), GOOD


WHOLE = of_index("a")
CHANGED = st.one_of(
    mutated(json.loads(WHOLE)).map(lambda found: (json.dumps(found).encode(), GOOD)),
    mutated(json.loads(GOOD))
    .map(lambda found: json.dumps(found).encode())
    .map(lambda payload: (signed(payload, "a"), payload)),
    st.builds(with_bits, st.integers(0, len(WHOLE) - 1), st.integers(1, 255)),
)
"""A signature of which any value, any value of the statement or any byte is another, and what is signed."""


@settings(max_examples=examples(300, 500))
@given(CHANGED)
def test_whatever_is_changed_is_refused_or_does_not_matter(changed):
    content, payload = changed
    if decided(attached=[content]).refusal is None:
        assert read_bundle(content).payload == payload
        assert read_statement(payload, SIGNATURE_PREDICATE).about(INDEX) is not None
