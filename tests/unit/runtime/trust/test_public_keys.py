"""Public keys are read as `cryptography` reads them, whichever way is taken."""

import hashlib

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st
from tests.signers import signer

from prejit.runtime.errors import PolicyError
from prejit.runtime.trust.public_keys import read_key

FORM = serialization.PublicFormat.SubjectPublicKeyInfo


@pytest.mark.parametrize("curve", ["SECP256R1", "SECP384R1", "SECP521R1"])
def test_the_quick_way_gives_what_cryptography_gives(curve):
    public = signer(f"k-{curve}", curve).private.public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, FORM)
    der = public.public_bytes(serialization.Encoding.DER, FORM)
    for text in (pem, pem.replace(b"\n", b"\r\n"), b"\n" + pem, pem.strip(), b"our key\n" + pem):
        found = read_key(text, "here")
        assert (found.public, found.pem.encode()) == (public, pem)
        assert found.id == hashlib.sha256(der).hexdigest()


def test_a_point_that_is_not_on_the_curve_is_refused():
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
def test_any_bytes_are_refused(content):
    with pytest.raises(PolicyError):
        read_key(content, "here")
