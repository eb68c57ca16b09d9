"""Sign an adapter of PEFT, which trust policies then let a bundle load beside its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prejit.compiler.base.statement_writing import encode_statement
from prejit.runtime.base.files import store_errors
from prejit.runtime.base.written_files import write_file
from prejit.runtime.lora.peft_config import CONFIG, SIGNATURES
from prejit.runtime.lora.peft_files import adapter_digest
from prejit.runtime.trust.signed_statements import SIGNATURE_PREDICATE, SignedSubject, Statement

if TYPE_CHECKING:
    from prejit.compiler.signing.bundle_signing import Signer


class SignedAdapter(NamedTuple):
    """The result of signing an adapter: its digest, and the file with its signatures."""

    digest: str
    signatures: Path


def is_adapter(directory: Path) -> bool:
    """Return whether a directory is an adapter, and no bundle."""
    return (directory / CONFIG).is_file() and not (directory / "index.json").exists()


def sign_adapter(directory: Path, signer: Signer) -> SignedAdapter:
    """Add a signature to `adapter.sig` in an adapter's directory, unless the signer has signed it before.

    Raises:
        CheckpointError: a file of the adapter is missing.
        NetworkError: a keyless signature could not be made.
        StoreError: the file cannot be read or written.
    """
    digest, file = adapter_digest(directory), directory / SIGNATURES
    payload = encode_statement(Statement(SIGNATURE_PREDICATE, (SignedSubject(digest, "adapter"),)))
    with store_errors(file, "read"):
        before = file.read_bytes().splitlines() if file.exists() else []
    if not any(signer.signed(line) == payload for line in before):
        write_file(file, b"\n".join([*before, signer.bundle(payload)]) + b"\n")
    return SignedAdapter(digest, file)
