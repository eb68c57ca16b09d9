"""Whoever signs: the holder of a private key, or an identity."""

from __future__ import annotations

from typing import Protocol


class Signer(Protocol):
    """Makes sigstore bundles."""

    @property
    def id(self) -> str:
        """A text that no other signer has."""

    def bundle(self, payload: bytes) -> bytes:
        """Return the sigstore bundle with its signature of a payload, an in-toto statement."""

    def model_bundle(self, payload: bytes) -> bytes:
        """Return the same for the OpenSSF's model signing."""

    def signed(self, content: bytes) -> bytes | None:
        """Return the payload of a sigstore bundle that this signer made; None: somebody else made it."""
