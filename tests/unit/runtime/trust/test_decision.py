"""What a policy lets run: every way to be refused by its name, and the few ways to be allowed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from tests.signers import key_table, signer

from prejit.runtime.trust import signed_statements as dsse
from prejit.runtime.trust.channel import (
    Accepted,
    KeySet,
    Outcome,
    Release,
    Verified,
    release_statement,
)
from prejit.runtime.trust.decision import Attached, CurrentRelease, Decision, TrustTarget, decide
from prejit.runtime.trust.policy import Policy, parse_policy
from prejit.runtime.trust.reasons import Reason
from prejit.runtime.trust.signed_statements import (
    MODEL_PREDICATE,
    PROVENANCE_PREDICATE,
    SIGNATURE_PREDICATE,
    Envelope,
    SignedSubject,
    Statement,
    encode_bundle,
    encode_statement,
    pae,
    signature_statements,
)

INDEX, MANIFEST = "sha256:" + "1" * 64, "sha256:" + "2" * 64
OTHER_INDEX, OTHER_MANIFEST = "sha256:" + "3" * 64, "sha256:" + "4" * 64
NOW = datetime(2026, 11, 22, tzinfo=UTC).timestamp()
STATEMENTS = signature_statements(INDEX, [("cpu", MANIFEST)])


def no_file(name: str, of: str, max_bytes: int) -> bytes:
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
    releases: dict[str, Outcome | Reason] = field(default_factory=dict)
    now: float = NOW

    def policy(self) -> Policy:
        text = f"{self.keys}\n[[rules]]\nnames = {self.names}\n{self.rule}\n{self.more}"
        return parse_policy(text.encode(), "trust.toml", no_file, Path())

    def decide(self) -> Decision:
        return decide(self.policy(), self.target, self.attached, self.releases, self.now)


def signed(statement: Statement | bytes, *names: str, curve: str = "SECP256R1") -> bytes:
    """Return a sigstore bundle with a signature of each key."""
    payload = statement if isinstance(statement, bytes) else encode_statement(statement)
    envelopes = [signer(name, curve).envelope(payload) for name in names]
    return encode_bundle(
        Envelope(payload, tuple(e.signatures[0] for e in envelopes), envelopes[0].hint)
    )


def of_index(*names: str) -> bytes:
    return signed(STATEMENTS[INDEX], *names)


def of_manifest(*names: str) -> bytes:
    return signed(STATEMENTS[MANIFEST], *names)


def edited(content: bytes, change: Callable[[Any], None]) -> bytes:
    found = json.loads(content)
    change(found)
    return json.dumps(found).encode()


def repayload(change: Callable[[Any], None], *names: str) -> bytes:
    """Return a bundle whose statement is changed before it is signed."""
    found = json.loads(encode_statement(STATEMENTS[INDEX]))
    change(found)
    return signed(json.dumps(found).encode(), *(names or ("a",)))


CASES: dict[str, tuple[str, Callable[[Scene], None]]] = {}
"""By name: the reason that must refuse, and what is wrong with the scene."""


def case(reason: str) -> Callable[[Callable[[Scene], None]], None]:
    def add(change: Callable[[Scene], None]) -> None:
        assert change.__name__ not in CASES
        CASES[change.__name__] = (reason, change)

    return add


# --- whose signature --------------------------------------------------------------------------------------


@case("unsigned")
def nothing_attached(scene: Scene) -> None:
    pass


@case("unknown-key")
def wrong_key(scene: Scene) -> None:
    scene.attached = [of_index("b")]


@case("unknown-key")
def key_that_no_policy_names(scene: Scene) -> None:
    scene.attached = [of_index("stranger")]


@case("unknown-key")
def key_of_another_curve(scene: Scene) -> None:
    scene.attached = [signed(STATEMENTS[INDEX], "a-384", curve="SECP384R1")]


@case("unknown-key")
def policy_has_another_curve(scene: Scene) -> None:
    scene.keys = key_table("a", signer("a-521", "SECP521R1"))
    scene.attached = [of_index("a")]


@case("wrong-signature")
def hint_of_a_trusted_key_on_a_stranger_signature(scene: Scene) -> None:
    hint = json.loads(of_index("a"))["verificationMaterial"]["publicKey"]["hint"]

    def change(found: Any) -> None:
        found["verificationMaterial"]["publicKey"]["hint"] = hint

    scene.attached = [edited(of_index("stranger"), change)]


@case("wrong-signature")
def signature_of_one_bit_less(scene: Scene) -> None:
    def change(found: Any) -> None:
        sig = bytearray(base64.b64decode(found["dsseEnvelope"]["signatures"][0]["sig"]))
        sig[-1] ^= 1
        found["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(sig).decode()

    scene.attached = [edited(of_index("a"), change)]


@case("wrong-signature")
def payload_changed_after_signing(scene: Scene) -> None:
    statement = encode_statement(Statement(SIGNATURE_PREDICATE, (SignedSubject(OTHER_INDEX),)))

    def change(found: Any) -> None:
        good = encode_statement(STATEMENTS[INDEX])
        found["dsseEnvelope"]["payload"] = base64.b64encode(good).decode()

    scene.attached = [edited(signed(statement, "a"), change)]


@case("wrong-signature")
def signature_of_the_bare_payload(scene: Scene) -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    payload = encode_statement(STATEMENTS[INDEX])
    key = signer("a")
    bare = key.private.sign(payload, ec.ECDSA(hashes.SHA256()))
    scene.attached = [encode_bundle(Envelope(payload, (bare,), key.envelope(payload).hint))]


@case("wrong-signature")
def signature_with_another_hash(scene: Scene) -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    payload = encode_statement(STATEMENTS[INDEX])
    key = signer("a")
    other = key.private.sign(pae(payload), ec.ECDSA(hashes.SHA512()))
    scene.attached = [encode_bundle(Envelope(payload, (other,), key.envelope(payload).hint))]


@case("wrong-signature")
def signature_with_bytes_behind_it(scene: Scene) -> None:
    payload = encode_statement(STATEMENTS[INDEX])
    envelope = signer("a").envelope(payload)
    longer = envelope._replace(signatures=(envelope.signatures[0] + b"\0",))
    scene.attached = [encode_bundle(longer)]


@case("wrong-signature")
def signature_of_zeros(scene: Scene) -> None:
    payload = encode_statement(STATEMENTS[INDEX])
    hint = signer("a").envelope(payload).hint
    zeros = bytes.fromhex("3006020100020100")
    scene.attached = [encode_bundle(Envelope(payload, (zeros,), hint))]


# --- of what ----------------------------------------------------------------------------------------------


@case("other-subject")
def swapped_between_bundles(scene: Scene) -> None:
    scene.attached = [signed(signature_statements(OTHER_INDEX, [])[OTHER_INDEX], "a")]


@case("other-subject")
def swapped_between_targets(scene: Scene) -> None:
    statements = signature_statements(INDEX, [("cpu", MANIFEST), ("gpu", OTHER_MANIFEST)])
    scene.attached = [signed(statements[OTHER_MANIFEST], "a")]
    scene.target = TrustTarget("demo", "sha256:" + "9" * 64, MANIFEST)


@case("unsigned")
def partial_copy_without_its_signature(scene: Scene) -> None:
    scene.target = TrustTarget("demo", MANIFEST, MANIFEST)


@case("other-subject")
def partial_copy_with_the_signature_of_the_whole(scene: Scene) -> None:
    scene.target = TrustTarget("demo", MANIFEST, MANIFEST)
    scene.attached = [of_index("a")]


@case("other-subject")
def target_added_to_a_signed_one(scene: Scene) -> None:
    # The index names a signed manifest and a new one; the machine matches the new one.
    scene.target = TrustTarget("demo", OTHER_INDEX, OTHER_MANIFEST)
    scene.attached = [of_index("a"), of_manifest("a")]


@case("other-subject")
def replayed_from_the_version_before(scene: Scene) -> None:
    scene.target = TrustTarget("demo", OTHER_INDEX, OTHER_MANIFEST)
    scene.attached = [of_index("a")]


@case("subject-empty")
def no_subject(scene: Scene) -> None:
    scene.attached = [repayload(lambda found: found["subject"].clear())]


@case("subject-algorithm")
def subject_of_sha512_alone(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["subject"][0]["digest"] = {"sha512": "1" * 128}

    scene.attached = [repayload(change)]


@case("subject-algorithm")
def subject_with_the_digest_under_another_name(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["subject"][0]["digest"] = {"gitBlob": "1" * 64}

    scene.attached = [repayload(change)]


@case("subject-algorithm")
def subject_in_capitals(scene: Scene) -> None:
    digest = "sha256:" + "a" * 64
    scene.target = TrustTarget("demo", digest, MANIFEST)

    def change(found: Any) -> None:
        found["subject"][0]["digest"] = {"sha256": "A" * 64}

    scene.attached = [repayload(change)]


@case("subject-algorithm")
def subject_with_half_a_digest(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["subject"][0]["digest"] = {"sha256": "1" * 32}

    scene.attached = [repayload(change)]


@case("subject-digest")
def subject_without_digest(scene: Scene) -> None:
    def change(found: Any) -> None:
        del found["subject"][0]["digest"]

    scene.attached = [repayload(change)]


@case("subject-count")
def subjects_without_end(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["subject"] *= 5000

    scene.attached = [repayload(change)]


@case("subjects")
def subject_is_text(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["subject"] = [INDEX]

    scene.attached = [repayload(change)]


@case("subjects")
def subjects_are_no_list(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["subject"] = {"sha256": "1" * 64}

    scene.attached = [repayload(change)]


# --- envelopes of another kind ----------------------------------------------------------------------------


@case("predicate-type")
def provenance_by_the_same_key(scene: Scene) -> None:
    scene.attached = [signed(Statement(PROVENANCE_PREDICATE, (SignedSubject(INDEX),)), "a")]


@case("predicate-type")
def model_signature_by_the_same_key(scene: Scene) -> None:
    scene.attached = [signed(Statement(MODEL_PREDICATE, (SignedSubject(INDEX),)), "a")]


@case("predicate-type")
def release_of_a_channel_by_the_same_key(scene: Scene) -> None:
    payload = release_statement(
        "stable",
        "demo",
        (SignedSubject(INDEX),),
        version=1,
        keys_version=0,
        expires=datetime(2027, 1, 1, tzinfo=UTC),
    )
    scene.attached = [signed(payload, "a")]


@case("statement-type")
def statement_of_an_older_version(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["_type"] = "https://in-toto.io/Statement/v0.1"

    scene.attached = [repayload(change)]


@case("statement-json")
def payload_of_simple_signing_text(scene: Scene) -> None:
    scene.attached = [signed(b"sha256:" + b"1" * 64, "a")]


@case("statement-json")
def statement_with_a_key_twice(scene: Scene) -> None:
    text = encode_statement(STATEMENTS[INDEX])
    scene.attached = [signed(text[:-1] + b',"subject":[]}', "a")]


@case("statement-json")
def statement_in_utf_16(scene: Scene) -> None:
    text = encode_statement(STATEMENTS[INDEX]).decode()
    scene.attached = [signed(text.encode("utf-16"), "a")]


@case("statement-json")
def statement_with_bytes_behind_it(scene: Scene) -> None:
    scene.attached = [signed(encode_statement(STATEMENTS[INDEX]) + b"x", "a")]


@case("predicate")
def predicate_is_a_list(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["predicate"] = []

    scene.attached = [repayload(change)]


@case("payload-type")
def payload_type_changed(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["dsseEnvelope"]["payloadType"] = "application/json"

    scene.attached = [edited(of_index("a"), change)]


@case("payload-type")
def payload_type_changed_and_signed(scene: Scene) -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    payload = encode_statement(STATEMENTS[INDEX])
    sig = signer("a").private.sign(pae(payload, "text/plain"), ec.ECDSA(hashes.SHA256()))

    def change(found: Any) -> None:
        found["dsseEnvelope"]["payloadType"] = "text/plain"
        found["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(sig).decode()

    scene.attached = [edited(of_index("a"), change)]


@case("bundle-type")
def bundle_of_another_version(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["mediaType"] = "application/vnd.dev.sigstore.bundle+json;version=0.1"

    scene.attached = [edited(of_index("a"), change)]


@case("bundle-type")
def bare_envelope(scene: Scene) -> None:
    scene.attached = [json.dumps(json.loads(of_index("a"))["dsseEnvelope"]).encode()]


@case("unknown-identity")
def certificate_in_place_of_a_key(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["verificationMaterial"] = {"certificate": {"rawBytes": "AAAA"}}

    scene.attached = [edited(of_index("a"), change)]


@case("bundle-material")
def hint_is_a_number(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["verificationMaterial"]["publicKey"]["hint"] = 1

    scene.attached = [edited(of_index("a"), change)]


@case("bundle-envelope")
def message_signature_in_place_of_an_envelope(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["messageSignature"] = found.pop("dsseEnvelope")

    scene.attached = [edited(of_index("a"), change)]


@case("signature-count")
def stripped_signatures(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["dsseEnvelope"]["signatures"] = []

    scene.attached = [edited(of_index("a"), change)]


@case("signature-count")
def more_signatures_than_anyone_needs(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["dsseEnvelope"]["signatures"] *= dsse.MAX_SIGNATURES + 1

    scene.attached = [edited(of_index("a"), change)]


@case("signature-size")
def empty_signature(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["dsseEnvelope"]["signatures"][0]["sig"] = ""

    scene.attached = [edited(of_index("a"), change)]


@case("signature-size")
def huge_signature(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(bytes(1000)).decode()

    scene.attached = [edited(of_index("a"), change)]


@case("signatures")
def signature_of_another_alphabet(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["dsseEnvelope"]["signatures"][0]["sig"] = "-_-_"

    scene.attached = [edited(of_index("a"), change)]


@case("signatures")
def signature_is_null(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["dsseEnvelope"]["signatures"] = [None]

    scene.attached = [edited(of_index("a"), change)]


@case("payload")
def payload_with_line_ends(scene: Scene) -> None:
    def change(found: Any) -> None:
        text = found["dsseEnvelope"]["payload"]
        found["dsseEnvelope"]["payload"] = text[:40] + "\n" + text[40:]

    scene.attached = [edited(of_index("a"), change)]


@case("payload")
def payload_with_bits_that_nobody_reads(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["dsseEnvelope"]["payload"] = "QR=="  # decodes as QQ==

    scene.attached = [edited(of_index("a"), change)]


@case("bundle-json")
def bundle_is_no_json(scene: Scene) -> None:
    scene.attached = [b"\x00\x01"]


@case("bundle-json")
def bundle_is_empty(scene: Scene) -> None:
    scene.attached = [b""]


@case("bundle-json")
def bundle_has_a_key_twice(scene: Scene) -> None:
    scene.attached = [of_index("a")[:-1] + b',"mediaType":"x"}']


@case("bundle-json")
def bundle_is_nested_without_end(scene: Scene) -> None:
    scene.attached = [b"[" * 100_000]


@case("bundle-json")
def bundle_is_nested_more_than_it_needs(scene: Scene) -> None:
    scene.attached = [of_index("a")[:-1] + b',"x":' + b"[" * 40 + b"]" * 40 + b"}"]


@case("bundle-json")
def bundle_with_a_number_of_5000_digits(scene: Scene) -> None:
    scene.attached = [of_index("a")[:-1] + b',"x":' + b"9" * 5000 + b"}"]


@case("bundle-json")
def bundle_with_half_a_surrogate(scene: Scene) -> None:
    scene.attached = [b'{"mediaType":"\xed\xa0\x80"}']


@case("bundle-json-size")
def bundle_of_two_megabytes(scene: Scene) -> None:
    scene.attached = [of_index("a") + b" " * (2 << 20)]


@case("too-many-signatures")
def signatures_that_cost_too_much(scene: Scene) -> None:
    def change(found: Any) -> None:
        found["dsseEnvelope"]["signatures"] *= dsse.MAX_SIGNATURES

    junk = edited(of_index("stranger"), change)
    scene.rule = 'keys = ["a", "b", "c"]'
    scene.attached = [*[junk] * 11, of_index("a")]


@case("referrer-damaged")
def attached_blob_is_damaged(scene: Scene) -> None:
    scene.attached = [Reason("referrer-damaged", "integrity", "expected sha256:…, found another")]


# --- thresholds -------------------------------------------------------------------------------------------


@case("threshold")
def one_of_two(scene: Scene) -> None:
    scene.rule = 'keys = ["a", "b"]\nthreshold = 2'
    scene.attached = [of_index("a")]


@case("threshold")
def two_signatures_of_one_key_in_one_envelope(scene: Scene) -> None:
    scene.rule = 'keys = ["a", "b"]\nthreshold = 2'
    scene.attached = [of_index("a", "a")]


@case("threshold")
def two_envelopes_of_one_key(scene: Scene) -> None:
    scene.rule = 'keys = ["a", "b"]\nthreshold = 2'
    scene.attached = [of_index("a"), of_index("a")]


@case("threshold")
def one_key_signs_the_bundle_and_the_target(scene: Scene) -> None:
    scene.rule = 'keys = ["a", "b"]\nthreshold = 2'
    scene.attached = [of_index("a"), of_manifest("a")]


@case("threshold")
def second_signature_is_of_another_bundle(scene: Scene) -> None:
    scene.rule = 'keys = ["a", "b"]\nthreshold = 2'
    other = signature_statements(OTHER_INDEX, [])[OTHER_INDEX]
    scene.attached = [of_index("a"), signed(other, "b")]


@case("threshold")
def second_signature_by_a_key_of_another_rule(scene: Scene) -> None:
    scene.rule = 'keys = ["a", "b"]\nthreshold = 2'
    scene.more = '[[rules]]\nnames = ["other"]\nkeys = ["c"]'
    scene.attached = [of_index("a"), of_index("c")]


@case("threshold")
def second_signature_is_garbage(scene: Scene) -> None:
    scene.rule = 'keys = ["a", "b"]\nthreshold = 2'
    scene.attached = [of_index("a"), b"garbage"]


# --- expiry and revocation --------------------------------------------------------------------------------


@case("key-expired")
def expired_key(scene: Scene) -> None:
    scene.keys = key_table("a", expires="2026-11-21")
    scene.attached = [of_index("a")]


@case("key-expired")
def key_expires_at_this_moment(scene: Scene) -> None:
    scene.keys = key_table("a", expires="2026-11-22")
    scene.attached = [of_index("a")]


@case("key-expired")
def one_of_two_keys_expired(scene: Scene) -> None:
    scene.keys = key_table("a", expires="2026-11-21") + key_table("b")
    scene.rule = 'keys = ["a", "b"]\nthreshold = 2'
    scene.attached = [of_index("a", "b")]


@case("key-revoked")
def revoked_key(scene: Scene) -> None:
    scene.more = '[revoked]\nkeys = ["a"]'
    scene.attached = [of_index("a")]


@case("key-revoked")
def key_revoked_by_its_digest(scene: Scene) -> None:
    scene.more = f'[revoked]\nkeys = ["{signer("a").public.id}"]'
    scene.attached = [of_index("a")]


@case("digest-revoked")
def revoked_bundle(scene: Scene) -> None:
    scene.more = f'[revoked]\ndigests = ["{INDEX}"]'
    scene.attached = [of_index("a")]


@case("digest-revoked")
def revoked_target(scene: Scene) -> None:
    scene.more = f'[revoked]\ndigests = ["{MANIFEST}"]'
    scene.attached = [of_index("a")]


@case("bundle-revoked")
def target_of_a_revoked_bundle_in_a_new_index(scene: Scene) -> None:
    scene.more = f'[revoked]\ndigests = ["{INDEX}"]'
    scene.target = TrustTarget("demo", OTHER_INDEX, MANIFEST)
    scene.attached = [of_manifest("a")]


@case("bundle-revoked")
def partial_copy_of_a_revoked_bundle(scene: Scene) -> None:
    scene.more = f'[revoked]\ndigests = ["{INDEX}"]'
    scene.target = TrustTarget("demo", MANIFEST, MANIFEST)
    scene.attached = [of_manifest("a")]


# --- names and levels -------------------------------------------------------------------------------------


@case("no-rule")
def name_that_no_rule_has(scene: Scene) -> None:
    scene.target = TrustTarget("demos", INDEX, MANIFEST)
    scene.attached = [of_index("a")]


@case("no-rule")
def name_with_other_capitals(scene: Scene) -> None:
    scene.target = TrustTarget("Demo", INDEX, MANIFEST)
    scene.attached = [of_index("a")]


@case("no-rule")
def name_with_a_line_end(scene: Scene) -> None:
    scene.target = TrustTarget("demo\n", INDEX, MANIFEST)
    scene.attached = [of_index("a")]


@case("no-rule")
def name_that_a_pattern_has_only_in_its_middle(scene: Scene) -> None:
    scene.names = '["team-*-prod"]'
    scene.target = TrustTarget("team-a-prod-test", INDEX, MANIFEST)
    scene.attached = [of_index("a")]


@case("unknown-key")
def first_rule_decides_though_a_later_one_would_allow(scene: Scene) -> None:
    scene.more = '[[rules]]\nnames = ["*"]\nkeys = ["b"]'
    scene.attached = [of_index("b")]


@case("unsigned")
def permissive_without_signature(scene: Scene) -> None:
    scene.rule = 'level = "permissive"\nkeys = ["a"]'


@case("threshold")
def permissive_with_an_expired_key_and_one_missing(scene: Scene) -> None:
    scene.keys = key_table("a", expires="2026-11-21") + key_table("b") + key_table("c")
    scene.rule = 'level = "permissive"\nkeys = ["a", "b", "c"]\nthreshold = 2'
    scene.attached = [of_index("a")]


@case("threshold")
def permissive_with_a_revoked_bundle_and_one_missing(scene: Scene) -> None:
    scene.rule = 'level = "permissive"\nkeys = ["a", "b"]\nthreshold = 2'
    scene.more = f'[revoked]\ndigests = ["{INDEX}"]'
    scene.attached = [of_manifest("a")]


@case("wrong-signature")
def audit_with_a_damaged_signature(scene: Scene) -> None:
    scene.rule = 'level = "audit"\nkeys = ["a"]'
    signature_of_one_bit_less_scene = Scene()
    CASES["signature_of_one_bit_less"][1](signature_of_one_bit_less_scene)
    scene.attached = signature_of_one_bit_less_scene.attached


# --- channels ---------------------------------------------------------------------------------------------


def release(
    *digests: str, bundle: str = "demo", expired: Reason | None = None, version: int = 3
) -> Outcome:
    accepted = Accepted(KeySet(0, (signer("a").public,), 1))
    ids = frozenset({signer("a").public.id})
    verified = Verified("sha256:" + "0" * 64, ids, 0, version)
    current = Release(version, bundle, frozenset(digests), NOW + 1)
    return Outcome(current, accepted, expired, (verified,), ids)


def channel(scene: Scene, found: Outcome | Reason, rule: str = 'channel = "stable"') -> None:
    scene.rule = rule
    scene.more = '[channels.stable]\nfile = "stable.json"\nkeys = ["a"]'
    scene.releases = {"stable": found}


@case("channel-other")
def downgraded(scene: Scene) -> None:
    channel(scene, release(OTHER_INDEX, OTHER_MANIFEST), 'keys = ["a"]\nchannel = "stable"')
    scene.attached = [of_index("a")]


@case("channel-bundle")
def release_of_another_bundle(scene: Scene) -> None:
    channel(scene, release(INDEX, bundle="other"))


@case("unsigned")
def channel_without_the_signatures_that_the_rule_wants_too(scene: Scene) -> None:
    channel(scene, release(INDEX), 'keys = ["a"]\nchannel = "stable"')


@case("channel-expired")
def expired_channel(scene: Scene) -> None:
    late = Reason("channel-expired", "expiry", "expired")
    channel(scene, release(INDEX, expired=late))


@case("channel-rollback")
def channel_that_is_refused(scene: Scene) -> None:
    channel(scene, Reason("channel-rollback", "authenticity", "older"))


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    reason, change = CASES[name]
    scene = Scene()
    change(scene)
    decision = scene.decide()
    assert decision.refusal is not None, f"{name} runs"
    assert decision.refusal.case == reason, decision.refusal.text


@pytest.mark.parametrize(
    ("case", "step"),
    [
        ("no-rule", "[[rules]]"),
        ("digest-revoked", "newer"),
        ("key-expired", "again"),
        ("threshold", "other keys"),
        ("unknown-key", "to the rule"),
        ("other-subject", "another build"),
        ("channel-other", "current release"),
        ("channel-rollback", "newest"),
        ("channel-signature", "owner"),
        ("statement-type", "damaged"),
    ],
)
def test_a_refusal_names_the_step_that_helps(case: str, step: str) -> None:
    assert step in Reason(case, "authenticity", "").hint


def test_there_are_as_many_cases_as_promised() -> None:
    assert len(CASES) >= 60


# --- what is allowed --------------------------------------------------------------------------------------


def allowed(scene: Scene, *signers: str) -> Decision:
    decision = scene.decide()
    assert decision.refusal is None, decision.refusal
    assert decision.signers == signers
    return decision


@pytest.mark.parametrize("attached", [of_index, of_manifest])
@pytest.mark.parametrize("curve", ["SECP256R1", "SECP384R1", "SECP521R1"])
def test_a_signature_of_the_bundle_or_of_the_target_will_do(attached: Any, curve: str) -> None:
    statement = STATEMENTS[INDEX if attached is of_index else MANIFEST]
    name = f"a-{curve}"
    scene = Scene(keys=key_table("a", signer(name, curve)))
    scene.attached = [signed(statement, name, curve=curve)]
    assert not allowed(scene, "a").reported


def test_a_copy_of_one_target_needs_only_its_own_signature() -> None:
    scene = Scene(target=TrustTarget("demo", MANIFEST, MANIFEST), attached=[of_manifest("a")])
    allowed(scene, "a")


def test_garbage_beside_a_good_signature_does_no_harm() -> None:
    junk: list[Attached] = [
        b"garbage",
        of_index("stranger"),
        signed(Statement(PROVENANCE_PREDICATE, (SignedSubject(INDEX),)), "a"),
        Reason("referrer-damaged", "integrity", "damaged"),
    ]
    allowed(Scene(attached=[*junk, of_index("a")]), "a")


def test_a_bad_signature_beside_a_good_one_in_one_envelope_does_no_harm() -> None:
    allowed(Scene(attached=[of_index("stranger", "a")]), "a")


def test_two_keys_make_a_threshold_of_two_wherever_they_signed() -> None:
    for attached in ([of_index("a", "b")], [of_index("a"), of_manifest("b")]):
        scene = Scene(rule='keys = ["a", "b", "c"]\nthreshold = 2', attached=list(attached))
        allowed(scene, "a", "b")


def test_a_signature_as_cosign_itself_makes_it_counts() -> None:
    # protojson leaves out empty fields, and the statement has no name and no annotations.
    statement = Statement(SIGNATURE_PREDICATE, (SignedSubject(INDEX),))

    def change(found: Any) -> None:
        del found["dsseEnvelope"]["signatures"][0]["keyid"]
        del found["verificationMaterial"]["tlogEntries"]
        found["verificationMaterial"]["timestampVerificationData"] = {}

    allowed(Scene(attached=[edited(signed(statement, "a"), change)]), "a")


def test_a_second_digest_beside_sha256_does_no_harm() -> None:
    def change(found: Any) -> None:
        found["subject"][0]["digest"]["sha512"] = "0" * 128

    allowed(Scene(attached=[repayload(change)]), "a")


def test_one_expired_key_of_two_does_no_harm_if_one_is_enough() -> None:
    keys = key_table("a", expires="2026-11-21") + key_table("b")
    allowed(Scene(keys=keys, rule='keys = ["a", "b"]', attached=[of_index("a", "b")]), "b")


def test_patterns_match_whole_names() -> None:
    for names, name in (
        ('["*"]', "anything\nat all"),
        ('["team-*"]', "team-"),
        ('["a*b*c"]', "a-b-b-c"),
        ('["x", "de*"]', "demo"),
    ):
        target = TrustTarget(name, INDEX, MANIFEST)
        allowed(Scene(names=names, target=target, attached=[of_index("a")]), "a")


def test_skip_asks_for_nothing() -> None:
    allowed(Scene(rule='level = "skip"'))


def test_audit_reports_and_lets_run() -> None:
    decision = allowed(Scene(rule='level = "audit"\nkeys = ["a"]'))
    assert [reason.case for reason in decision.reported] == ["unsigned"]


def test_audit_reports_an_unknown_key() -> None:
    decision = allowed(Scene(rule='level = "audit"\nkeys = ["a"]', attached=[of_index("b")]))
    assert [reason.case for reason in decision.reported] == ["unknown-key"]


def test_permissive_reports_what_is_late() -> None:
    scene = Scene(rule='level = "permissive"\nkeys = ["a"]', attached=[of_index("a")])
    scene.keys = key_table("a", expires="2026-11-21")
    assert [reason.case for reason in allowed(scene, "a").reported] == ["key-expired"]
    scene.keys, scene.more = key_table("a"), f'[revoked]\nkeys = ["a"]\ndigests = ["{INDEX}"]'
    reported = [reason.case for reason in allowed(scene, "a").reported]
    assert reported == ["digest-revoked", "key-revoked"]


def test_permissive_reports_an_expired_channel() -> None:
    scene = Scene()
    late = Reason("channel-expired", "expiry", "expired")
    channel(scene, release(INDEX, expired=late), 'level = "permissive"\nchannel = "stable"')
    assert [reason.case for reason in allowed(scene).reported] == ["channel-expired"]


def test_a_target_that_two_bundles_share_survives_the_revocation_of_one() -> None:
    other = signature_statements(OTHER_INDEX, [("cpu", MANIFEST)])[MANIFEST]
    scene = Scene(more=f'[revoked]\ndigests = ["{INDEX}"]')
    scene.target = TrustTarget("demo", OTHER_INDEX, MANIFEST)
    scene.attached = [of_manifest("a"), signed(other, "a")]
    allowed(scene, "a")


def test_the_current_release_runs_by_its_index_or_its_manifest() -> None:
    for digest in (INDEX, MANIFEST):
        scene = Scene()
        channel(scene, release(digest))
        assert allowed(scene).release == CurrentRelease("stable", 3, ("a",))
