"""What a policy lets run: every way to be refused by its name, and the few ways to be allowed."""

import base64
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.signers import key_table, signer

from prejit.compiler.base.statement_writing import encode_bundle, encode_statement
from prejit.compiler.signing.bundle_signing import signature_statements
from prejit.compiler.signing.channels import release_statement
from prejit.runtime.trust import signed_statements as dsse
from prejit.runtime.trust.channel import Accepted, KeySet, Outcome, Release, Verified
from prejit.runtime.trust.decision import Attached, CurrentRelease, TrustTarget, decide
from prejit.runtime.trust.policy import parse_policy
from prejit.runtime.trust.reasons import Reason
from prejit.runtime.trust.signed_statements import (
    PROVENANCE_PREDICATE,
    SIGNATURE_PREDICATE,
    Envelope,
    SignedSubject,
    Statement,
    pae,
)

INDEX, MANIFEST = "sha256:" + "1" * 64, "sha256:" + "2" * 64
OTHER_INDEX, OTHER_MANIFEST = "sha256:" + "3" * 64, "sha256:" + "4" * 64
NOW = datetime(2026, 11, 22, tzinfo=UTC).timestamp()
STATEMENTS = signature_statements(INDEX, [("cpu", MANIFEST)])


def no_file(name, of, max_bytes):
    raise AssertionError(f"{of}: {name} is read")


@dataclass
class Scene:
    """A bundle, what is attached to it, and a policy: by default everything is right."""

    rule: str = 'keys = ["a"]'
    keys: str = key_table("a") + key_table("b") + key_table("c")
    more: str = ""
    names: str = '["demo"]'
    target: TrustTarget = field(default_factory=lambda: TrustTarget("demo", INDEX, MANIFEST))
    attached: list[Attached] = field(default_factory=list)
    current: Outcome | Reason | None = None
    now: float = NOW

    def policy(self):
        text = f"{self.keys}\n[[rules]]\nnames = {self.names}\n{self.rule}\n{self.more}"
        return parse_policy(text.encode(), "trust.toml", no_file, Path())

    def decide(self):
        return decide(self.policy(), self.target, self.attached, self.current, self.now)


def signed(statement, *names, curve="SECP256R1"):
    payload = statement if isinstance(statement, bytes) else encode_statement(statement)
    envelopes = [signer(name, curve).envelope(payload) for name in names]
    return encode_bundle(
        Envelope(payload, tuple(e.signatures[0] for e in envelopes), envelopes[0].hint)
    )


def of_index(*names):
    return signed(STATEMENTS[INDEX], *names)


def of_manifest(*names):
    return signed(STATEMENTS[MANIFEST], *names)


def edited(content, change):
    found = json.loads(content)
    change(found)
    return json.dumps(found).encode()


def repayload(change, *names):
    found = json.loads(encode_statement(STATEMENTS[INDEX]))
    change(found)
    return signed(json.dumps(found).encode(), *(names or ("a",)))


def placed(found, place, value):
    """Put a value at a place such as `dsseEnvelope.signatures.0.sig`; a function makes it of the old one."""
    *path, last = (int(key) if key.isdigit() else key for key in place.split("."))
    for key in path:
        found = found[key]
    found[last] = value(found[last]) if callable(value) else value


def envelope(place, value, by="a"):
    return {"attached": [edited(of_index(by), lambda found: placed(found, place, value))]}


def statement(place, value):
    return {"attached": [repayload(lambda found: placed(found, place, value))]}


def made(signature):
    """A signature of the right payload, with the hint of the right key, that is made in another way."""
    payload, key = encode_statement(STATEMENTS[INDEX]), signer("a")
    content = encode_bundle(
        Envelope(payload, (signature(key, payload),), key.envelope(payload).hint)
    )
    return {"attached": [content]}


def ecdsa(key, message, algorithm="SHA256"):
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return key.private.sign(message, ec.ECDSA(getattr(hashes, algorithm)()))


def by(*contents, **changes):
    return {"attached": [*contents], **changes}


def two(*contents, **changes):
    return by(*contents, **{"rule": 'keys = ["a", "b"]\nthreshold = 2', **changes})


def b64(content):
    return base64.b64encode(content).decode()


def release(*digests, bundle="demo", expired=None, version=3):
    accepted, ids = Accepted(KeySet(0, (A,), 1)), frozenset({A.id})
    verified = Verified("sha256:" + "0" * 64, ids, 0, version)
    current = Release(version, bundle, frozenset(digests), NOW + 1)
    return Outcome(current, accepted, expired, (verified,), ids)


def channel(found, rule='channel = "stable"'):
    more = '[channels.stable]\nfile = "stable.json"\nkeys = ["a"]'
    return {"rule": rule, "more": more, "current": found}


