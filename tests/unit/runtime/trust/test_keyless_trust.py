"""Keyless signatures: what a policy with identities lets run, offline, and every way to be refused."""

import functools
import json
import socket
from pathlib import Path

import pytest

pytest.importorskip("sigstore", reason="sigstore comes with the extra keyless")

from tests.fake_sigstore import IDENTITY, ISSUER, FakeSigstore, b64
from tests.signers import key_table, signer

from prejit.compiler.base.statement_writing import encode_bundle, encode_statement
from prejit.compiler.signing.bundle_signing import signature_statements
from prejit.runtime.errors import PolicyError
from prejit.runtime.trust.decision import TrustTarget, decide
from prejit.runtime.trust.policy import parse_policy, read_policy
from prejit.runtime.trust.signed_statements import PROVENANCE_PREDICATE, SignedSubject, Statement

INDEX, MANIFEST = "sha256:" + "1" * 64, "sha256:" + "2" * 64
SIGNED = signature_statements(INDEX, [("cpu", MANIFEST)])
STATEMENTS = {digest: encode_statement(each) for digest, each in SIGNED.items()}
SIGSTORE = FakeSigstore()
OTHER = FakeSigstore()


def identity(name="ci", more=""):
    who = f'identity = "{IDENTITY}"\nissuer = "{ISSUER}"\ntrusted_root = "root.json"'
    return f"[identities.{name}]\n{who}\n{more}\n"


RULE = '[[rules]]\nnames = ["demo"]\nidentities = ["ci"]\n'


def policy(text=None, root=None):
    content = root or SIGSTORE.trusted_root()
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    text = text or identity() + RULE
    return parse_policy(text.encode(), "trust.toml", lambda *file: content, Path())


def decided(*signed, by=None, now=None):
    target = TrustTarget("demo", INDEX, MANIFEST)
    attached = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in signed]
    return decide(by or policy(), target, attached, None, now or SIGSTORE.now)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network is asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_signature_of_the_bundle_or_the_target_lets_it_run():
    """Also long after the certificate has expired."""
    for subject in (INDEX, MANIFEST):
        for now in (None, SIGSTORE.now + 1e8):
            decision = decided(SIGSTORE.sign(STATEMENTS[subject]), now=now)
            assert (decision.refusal, decision.signers) == (None, ("ci",)), subject


def test_identities_count_as_signers_and_revoked_or_late_ones_do_not():
    by = policy(key_table("a") + identity() + RULE + 'keys = ["a"]\nthreshold = 2\n')
    keyless, again = (SIGSTORE.sign(STATEMENTS[INDEX]) for _ in range(2))
    keyed = encode_bundle(signer("a").envelope(STATEMENTS[INDEX]))
    assert decided(keyless, keyed, by=by).signers == ("a", "ci")
    for alone in ([keyless], [keyed], [keyless, again]):
        refusal = decided(*alone, by=by).refusal
        assert refusal.case == "threshold"
        assert "of the keys a and the identities ci" in refusal.text
    keys = key_table("a") + '[[rules]]\nnames = ["demo"]\nkeys = ["a"]\n'
    for digest, text, case in (
        (MANIFEST, identity() + RULE + f'[revoked]\ndigests = ["{INDEX}"]\n', "digest-revoked"),
        (MANIFEST, identity(more="expires = 2020-01-01") + RULE, "key-expired"),
        (INDEX, keys, "unknown-identity"),
    ):
        assert decided(SIGSTORE.sign(STATEMENTS[digest]), by=policy(text)).refusal.case == case


def material(signed):
    return signed["verificationMaterial"]


def entry(signed):
    return material(signed)["tlogEntries"][0]


def made(**options):
    return SIGSTORE.sign(STATEMENTS[INDEX], **options)


def swapped(key, payload=STATEMENTS[INDEX]):
    signed, another = made(), SIGSTORE.sign(payload)
    material(signed)[key] = material(another)[key]
    return signed


def edited(change):
    signed = made()
    change(signed)
    return signed


def other_checkpoint(signed):
    proof = entry(signed)["inclusionProof"]
    proof["checkpoint"]["envelope"] = proof["checkpoint"]["envelope"].replace("\n2\n", "\n3\n")


