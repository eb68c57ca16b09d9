"""Keyless signatures: by an identity that a certificate of sigstore names. Verified without a network.

A CA (Fulcio) gives whoever proves an identity, such as a workflow in a CI, a certificate for some minutes. A
public log (Rekor) says when the signature was made, so the certificate may be out of date today. The keys of
both are in a *trusted root*, a file beside the policy. No other module of the server side imports `sigstore`,
and this one does when a rule with identities decides about a keyless signature.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING, NamedTuple

from prejit.runtime.errors import PolicyError
from prejit.runtime.format.names import STATEMENT_MEDIA_TYPE
from prejit.runtime.trust.reasons import RefusedError
from prejit.runtime.trust.signed_statements import Envelope, read_object

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from sigstore.verify import Verifier

MAX_ROOT_BYTES = 1 << 20
"""Maximum size of the file of a trusted root. That of the public sigstore has 7 kB."""

_ROOT_TYPE = "application/vnd.dev.sigstore.trustedroot+json"
_INSTALL = "pip install 'prejit[keyless]'; a policy with identities lets no bundle run without it"


class TrustedIdentity(NamedTuple):
    """An identity of a policy.

    Attributes:
        name: its name there.
        identity: who signs, as the certificate names them: an email address, or the URI of a workflow.
        issuer: the URL of the service that vouched for the identity.
        root, where: the content of the trusted root's file, and its place in the policy, for errors.
        expires: from when on its signatures do not count, in seconds since the epoch; None: never.
    """

    name: str
    identity: str
    issuer: str
    root: bytes
    where: str
    expires: float | None = None

    @property
    def id(self) -> str:
        """A text that no other signer has."""
        return f"{self.issuer} {self.identity}"


def check_root(root: bytes, where: str) -> None:
    """Check that the package `sigstore` is installed and that a file looks like a trusted root.

    Raises:
        PolicyError: it does not, or the package is not installed.
    """
    if importlib.util.find_spec("sigstore") is None:
        raise PolicyError(
            f"{where}: expected the package sigstore, which verifies identities, found none",
            hint=_INSTALL,
        )
    try:
        found = read_object(root, MAX_ROOT_BYTES, "trusted-root", "trusted root")
    except RefusedError as error:
        raise _no_root(where, str(error)) from error
    if not str(found.get("mediaType")).startswith(_ROOT_TYPE):
        raise _no_root(where, f"its mediaType is not {_ROOT_TYPE}")


def _no_root(where: str, reason: str) -> PolicyError:
    return PolicyError(
        f"{where}: expected sigstore's trusted_root.json: {reason:.160}",
        hint="docs/how-to/trust.md says where to get it",
    )


def verify(content: bytes, envelope: Envelope, identity: TrustedIdentity) -> None:
    """Verify that an identity made the keyless signature in a sigstore bundle, of this envelope.

    Raises:
        RefusedError: somebody else did (`unknown-identity`), or its certificate, log entry or signature is
            wrong (`keyless`).
        PolicyError: the trusted root is wrong.
    """
    verifier = _verifier(identity.root, identity.where)
    from sigstore.models import Bundle

    try:
        kind, payload = verifier.verify_dsse(Bundle.from_json(content), _Signer(identity))
    except _OtherSignerError as error:
        raise RefusedError("unknown-identity", str(error), "authenticity") from error
    except Exception as error:
        # The package parses hostile bytes with several libraries, each with exceptions of its own.
        raise RefusedError("keyless", f"keyless signature: {error!s:.200}") from error
    if (kind, payload) != (STATEMENT_MEDIA_TYPE, envelope.payload):
        raise RefusedError("keyless", "keyless signature: expected the payload that was read")


class _OtherSignerError(Exception):
    """The certificate names somebody else."""


class _Signer:
    """A policy of the package `sigstore`: the certificate names an identity and its issuer."""

    def __init__(self, identity: TrustedIdentity) -> None:
        self._identity = identity

    def verify(self, cert: Certificate) -> None:
        """Check a certificate, whose chain is verified."""
        from sigstore.errors import VerificationError
        from sigstore.verify.policy import Identity

        expected = self._identity
        try:
            Identity(identity=expected.identity, issuer=expected.issuer).verify(cert)
        except VerificationError as error:
            raise _OtherSignerError(
                f"expected a signature by {expected.identity} of {expected.issuer}, found one by another: "
                f"{error!s:.200}"
            ) from error


@functools.lru_cache(maxsize=4)
def _verifier(root: bytes, where: str) -> Verifier:
    """Return what verifies with a trusted root. Raise PolicyError where it or the package is wrong."""
    try:
        from sigstore.models import TrustedRoot
        from sigstore.verify import Verifier
    except ImportError as error:
        raise PolicyError(
            f"{where}: expected a package sigstore that works, found {error!s:.160}", hint=_INSTALL
        ) from error
    # The public interface reads files alone. These are the bytes that the policy was read with.
    descriptor = os.memfd_create("prejit-trusted-root")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(root)
        return Verifier(trusted_root=TrustedRoot.from_file(f"/proc/self/fd/{descriptor}"))
    except Exception as error:
        raise _no_root(where, str(error)) from error
    finally:
        os.close(descriptor)
