"""Public keys are read as `cryptography` reads them, whichever way is taken."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from tests.signers import signer

from prejit.runtime.errors import PolicyError
from prejit.runtime.trust.public_keys import read_key
from prejit.runtime.trust.signed_statements import pae

CURVES = ["SECP256R1", "SECP384R1", "SECP521R1"]
FORM = serialization.PublicFormat.SubjectPublicKeyInfo


@pytest.mark.parametrize("curve", CURVES)
def test_the_quick_way_gives_what_cryptography_gives(curve: str) -> None:
    private = signer(f"k-{curve}", curve).private
    public = private.public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, FORM)
    for text in (pem, pem.replace(b"\n", b"\r\n"), b"\n" + pem, pem.strip(), b"our key\n" + pem):
        found = read_key(text, "here")
        assert found.public == public
        assert found.pem.encode() == pem
        der = public.public_bytes(serialization.Encoding.DER, FORM)
        assert found.id == hashlib.sha256(der).hexdigest()


@pytest.mark.parametrize("curve", CURVES)
def test_only_the_hash_of_the_curve_and_the_signed_bytes_verify(curve: str) -> None:
    key = signer(f"k-{curve}", curve)
    signature = key.sign(b"payload")
    assert key.public.verifies(signature, pae(b"payload"))
    assert not key.public.verifies(signature, pae(b"payloae"))
    assert not key.public.verifies(signature[:-1], pae(b"payload"))
    other = key.private.sign(pae(b"payload"), ec.ECDSA(hashes.SHA224()))
    assert not key.public.verifies(other, pae(b"payload"))


def test_verifying_imports_none_of_the_ciphers() -> None:
    key = signer("k")
    signature = key.sign(b"payload").hex()
    program = (
        "import sys\n"
        "from prejit.runtime.trust.public_keys import read_key\n"
        f"key = read_key({key.public.pem.encode()!r}, 'here')\n"
        f"assert key.verifies(bytes.fromhex({signature!r}), {pae(b'payload')!r})\n"
        "assert 'cryptography.hazmat.primitives.asymmetric.ec' in sys.modules\n"
        "assert 'cryptography.hazmat.primitives.ciphers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_point_that_is_not_on_the_curve_is_refused() -> None:
    lines = signer("k").public.pem.splitlines()
    lines[2] = "A" * len(lines[2])
    with pytest.raises(PolicyError, match="here: expected a public key in PEM"):
        read_key("\n".join(lines).encode(), "here")


@given(
    st.binary(max_size=200)
    | st.binary(max_size=120).map(
        lambda raw: b"-----BEGIN PUBLIC KEY-----\n" + raw + b"\n-----END PUBLIC KEY-----"
    )
)
def test_any_bytes_are_refused(content: Any) -> None:
    with pytest.raises(PolicyError):
        read_key(content, "here")
