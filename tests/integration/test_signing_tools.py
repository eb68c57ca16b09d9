"""What `prejit sign` writes is verified by the tools of others: model_signing, securesystemslib, openssl.

They have dependencies that other packages here cannot share, so they are in an environment of their own,
`.venv-tools`, which `make test` makes.
"""

import base64
import json
from pathlib import Path

import pytest
from tests.processes import ran

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from tests.layouts import attached_to, blob
from tests.signers import signer

from prejit.compiler.signing.bundle_signing import sign
from prejit.runtime.format.names import SIGNATURE_MEDIA_TYPE
from prejit.runtime.trust.signed_statements import pae

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-tools" / "bin" / "python"
VERIFY = """
import base64, json, sys
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import STATEMENT_TYPE_URI
from in_toto_attestation.v1 import statement_pb2
from google.protobuf import json_format
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey
from sigstore_models.bundle.v1 import Bundle
from cryptography.hazmat.primitives.serialization import load_pem_public_key

pem = open(sys.argv[1], "rb").read()
key = SSlibKey.from_crypto(load_pem_public_key(pem))
for path in sys.argv[2:]:
    text = open(path).read()
    bundle = Bundle.from_json(text)
    assert bundle.media_type == "application/vnd.dev.sigstore.bundle.v0.3+json"
    plain = json.loads(text)["dsseEnvelope"]
    plain["signatures"][0]["keyid"] = key.keyid  # by which this library looks for the key
    envelope = Envelope.from_dict(plain)
    assert envelope.payload_type == "application/vnd.in-toto+json"
    assert envelope.verify([key], 1)
    found = json_format.Parse(envelope.payload, statement_pb2.Statement())
    assert found.type == STATEMENT_TYPE_URI
    for subject in found.subject:  # the whole would need a predicate, which cosign leaves empty
        ResourceDescriptor.copy_from_pb(subject).validate()
    assert found.predicate_type == "https://sigstore.dev/cosign/sign/v1"
    print(found.subject[0].digest["sha256"])
"""

pytestmark = pytest.mark.skipif(
    not TOOLS.exists(), reason="no .venv-tools: `make .venv-tools/.ready` makes it"
)


@pytest.fixture
def signed(bundle_dir):
    return sign(bundle_dir, signer("a"))


@pytest.fixture
def public(tmp_path):
    (tmp_path / "a.pub.pem").write_text(signer("a").public.pem)
    return tmp_path / "a.pub.pem"


def tool(*arguments, status=0):
    """Run Python with the packages of .venv-tools; a failure is any status but 0."""
    done = ran(TOOLS, *arguments, status=None)
    assert (done.returncode == 0) == (status == 0), done.stdout + done.stderr
    return done.stdout


def model_signing(bundle, signed, public, status=0):
    given = ("--signature", signed.model_signature, "--public_key", public)
    tool("-m", "model_signing", "verify", "key", *given, bundle, status=status)


@pytest.mark.parametrize(
    "curve", ["SECP256R1", pytest.param("SECP384R1", marks=pytest.mark.thorough), "SECP521R1"]
)
def test_model_signing_verifies_the_directory(curve, bundle_dir, tmp_path):
    key = signer(f"a-{curve}", curve)
    (tmp_path / "key.pem").write_text(key.public.pem)
    model_signing(bundle_dir, sign(bundle_dir, key), tmp_path / "key.pem")


@pytest.mark.thorough
def test_model_signing_refuses_another_key_and_a_changed_file(bundle_dir, signed, public, tmp_path):
    (tmp_path / "b.pub.pem").write_text(signer("b").public.pem)
    model_signing(bundle_dir, signed, tmp_path / "b.pub.pem", status=1)
    largest = max((bundle_dir / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"\xff")
    model_signing(bundle_dir, signed, public, status=1)


def test_model_signing_verifies_a_keyless_signature_of_its_identity_alone(bundle_dir, tmp_path):
    pytest.importorskip("sigstore", reason="sigstore comes with the extra keyless")
    from tests.fake_sigstore import IDENTITY, ISSUER, FakeSigstore, token

    from prejit.compiler.signing.signers import keyless_signer

    config = tmp_path / "sigstore.json"
    with FakeSigstore().serving() as described:
        config.write_text(described)
        signed = sign(bundle_dir, keyless_signer(token(), config))
    given = ("--signature", signed.model_signature, "--trust_config", config)
    for identity, status in ((IDENTITY, 0), (IDENTITY + "x", 1)):
        who = ("--identity", identity, "--identity_provider", ISSUER)
        tool("-m", "model_signing", "verify", "sigstore", *given, *who, bundle_dir, status=status)


@pytest.mark.thorough
def test_libraries_of_in_toto_and_sigstore_and_openssl_verify_what_is_attached_as_cosign_writes_it(
    bundle_dir, signed, public, tmp_path
):
    found = attached_to(bundle_dir)
    said = tool("-c", VERIFY, public, *(file for _, file in found))
    assert {f"sha256:{line}" for line in said.split()} == set(signed.subjects)
    for each, file in found:
        envelope = json.loads(file.read_bytes())["dsseEnvelope"]
        (tmp_path / "pae").write_bytes(pae(base64.b64decode(envelope["payload"])))
        (tmp_path / "sig").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
        openssl = ("openssl", "dgst", "-sha256", "-verify", public, "-signature")
        assert ran(*openssl, tmp_path / "sig", tmp_path / "pae").stdout == "Verified OK\n"
        manifest = json.loads(blob(bundle_dir, each.descriptor.digest).read_bytes())
        assert manifest["artifactType"] == SIGNATURE_MEDIA_TYPE
        assert manifest["config"]["mediaType"] == "application/vnd.oci.empty.v1+json"
        assert [layer["mediaType"] for layer in manifest["layers"]] == [SIGNATURE_MEDIA_TYPE]
        assert manifest["subject"]["digest"] in signed.subjects
        noted = manifest["annotations"]
        assert noted["dev.sigstore.bundle.content"] == "dsse-envelope"
        predicate = "https://sigstore.dev/cosign/sign/v1"
        assert noted["dev.sigstore.bundle.predicateType"] == predicate
        assert "org.opencontainers.image.created" in noted
