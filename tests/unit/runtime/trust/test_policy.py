"""A policy that is wrong is an error that names file, key and fix; it is never one that allows more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.signers import key_table, signer, write_policy

from prejit.runtime.errors import PolicyError
from prejit.runtime.trust.policy import Policy, read_policy

RULE = '[[rules]]\nnames = ["demo"]\nkeys = ["a"]\n'
KEY = key_table("a")


def read(tmp_path: Path, *texts: str) -> Policy:
    return read_policy(write_policy(tmp_path / "trust.toml", *texts))


def test_a_whole_policy_is_read(tmp_path: Path) -> None:
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
    assert first.channel is not None
    assert first.channel.file == tmp_path / "stable.json"
    assert first.channel.minimum_version == 3
    assert policy.rule_for("team-x") is first
    assert policy.rule_for("x") is last
    assert policy.revoked_digests == {f"sha256:{'0' * 64}"}


def pem_of(public: object) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return public.public_bytes(encoding, form).decode()  # type: ignore[attr-defined]


WRONG = {
    "empty": ("", "expected at least one \\[\\[rules\\]\\]"),
    "no TOML": ("rules = [", "expected TOML"),
    "unknown key of a rule": (KEY + RULE + "treshold = 2\n", "rules\\[0\\]: expected only names"),
    "misspelt level": (KEY + RULE + 'level = "stric"', "rules\\[0\\].level: expected strict"),
    "unknown key": (KEY + RULE.replace('"a"', '"b"'), "keys: expected the name of a key"),
    "no names": (KEY + '[[rules]]\nnames = []\nkeys = ["a"]', "expected names of bundles"),
    "neither keys nor channel": ('[[rules]]\nnames = ["demo"]', "expected keys, identities or"),
    "skip with keys": (KEY + RULE + 'level = "skip"', "expected no keys"),
    "skip with a description": (
        '[[rules]]\nnames = ["demo"]\nlevel = "skip"\nsbom = true',
        "rules\\[0\\].sbom: expected keys or identities that sign it",
    ),
    "unknown demand": (
        KEY + RULE + 'provenance = { bilder = "x" }',
        "rules\\[0\\].provenance: expected only builder, source, materials",
    ),
    "source is empty": (
        KEY + RULE + "provenance = { source = [] }",
        "provenance.source: expected patterns, found none",
    ),
    "threshold of 0": (KEY + RULE + "threshold = 0", "threshold: expected 1 or more"),
    "threshold above the keys": (KEY + RULE + "threshold = 2", "threshold: expected at most 1"),
    "a key twice in a rule": (KEY + RULE.replace('"a"', '"a", "a"'), "expected each key once"),
    "one key by two names": (KEY + key_table("b", signer("a")) + RULE, "expected another key than"),
    "rule behind all names": (
        KEY + RULE.replace("demo", "*") + RULE,
        "expected `\\*` in the last rule alone",
    ),
    "unknown channel": (KEY + RULE + 'channel = "x"', "channel: expected the name of a channel"),
    "channel without keys": (KEY + RULE + '[channels.x]\nfile = "x"', "expected at least one key"),
    "revoked digest that is none": (
        KEY + RULE + '[revoked]\ndigests = ["sha256:1"]',
        "digests: expected sha256:",
    ),
    "date without zone": (key_table("a", expires="2027-06-30T12:00:00") + RULE, "keys.a.expires"),
    "neither file nor pem": ("[keys.a]\n" + RULE, "expected one of file and pem, found none"),
    "missing file": ('[keys.a]\nfile = "gone.pem"\n' + RULE, "keys.a.file: cannot read"),
    "no PEM": ('[keys.a]\npem = "abc"\n' + RULE, "keys.a.pem: expected a public key"),
    "private key": (
        '[keys.a]\npem = "-----BEGIN PRIVATE KEY-----"\n' + RULE,
        "expected a public key, found a private one",
    ),
    "RSA": (
        f'[keys.a]\npem = """{pem_of(rsa.generate_private_key(65537, 2048).public_key())}"""\n'
        + RULE,
        "expected a key of ECDSA",
    ),
    "secp256k1": (
        f'[keys.a]\npem = """{pem_of(ec.generate_private_key(ec.SECP256K1()).public_key())}"""\n'
        + RULE,
        "found one on secp256k1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_policy_is_an_error_that_names_its_file(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    with pytest.raises(PolicyError, match=message) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(str(tmp_path / "trust.toml"))
    assert raised.value.exit_code == 5
    assert "treshold" not in text or raised.value.hint == "did you mean 'threshold'?"
    assert raised.value.hint


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir])
def test_a_policy_that_cannot_be_read_is_an_error(tmp_path: Path, make: object) -> None:
    make(tmp_path / "trust.toml")  # type: ignore[operator]
    with pytest.raises(PolicyError, match="cannot read"):
        read_policy(tmp_path / "trust.toml")


def test_without_cryptography_no_policy_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(PolicyError, match="expected the package cryptography") as raised:
        read(tmp_path, KEY, RULE)
    assert "pip install 'prejit[trust]'" in (raised.value.hint or "")
