"""Public keys: ECDSA on P-256, P-384 and P-521. No other module of this package imports `cryptography`."""

from __future__ import annotations

import base64
import functools
import hashlib
from typing import TYPE_CHECKING, NamedTuple

from prejit.runtime.errors import PolicyError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey

MAX_KEY_BYTES = 16 << 10
"""Maximum size of the file of a key. One of P-521 has 268 bytes."""

_CURVES = "P-256, P-384 or P-521"


class PublicKey(NamedTuple):
    """A public key.

    `id`: sha256 of its DER form (SubjectPublicKeyInfo), 64 digits. Two names of one key have one id.
    """

    id: str
    pem: str
    public: EllipticCurvePublicKey

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Return whether the holder of this key signed the message: ECDSA in DER, with the curve's hash."""
        from cryptography.exceptions import InvalidSignature

        try:
            self.public.verify(signature, message, _ecdsa(self.public.curve.name))
        except InvalidSignature:
            return False
        return True

    def is_hinted(self, hint: str) -> bool:
        """Return whether the hint of a sigstore bundle names this key.

        cosign writes the digest of the DER form in base64, model signing that of the PEM form in hexadecimal.
        """
        digest = base64.b64encode(bytes.fromhex(self.id)).decode("ascii")
        return hint in (digest, self.id, pem_digest(self.pem))


def pem_digest(pem: str) -> str:
    """Return the digest of a key's PEM form, 64 digits: the hint of the OpenSSF's model signing."""
    return hashlib.sha256(pem.encode("ascii")).hexdigest()


@functools.cache
def _ecdsa(curve: str) -> ECDSA:
    """Return ECDSA with the hash that goes with a curve.

    The constructor of `ec.ECDSA` imports every cipher of `cryptography`, which takes a start 12 ms, to learn
    whether it can make deterministic signatures. To verify needs only the properties of that class.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    class Verifying(ec.ECDSA):
        def __init__(self) -> None:
            pass  # not the one of the base, see above

        @property
        def algorithm(self) -> hashes.HashAlgorithm:
            return hash_of(curve)

        @property
        def deterministic_signing(self) -> bool:
            return False

    return Verifying()


def hash_of(curve: str) -> hashes.HashAlgorithm:
    """Return the hash that goes with a curve, by its name in `cryptography`."""
    from cryptography.hazmat.primitives import hashes

    if curve == "secp256r1":
        return hashes.SHA256()
    return hashes.SHA384() if curve == "secp384r1" else hashes.SHA512()


def read_key(pem: bytes, where: str) -> PublicKey:
    """Return the public key in PEM; `where` it is from, for errors.

    Raises:
        PolicyError: it is no such key, or `cryptography` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise PolicyError(
            f"{where}: expected the package cryptography, which verifies signatures, found none",
            hint="pip install 'prejit[trust]'; a policy without it lets no bundle run",
        ) from error
    hint = "give a public key of ECDSA: openssl pkey -in KEY.pem -pubout"
    if len(pem) > MAX_KEY_BYTES:
        raise PolicyError(f"{where}: expected at most {MAX_KEY_BYTES} bytes", hint=hint)
    if b"PRIVATE KEY" in pem:
        raise PolicyError(f"{where}: expected a public key, found a private one", hint=hint)
    der = _der_of(pem)
    curve = next((name for name, prefix in _PREFIXES.items() if der.startswith(prefix)), None)
    try:
        if curve is None:  # rare: a compressed point, explicit parameters, or no such key at all
            return _read_any(pem, where, hint)
        curves = (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1())
        kind = next(each for each in curves if each.name == curve)
        point = der[len(_PREFIXES[curve]) :]
        public = ec.EllipticCurvePublicKey.from_encoded_point(kind, point)
    except ValueError as error:
        raise PolicyError(
            f"{where}: expected a public key in PEM, found none: {error!s:.120}", hint=hint
        ) from error
    return _key(der, public)


_PREFIXES = {
    "secp256r1": bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200"),
    "secp384r1": bytes.fromhex("3076301006072a8648ce3d020106052b81040022036200"),
    "secp521r1": bytes.fromhex("30819b301006072a8648ce3d020106052b8104002303818600"),
}
"""By curve: the DER form of a key up to its point (RFC 5480), as openssl writes it. To import what reads
every form takes 15 ms more."""


def _der_of(pem: bytes) -> bytes:
    """Return the DER form in a plain PEM text; an empty one: it has another form."""
    words = b" ".join(pem.split())
    begin, end = b"-----BEGIN PUBLIC KEY----- ", b" -----END PUBLIC KEY-----"
    if not (words.startswith(begin) and words.endswith(end)):
        return b""
    try:
        return base64.b64decode(words[len(begin) : -len(end)].replace(b" ", b""), validate=True)
    except ValueError:
        return b""


def _read_any(pem: bytes, where: str, hint: str) -> PublicKey:
    """Return the key in any form of PEM, if its curve is allowed; else raise PolicyError or ValueError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        public = serialization.load_pem_public_key(pem)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise PolicyError(
            f"{where}: expected a key of ECDSA on {_CURVES}, found {type(public).__name__}",
            hint=hint,
        )
    if public.curve.name not in _PREFIXES:
        raise PolicyError(
            f"{where}: expected a key on {_CURVES}, found one on {public.curve.name}", hint=hint
        )
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return _key(public.public_bytes(encoding, form), public)


def _key(der: bytes, public: EllipticCurvePublicKey) -> PublicKey:
    text = base64.b64encode(der).decode("ascii")
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    pem = "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""])
    return PublicKey(hashlib.sha256(der).hexdigest(), pem, public)
