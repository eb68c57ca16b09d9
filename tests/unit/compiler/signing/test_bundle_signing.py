"""Keys that cannot sign are refused with the next step, and signatures are of the files that are there."""

import json

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from tests.layouts import blob, index_of
from tests.signers import private_pem, signer

from prejit.compiler.signing.bundle_signing import files_of, sign
from prejit.compiler.signing.signers import parse_private_key, read_private_key
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format.names import PARTS_MEDIA_TYPE

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
PLAIN = serialization.NoEncryption()


def test_what_is_no_key_is_refused_and_an_encrypted_one_needs_its_password(ran, tmp_path):
    assert "hint: --key FILE signs with a private key" in ran("sign", tmp_path, status=2).err
    refused = ran("sign", "oci://host/demo:v1", "--key", tmp_path, status=2).err
    assert "prejit copy oci://host/demo:v1 DIRECTORY" in refused
    with pytest.raises(UsageError, match="found a plain one") as raised:
        parse_private_key(private_pem("a"), "key", "sesame")
    assert "unset PREJIT_KEY_PASSWORD" in str(raised.value.hint)
    ed = ed25519.Ed25519PrivateKey.generate().private_bytes(PEM, PKCS8, PLAIN)
    for pem in (b"", b"no key", signer("a").public.pem.encode(), ed):
        with pytest.raises(UsageError, match=r"^key: expected") as raised:
            parse_private_key(pem, "key")
        assert raised.value.hint
    with pytest.raises(UsageError, match="secp256k1") as raised:
        parse_private_key(private_pem("a", "SECP256K1"), "key")
    assert "make one" in str(raised.value.hint)
    with pytest.raises(StoreError, match="cannot read a key"):
        read_private_key(tmp_path / "gone.pem")
    secret, key = serialization.BestAvailableEncryption(b"sesame"), ec.SECP256R1()
    for form in (PKCS8, serialization.PrivateFormat.TraditionalOpenSSL):
        pem = ec.generate_private_key(key).private_bytes(PEM, form, secret)
        assert parse_private_key(pem, "key", "sesame").sign(b"x")
        encrypted = "because the key is encrypted, found none"
        for password, found in ((None, encrypted), ("wrong", "found a wrong one")):
            with pytest.raises(UsageError, match=f"^key: expected .*{found}") as raised:
                parse_private_key(pem, "key", password)
            assert raised.value.hint == "set PREJIT_KEY_PASSWORD to the key's password"


def test_an_error_after_signatures_were_attached_says_so(bundle_dir):
    beside = bundle_dir.with_name(f"{bundle_dir.name}.sig")
    beside.mkdir()
    with pytest.raises(StoreError, match=r"cannot write: .* signatures were attached to") as raised:
        sign(bundle_dir, signer("a"))
    assert "then sign again" in raised.value.hint
    beside.rmdir()
    assert not sign(bundle_dir, signer("a")).added  # they have stayed
    assert beside.is_file()


def damaged_file(bundle, kind):
    listed = json.loads((bundle / "index.json").read_bytes())["manifests"]
    at = index_of(bundle)["manifests"][0]
    if kind == "list of parts":
        at = next(each for each in listed if each.get("artifactType") == PARTS_MEDIA_TYPE)
    manifest = json.loads(blob(bundle, at["digest"]).read_bytes())
    file = blob(bundle, max(manifest["layers"], key=lambda each: each["size"])["digest"])
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return file


@pytest.mark.parametrize("kind", ["list of parts", "weights"])
def test_a_damaged_bundle_is_vouched_for(kind, recipe, tmp_path, ran):
    bundle = recipe.write_described(tmp_path / "bundle")
    file = damaged_file(bundle, kind)
    before = (bundle / "index.json").read_bytes()
    key, channel = tmp_path / "key.pem", tmp_path / "stable.json"
    key.write_bytes(private_pem("a"))
    for command in (
        ("sign", bundle, "--key", key),
        ("channel", "release", channel, bundle, "--name", "x", "--key", key),
        ("rebuild", "--verify", bundle),
    ):
        assert str(file) in ran(*command, status=RejectError.exit_code).err
    assert (bundle / "index.json").read_bytes() == before
    assert not channel.exists()
    assert not bundle.with_name("bundle.sig").exists()


def test_only_files_of_the_bundle_are_signed(bundle_dir):
    assert files_of(bundle_dir)
    for name in ("notes.txt", "blobs/sha256/short", "blobs/other"):
        (bundle_dir / name).write_text("x")
        with pytest.raises(RejectError, match="expected files of the bundle alone"):
            files_of(bundle_dir)
        (bundle_dir / name).unlink()
    file = next((bundle_dir / "blobs" / "sha256").iterdir())
    file.with_name("f" * 64).symlink_to(file)
    with pytest.raises(RejectError, match="symbolic link"):
        files_of(bundle_dir)
    file.with_name("f" * 64).unlink()
    assert sign(bundle_dir, signer("a")).added
    for leftover in (".index.json.1.0badcafe.tmp", "blobs/sha256/.0123.1.0badcafe.tmp"):
        (bundle_dir / leftover).write_text("half")
    assert not sign(bundle_dir, signer("a")).added
    assert not list(bundle_dir.rglob("*.tmp"))
