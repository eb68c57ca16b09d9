"""A policy that is wrong is an error that names file, key and fix; it is never one that allows more."""

import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.signers import key_table, signer, write_policy

from prejit.runtime.errors import PolicyError
from prejit.runtime.trust.policy import read_policy

RULE = '[[rules]]\nnames = ["demo"]\nkeys = ["a"]\n'
KEY = key_table("a")


def read(tmp_path, *texts):
    return read_policy(write_policy(tmp_path / "trust.toml", *texts))


def test_a_whole_policy_is_read(tmp_path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "b.pem").write_text(signer("b").public.pem)
    policy = read(
        tmp_path,
        key_table("a", expires="2027-06-30"),
        '[keys.b]\nfile = "keys/b.pem"\nexpires = 2027-06-30T12:00:00+02:00',
        '[[rules]]\nnames = ["demo", "team-*"]\nlevel = "permissive"\nkeys = ["a", "b"]\nthreshold = 2',
        'channel = "stable"',
        '[[rules]]\nnames = ["*"]\nlevel = "skip"',
        '[channels.stable]\nfile = "stable.json"\nkeys = ["b"]\nminimum_version = 3',
        f'[revoked]\nkeys = ["b"]\ndigests = ["sha256:{"0" * 64}"]',
    )
    first, last = policy.rules
    assert (first.level, first.threshold, last.level) == ("permissive", 2, "skip")
    assert [(k.name, k.is_revoked) for k in first.keys] == [("a", False), ("b", True)]
    assert first.keys[1].expires == 1814349600.0
    assert first.channel.file == tmp_path / "stable.json"
    assert first.channel.minimum_version == 3
    assert policy.rule_for("team-x") is first
    assert policy.rule_for("x") is last
    assert policy.revoked_digests == {f"sha256:{'0' * 64}"}


def pem(key):
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    text = key.public_key().public_bytes(encoding, form).decode()
    return f'[keys.a]\npem = """{text}"""\n'


GOOD, DEMO = KEY + RULE, '[[rules]]\nnames = ["demo"]\n'
PRIVATE = '[keys.a]\npem = "-----BEGIN PRIVATE KEY-----"\n'
WRONG = [
    ("", r"expected at least one \[\[rules\]\]"),
    ("rules = [", "expected TOML"),
    (GOOD + "treshold = 2\n", r"rules\[0\]: expected only names"),
    (GOOD + 'level = "stric"', r"rules\[0\].level: expected strict"),
    (KEY + RULE.replace('"a"', '"b"'), "keys: expected the name of a key"),
    (KEY + RULE.replace('"demo"', ""), "expected names of bundles"),
    (DEMO, "expected keys, identities or"),
    (GOOD + 'level = "skip"', "expected no keys"),
    (DEMO + 'level = "skip"\nsbom = true', r"rules\[0\].sbom: expected keys or identities that"),
    (GOOD + 'provenance = { bilder = "x" }', "expected only builder, source, materials"),
    (GOOD + "provenance = { source = [] }", "provenance.source: expected patterns, found none"),
    (GOOD + "threshold = 0", "threshold: expected 1 or more"),
    (GOOD + "threshold = 2", "threshold: expected at most 1"),
    (KEY + RULE.replace('"a"', '"a", "a"'), "expected each key once"),
    (KEY + key_table("b", signer("a")) + RULE, "expected another key than"),
    (KEY + RULE.replace("demo", "*") + RULE, r"expected `\*` in the last rule alone"),
    (GOOD + 'channel = "x"', "channel: expected the name of a channel"),
    (GOOD + '[channels.x]\nfile = "x"', "expected at least one key"),
    (GOOD + '[channels.x]\nfile = "\\u0000"\nkeys = ["a"]', "x.file: .* found one with a NUL"),
    (GOOD + '[revoked]\ndigests = ["sha256:1"]', "digests: expected sha256:"),
    (key_table("a", expires="2027-06-30T12:00:00") + RULE, "keys.a.expires"),
    ("[keys.a]\n" + RULE, "expected one of file and pem, found none"),
    ('[keys.a]\nfile = "gone.pem"\n' + RULE, "keys.a.file: cannot read"),
    ('[keys.a]\npem = "abc"\n' + RULE, "keys.a.pem: expected a public key"),
    (PRIVATE + RULE, "expected a public key, found a private one"),
    (pem(rsa.generate_private_key(65537, 2048)) + RULE, "expected a key of ECDSA"),
    (pem(ec.generate_private_key(ec.SECP256K1())) + RULE, "found one on secp256k1"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_policy_is_an_error_that_names_its_file(text, message, tmp_path):
    with pytest.raises(PolicyError, match=message) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(str(tmp_path / "trust.toml"))
    assert raised.value.exit_code == 5
    assert "treshold" not in text or raised.value.hint == "did you mean 'threshold'?"
    assert raised.value.hint


def test_a_policy_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "trust.toml"
    for make in (lambda path: None, Path.mkdir):
        make(path)
        with pytest.raises(PolicyError, match="cannot read"):
            read_policy(path)
    path.rmdir()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(PolicyError, match="expected the package cryptography") as raised:
        read(tmp_path, KEY, RULE)
    assert "pip install 'prejit[trust]'" in (raised.value.hint or "")
