"""Signers: a private key (ECDSA on P-256, P-384 or P-521, in PEM), or an identity without a key of its own.

A certificate that is good for some minutes names the identity. The package `sigstore` gets it, over the
network. A public log keeps the identity, the time, and digests.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prejit.compiler.base.statement_writing import encode_bundle
from prejit.runtime.base.wording import nearest_file
from prejit.runtime.errors import NetworkError, PolicyError, StoreError, UsageError
from prejit.runtime.trust.channel import signers
from prejit.runtime.trust.keyless_trust import TrustedIdentity, verify
from prejit.runtime.trust.public_keys import MAX_KEY_BYTES, PublicKey, hash_of, pem_digest, read_key
from prejit.runtime.trust.reasons import RefusedError
from prejit.runtime.trust.signed_statements import Envelope, pae, read_bundle

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate
    from sigstore.models import ClientTrustConfig
    from sigstore.oidc import IdentityToken
    from sigstore.sign import Signer as SigstoreSigner

PASSWORD_VARIABLE = "PREJIT_KEY_PASSWORD"  # noqa: S105 (a variable's name)
"""The environment variable with the password of an encrypted key."""
TOKEN_VARIABLE = "PREJIT_IDENTITY_TOKEN"  # noqa: S105 (a variable's name)
"""The environment variable with an identity token, for where the environment offers none."""

_MAKE_KEY = "make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
_NO_IDENTITY = (
    "in GitHub Actions give the job the permission `id-token: write`; elsewhere set "
    f"{TOKEN_VARIABLE} to a token of your CI for the audience sigstore"
)
_ISSUER_OID = "1.3.6.1.4.1.57264.1.1"
"""The extension of sigstore's certificates with the issuer, as a policy compares it."""


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
            hint=_MAKE_KEY if near is None else f"did you mean {near}?",
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
            f"{where}: expected a private key in PEM: {error!s:.120}", hint=_MAKE_KEY
        ) from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise UsageError(
            f"{where}: expected a key of ECDSA, found {type(private).__name__}", hint=_MAKE_KEY
        )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    try:
        return PrivateKey(read_key(public, where), private)
    except PolicyError as error:  # another curve: the hint is that of a public key
        raise UsageError(str(error), hint=_MAKE_KEY) from error


@dataclass(frozen=True)
class KeylessSigner:
    """An identity that signs."""

    known: TrustedIdentity
    sigstore: SigstoreSigner

    @property
    def id(self) -> str:
        """A text that no other signer has."""
        return self.known.id

    def bundle(self, payload: bytes) -> bytes:
        """Return the sigstore bundle with its signature of a payload, an in-toto statement.

        Raises:
            NetworkError: a service of sigstore does not answer, or refuses.
        """
        from sigstore.dsse import Statement

        try:
            return self.sigstore.sign_dsse(Statement(payload)).to_json().encode("utf-8")
        except Exception as error:  # of requests, of the CA's client or of the log's
            raise _no_service(error) from error

    def model_bundle(self, payload: bytes) -> bytes:
        """Return the same for the OpenSSF's model signing."""
        return self.bundle(payload)

    def signed(self, content: bytes) -> bytes | None:
        """Return the payload of a sigstore bundle that this identity made; None: somebody else made it."""
        try:
            envelope = read_bundle(content)
            if not envelope.is_keyless:
                return None
            verify(content, envelope, self.known)
        except RefusedError:
            return None
        return envelope.payload


def keyless_signer(token: str | None, config: Path | None) -> KeylessSigner:
    """Return the identity of a token as a signer, after it got its certificate.

    Raises:
        UsageError: there is no identity, its token is wrong or has expired, or the package `sigstore` is not
            installed.
        NetworkError: a service of sigstore does not answer, or refuses.
        StoreError: the configuration cannot be read.
    """
    try:
        from sigstore.sign import SigningContext
    except ImportError as error:
        raise UsageError(
            "expected the package sigstore, which signs without a key, found none",
            hint="pip install 'prejit[keyless]'",
        ) from error
    identity = _identity(token)  # before anything is asked over the network
    trust = _trust(config)
    root = trust.trusted_root
    try:
        with SigningContext.from_trust_config(trust).signer(identity) as signer:
            # Only the certificate says what the CA made of the token: for GitHub the URI of the workflow.
            # The package has no public name for this, nor for the text of the root.
            who, issuer = _named(signer._signing_cert())
    except Exception as error:  # of requests, or of the CA's client
        raise _no_service(error) from error
    text = root._inner.to_json().encode("utf-8")
    return KeylessSigner(TrustedIdentity(who, who, issuer, text, "sigstore's trusted root"), signer)


def _named(certificate: Certificate) -> tuple[str, str]:
    """Return the identity in a certificate, and its issuer."""
    from cryptography import x509

    extensions = certificate.extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    issuer = extensions.get_extension_for_oid(x509.ObjectIdentifier(_ISSUER_OID)).value
    assert isinstance(issuer, x509.UnrecognizedExtension)
    return str(names[0].value), issuer.value.decode("utf-8")


def _identity(token: str | None) -> IdentityToken:
    from sigstore.oidc import IdentityError, IdentityToken, detect_credential

    try:
        found = detect_credential() if token is None else token
        if found is None:
            raise UsageError("expected an identity to sign with, found none", hint=_NO_IDENTITY)
        return IdentityToken(found)
    except IdentityError as error:
        reason = error.__cause__ or error
        raise UsageError(
            f"expected an identity token that is good now and for the audience sigstore: {reason!s:.160}",
            hint=_NO_IDENTITY,
        ) from error


def _trust(config: Path | None) -> ClientTrustConfig:
    from sigstore.models import ClientTrustConfig

    try:
        if config is None:
            return ClientTrustConfig.production()
        return ClientTrustConfig.from_json(config.read_text("utf-8"))
    except OSError as error:
        if config is None:
            raise _no_service(error) from error
        raise StoreError(f"{config}: cannot read: {error.strerror or error}") from error
    except Exception as error:
        if config is None:  # its update of keys failed
            raise _no_service(error) from error
        raise UsageError(
            f"{config}: expected the client configuration of sigstore: {error!s:.160}",
            hint="it has the media type application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
        ) from error


def _no_service(error: Exception) -> NetworkError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return NetworkError(
        f"expected sigstore to answer: {type(error).__name__}: {reason:.200}",
        hint="signing without a key needs the network; try again, or sign with --key",
    )
