"""Signing as an identity: by a CA and a log that run here, and what is said when there is no identity."""

import json

import pytest

pytest.importorskip("sigstore", reason="sigstore comes with the extra keyless")

from tests.fake_sigstore import IDENTITY, ISSUER, FakeSigstore, client_config, token
from tests.ports import free_port

from prejit.compiler.signing.bundle_signing import sign
from prejit.compiler.signing.signers import TOKEN_VARIABLE, keyless_signer
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import NetworkError, StoreError, UntrustedError, UsageError
from prejit.runtime.trust.enforcing import verify_policies

SIGSTORE = FakeSigstore()


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "sigstore.json"
    with SIGSTORE.serving() as text:
        path.write_text(text)
        yield path


def policy(directory, identity=IDENTITY):
    (directory / "root.json").write_text(json.dumps(SIGSTORE.trusted_root()))
    path = directory / "trust.toml"
    path.write_text(
        f'[identities.ci]\nidentity = "{identity}"\nissuer = "{ISSUER}"\n'
        'trusted_root = "root.json"\n[[rules]]\nnames = ["*"]\nidentities = ["ci"]\n'
    )
    return str(path)


def test_a_policy_names_an_identity(bundle_dir, config, tmp_path, monkeypatch, ran):
    other = sign(bundle_dir, keyless_signer(token(identity="https://ci.example/b"), config))
    monkeypatch.setenv(TOKEN_VARIABLE, token())
    printed = ran("sign", bundle_dir, "--keyless", "--sigstore", config, "--json")
    signed = json.loads(printed.out)
    assert signed["added"] == other.added == len(signed["subjects"])
    assert signed["key"] == f"{ISSUER} {IDENTITY}"
    assert f"as {ISSUER} {IDENTITY}" in printed.err
    verdicts = verify_policies(bundle_dir, [policy(tmp_path)])
    assert {verdict.decision.signers for verdict in verdicts} == {("ci",)}
    with pytest.raises(UntrustedError, match="unknown-identity"):
        verify_policies(bundle_dir, [policy(tmp_path, "somebody@example.com")])
    assert sign(bundle_dir, keyless_signer(token(), config)).added == 0, "it has signed all"


def test_what_cannot_sign_is_refused(tmp_path, monkeypatch):
    config = tmp_path / "sigstore.json"
    config.write_text("{}")
    for given in ("", "no token", token(seconds=-60), token(audience="another")):
        with pytest.raises(UsageError, match="expected an identity token") as raised:
            keyless_signer(given, config)
        assert TOKEN_VARIABLE in str(raised.value.hint)
    with pytest.raises(StoreError, match="gone: cannot read: No such file"):
        keyless_signer(token(), tmp_path / "gone")
    with pytest.raises(UsageError, match="expected the client configuration of sigstore"):
        keyless_signer(token(), config)
    for options in ((), ("--key", "a.pem", "--keyless"), ("--key", "a.pem", "--sigstore", "a")):
        with pytest.raises(UsageError, match=r"expected one of|expected --keyless beside"):
            run(["sign", "bundle", *options])
    monkeypatch.setattr("id.detect_credential", lambda audience: None)
    with pytest.raises(UsageError, match="expected an identity to sign with, found none") as raised:
        keyless_signer(None, None)
    assert "id-token: write" in str(raised.value.hint)


def test_services_that_do_not_answer_or_of_another_ca_sign_nothing(tmp_path):
    config = tmp_path / "sigstore.json"
    url = f"http://127.0.0.1:{free_port()}"
    config.write_text(json.dumps(client_config(url, SIGSTORE.trusted_root())))
    with pytest.raises(NetworkError, match="expected sigstore to answer"):
        keyless_signer(token(), config)
    with SIGSTORE.serving() as text:
        found = json.loads(text) | {"trustedRoot": FakeSigstore().trusted_root()}
        config.write_text(json.dumps(found))
        with pytest.raises(NetworkError, match="SCT"):
            keyless_signer(token(), config)