def resigned(signed, signatures):
    signed["dsseEnvelope"].update(signatures=signatures)


THIRD = "sha256:" + "3" * 64
OTHER_SUBJECT = encode_statement(signature_statements(THIRD, [])[THIRD])
PROVENANCE = encode_statement(Statement(PROVENANCE_PREDICATE, (SignedSubject(INDEX),)))
MADE = {
    "another identity": ("unknown-identity", lambda: made(identity="https://ci.example/evil")),
    "an identity that begins alike": ("unknown-identity", lambda: made(identity=IDENTITY + "x")),
    "another issuer": ("unknown-identity", lambda: made(issuer="https://evil.example")),
    "another sigstore": ("keyless", lambda: OTHER.sign(STATEMENTS[INDEX])),
    "logged when the certificate was out of date": ("keyless", lambda: made(late_seconds=601)),
    "a certificate that is not logged": ("keyless", lambda: made(stamped=False)),
    "another target": ("other-subject", lambda: SIGSTORE.sign(OTHER_SUBJECT)),
    "a provenance": ("predicate-type", lambda: SIGSTORE.sign(PROVENANCE)),
    "another type of payload": ("payload-type", lambda: made(payload_type="text/plain")),
    "the entry of another": ("keyless", lambda: swapped("tlogEntries", STATEMENTS[MANIFEST])),
    "the certificate of another signature": ("keyless", lambda: swapped("certificate")),
}
"""What is made in another way: the reason that must refuse it."""
OLDER = "application/vnd.dev.sigstore.bundle+json;version=0.1"
EDITED = {
    "no log entry": lambda s: material(s).pop("tlogEntries"),
    "no inclusion proof": lambda s: entry(s).pop("inclusionProof"),
    "no promise, so no time": lambda s: entry(s).pop("inclusionPromise"),
    "another time": lambda s: entry(s).update(integratedTime=str(int(SIGSTORE.now) + 60)),
    "another root hash": lambda s: entry(s)["inclusionProof"].update(rootHash=b64(b"\0" * 32)),
    "another checkpoint": other_checkpoint,
    "another payload": lambda s: s["dsseEnvelope"].update(payload=b64(STATEMENTS[MANIFEST])),
    "another signature": lambda s: resigned(s, made()["dsseEnvelope"]["signatures"]),
    "a signature twice": lambda s: resigned(s, s["dsseEnvelope"]["signatures"] * 2),
    "bundle-material": lambda s: material(s).update(publicKey={"hint": "a"}),
    "bundle-type": lambda s: s.update(mediaType=OLDER),
    "a certificate that is none": lambda s: material(s).update(certificate={"rawBytes": b64(b"0")}),
}
"""What is changed after it was signed; the name is the reason that must refuse it, or `keyless` is."""
REFUSED = MADE | {
    name: (name if name.startswith("bundle-") else "keyless", functools.partial(edited, change))
    for name, change in EDITED.items()
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    expected, make = REFUSED[name]
    refusal = decided(make()).refusal
    assert refusal.case == expected, refusal.text


WRONG = [
    (identity().replace("identity =", "who ="), None, "expected only identity"),
    (identity() + identity("b"), None, "expected another one than"),
    (identity("b"), None, "expected the name of an identity"),
    *(
        (identity(), root, "trusted_root: expected sigstore's")
        for root in (
            *(b"no", signer("a").public.pem.encode()),
            *({**SIGSTORE.trusted_root(), key: []} for key in ("tlogs", "certificateAuthorities")),
        )
    ),
]


@pytest.mark.parametrize(("text", "root", "message"), WRONG)
def test_a_wrong_policy_or_a_root_without_a_log_or_a_ca_is_an_error(text, root, message):
    with pytest.raises(PolicyError, match=message):
        decided(SIGSTORE.sign(STATEMENTS[INDEX]), by=policy(text + RULE, root))


def test_without_the_package_a_policy_with_identities_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "trust.toml").write_text(identity() + RULE)
    (tmp_path / "root.json").write_text(json.dumps(SIGSTORE.trusted_root()))
    assert read_policy(tmp_path / "trust.toml").rules
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PolicyError, match="expected the package sigstore") as raised:
        read_policy(tmp_path / "trust.toml")
    assert "prejit[keyless]" in str(raised.value.hint)
