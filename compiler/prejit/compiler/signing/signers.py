"""Private keys: ECDSA on P-256, P-384 or P-521, in PEM."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prejit.compiler.base.statement_writing import encode_bundle
from prejit.runtime.base.wording import nearest_file
from prejit.runtime.errors import PolicyError, StoreError, UsageError
from prejit.runtime.trust.channel import signers
from prejit.runtime.trust.public_keys import MAX_KEY_BYTES, PublicKey, hash_of, pem_digest, read_key
from prejit.runtime.trust.reasons import RefusedError
from prejit.runtime.trust.signed_statements import Envelope, pae, read_bundle

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

PASSWORD_VARIABLE = "PREJIT_KEY_PASSWORD"  # noqa: S105 (a variable's name)
"""The environment variable with the password of an encrypted key."""

_MAKE = "make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"


@dataclass(frozen=True)
class PrivateKey:
    """A private key, with its public key."""

    public: PublicKey
    private: EllipticCurvePrivateKey

    def sign(self, payload: bytes) -> bytes:
        """Return the signature of a payload of the type of in-toto statements: ECDSA in DER."""
        from cryptography.hazmat.primitives.asymmetric import ec

        curve = self.private.curve.name
        return self.private.sign(pae(payload), ec.ECDSA(hash_of(curve)))

    def envelope(self, payload: bytes) -> Envelope:
        """Return a payload with its signature, and the hint that cosign writes."""
        hint = base64.b64encode(bytes.fromhex(self.public.id)).decode("ascii")
        return Envelope(payload, (self.sign(payload),), hint)

    @property
    def id(self) -> str:
        """The id of the public key, which no other signer has."""
        return self.public.id

    def bundle(self, payload: bytes) -> bytes:
        """Return the sigstore bundle with its signature of a payload, an in-toto statement."""
        return encode_bundle(self.envelope(payload))

    def model_bundle(self, payload: bytes) -> bytes:
        """Return the same with the hint that the OpenSSF's model signing wants."""
        hint = pem_digest(self.public.pem)
        return encode_bundle(Envelope(payload, (self.sign(payload),), hint))

    def signed(self, content: bytes) -> bytes | None:
        """Return the payload of a sigstore bundle that this key signed; None: another did."""
        try:
            envelope = read_bundle(content)
        except RefusedError:
            return None
        return envelope.payload if signers(envelope, [self.public]) else None


def read_private_key(path: Path) -> PrivateKey:
    """Read a private key; the environment has its password.

    Raises:
        StoreError: the file cannot be read.
        UsageError: it is no such key, or the password is wrong; or `cryptography` is not installed.
    """
    try:
        with path.open("rb") as file:
            pem = file.read(MAX_KEY_BYTES + 1)
    except FileNotFoundError as error:
        near = nearest_file(path)
        raise StoreError(
            f"{path}: cannot read a key: {error.strerror}",
            hint=_MAKE if near is None else f"did you mean {near}?",
        ) from error
    except OSError as error:
        raise StoreError(
            f"{path}: cannot read a key: {error.strerror}",
            hint="give a file that this user may read",
        ) from error
    return parse_private_key(pem, str(path), os.environ.get(PASSWORD_VARIABLE) or None)


def parse_private_key(pem: bytes, where: str, password: str | None = None) -> PrivateKey:
    """Return the private key in PEM. Errors as of `read_private_key`."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise UsageError(
            "expected the package cryptography, which makes signatures, found none",
            hint="pip install 'prejit[trust]'",
        ) from error
    try:
        encoded = None if password is None else password.encode("utf-8")
        private = serialization.load_pem_private_key(pem, encoded)
    except TypeError as error:
        if password is None:
            raise UsageError(
                f"{where}: expected a password, because the key is encrypted, found none",
                hint=f"set {PASSWORD_VARIABLE} to the key's password",
            ) from error
        raise UsageError(
            f"{where}: expected an encrypted key for the password in {PASSWORD_VARIABLE}, found a plain one",
            hint=f"unset {PASSWORD_VARIABLE}, or give the encrypted key",
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        if password is not None and b"ENCRYPTED" in pem:
            raise UsageError(
                f"{where}: expected the password of the key, found a wrong one: {error!s:.120}",
                hint=f"set {PASSWORD_VARIABLE} to the key's password",
            ) from error
        raise UsageError(
            f"{where}: expected a private key in PEM: {error!s:.120}", hint=_MAKE
        ) from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise UsageError(
            f"{where}: expected a key of ECDSA, found {type(private).__name__}", hint=_MAKE
        )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    try:
        return PrivateKey(read_key(public, where), private)
    except PolicyError as error:  # another curve: the hint is that of a public key
        raise UsageError(str(error), hint=_MAKE) from error
