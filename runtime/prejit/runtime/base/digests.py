"""SHA-256 digests in the spelling of OCI: `sha256:<hex>`."""

from __future__ import annotations

import hashlib


def digest_of(content: bytes | bytearray | memoryview) -> str:
    """Return the OCI digest of bytes: `sha256:` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def is_digest(text: str) -> bool:
    """Return whether text has the form of an OCI sha256 digest."""
    head, _, digits = text.partition(":")
    return head == "sha256" and len(digits) == 64 and not set(digits) - set("0123456789abcdef")