def named(name):
    return by(of_index("a"), target=TrustTarget(name, INDEX, MANIFEST))


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
    *("stable", "demo", (SignedSubject(INDEX),)),
    version=1,
    keys_version=0,
    expires=datetime(2027, 1, 1, tzinfo=UTC),
)
TEXT_SIGNED = ecdsa(signer("a"), pae(GOOD, "text/plain"))
BIT_LESS = envelope(
    SIG, lambda text: b64(base64.b64decode(text)[:-1] + bytes([base64.b64decode(text)[-1] ^ 1]))
)
JUNK = edited(
    of_index("stranger"),
    lambda found: placed(found, "dsseEnvelope.signatures", lambda x: x * dsse.MAX_SIGNATURES),
)
REVOKED = f'[revoked]\ndigests = ["{INDEX}"]'
EXPIRED = key_table("a", expires="2026-11-21")
PARTIAL = TrustTarget("demo", MANIFEST, MANIFEST)
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
    "wrong-signature: one bit less": BIT_LESS,
    "wrong-signature: payload changed after signing": by(
        edited(signed(OF_OTHER, "a"), lambda f: placed(f, "dsseEnvelope.payload", b64(GOOD)))
    ),
    "wrong-signature: of the bare payload": made(ecdsa),
    "wrong-signature: another hash": made(lambda key, each: ecdsa(key, pae(each), "SHA512")),
    "other-subject: swapped between bundles": by(signed(OF_OTHER, "a")),
    "other-subject: swapped between targets": by(
        signed(OF_OTHER_TARGET, "a"), target=TrustTarget("demo", "sha256:" + "9" * 64, MANIFEST)
    ),
    "other-subject: target added to a signed one": by(
        of_index("a"), of_manifest("a"), target=TrustTarget("demo", OTHER_INDEX, OTHER_MANIFEST)
    ),
    "subject-empty": statement("subject", []),
    "subject-algorithm: sha512 alone": statement(SUBJECT, {"sha512": "1" * 128}),
    "subject-algorithm: in capitals": {
        **statement(SUBJECT, {"sha256": "A" * 64}),
        "target": TrustTarget("demo", "sha256:" + "a" * 64, MANIFEST),
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
    "signature-count: too many": envelope(SIGNATURES, lambda x: x * (dsse.MAX_SIGNATURES + 1)),
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
        of_manifest("a"), more=REVOKED, target=TrustTarget("demo", OTHER_INDEX, MANIFEST)
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
    decision = Scene(**CASES[name]).decide()
    assert decision.refusal is not None, f"{name} runs"
    assert decision.refusal.case == name.partition(": ")[0], decision.refusal.text
    assert decision.refusal.hint


def allowed(scene, *signers):
    decision = scene.decide()
    assert decision.refusal is None, decision.refusal
    assert decision.signers == signers
    return decision


def as_cosign(found):
    """protojson leaves out empty fields, and the statement has no name and no annotations."""
    del found["dsseEnvelope"]["signatures"][0]["keyid"]
    del found["verificationMaterial"]["tlogEntries"]
    found["verificationMaterial"]["timestampVerificationData"] = {}


CURVES = ("SECP256R1", "SECP384R1", "SECP521R1")
THREE = 'keys = ["a", "b", "c"]\nthreshold = 2'
PROVENANCE = signed(Statement(PROVENANCE_PREDICATE, (SignedSubject(INDEX),)), "a")
DAMAGED = Reason("referrer-damaged", "integrity", "damaged")
PLAIN = Statement(SIGNATURE_PREDICATE, (SignedSubject(INDEX),))
SHARED = signature_statements(OTHER_INDEX, [("cpu", MANIFEST)])[MANIFEST]
ALLOWED = {
    **{
        curve: (
            ("a",),
            by(
                signed(STATEMENTS[INDEX], curve, curve=curve),
                keys=key_table("a", signer(curve, curve)),
            ),
        )
        for curve in CURVES
    },
    "signature of the target": (("a",), by(of_manifest("a"))),
    "copy of one target with its own signature": (("a",), by(of_manifest("a"), target=PARTIAL)),
    "garbage beside a good one": (
        ("a",),
        by(b"garbage", of_index("stranger"), PROVENANCE, DAMAGED, of_index("a")),
    ),
    "bad signature beside a good one in one envelope": (("a",), by(of_index("stranger", "a"))),
    "two keys wherever they signed": (("a", "b"), by(of_index("a"), of_manifest("b"), rule=THREE)),
    "as cosign itself makes it": (("a",), by(edited(signed(PLAIN, "a"), as_cosign))),
    "one expired key of two": (
        ("b",),
        by(of_index("a", "b"), keys=EXPIRED + key_table("b"), rule='keys = ["a", "b"]'),
    ),
    "skip": ((), {"rule": 'level = "skip"'}),
    "target of two bundles of which one is revoked": (
        ("a",),
        by(
            of_manifest("a"),
            signed(SHARED, "a"),
            more=REVOKED,
            target=TrustTarget("demo", OTHER_INDEX, MANIFEST),
        ),
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name):
    signers, changes = ALLOWED[name]
    assert not allowed(Scene(**changes), *signers).reported


def test_whole_names_the_current_release_and_lenient_levels_are_allowed():
    for names, name in (
        ('["*"]', "anything\nat all"),
        ('["team-*"]', "team-"),
        ('["a*b*c"]', "a-b-b-c"),
        ('["x", "de*"]', "demo"),
    ):
        target = TrustTarget(name, INDEX, MANIFEST)
        allowed(Scene(names=names, target=target, attached=[of_index("a")]), "a")
    for digest in (INDEX, MANIFEST):
        scene = Scene(**channel(release(digest)))
        assert allowed(scene).release == CurrentRelease("stable", 3, ("a",))

    def reported(*signers, **changes):
        return [reason.case for reason in allowed(Scene(**changes), *signers).reported]

    for attached, case in (([], "unsigned"), ([of_index("b")], "unknown-key")):
        assert reported(rule='level = "audit"\nkeys = ["a"]', attached=attached) == [case]
    late = {"rule": 'level = "permissive"\nkeys = ["a"]', "attached": [of_index("a")]}
    assert reported("a", **late, keys=EXPIRED) == ["key-expired"]
    revoked = f'[revoked]\nkeys = ["a"]\ndigests = ["{INDEX}"]'
    assert reported("a", **late, more=revoked) == ["digest-revoked", "key-revoked"]
    rule = 'level = "permissive"\nchannel = "stable"'
    assert reported(**channel(release(INDEX, expired=LATE), rule)) == ["channel-expired"]
