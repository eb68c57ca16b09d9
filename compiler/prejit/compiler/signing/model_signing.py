"""The signature of the OpenSSF's model signing: one file beside a bundle, over every file in its directory.

`model_signing verify` accepts it. The digests of blobs are their names: `sign` has verified all bytes before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from prejit.compiler.signing.signer import Signer
from prejit.runtime.base.files import digest_of, is_digest
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.trust.statement import (
    MODEL_PREDICATE,
    SignedSubject,
    Statement,
    encode_statement,
)


def files_of(path: Path) -> dict[str, str]:
    """Return the digest of each file of a bundle's directory, by its name in the notation of POSIX.

    Raises:
        StoreError: the directory cannot be read.
        RejectError: it has a file that does not belong there.
    """
    found = {}
    try:
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if file.is_dir() and not file.is_symlink():
                continue
            digest = f"sha256:{file.name}"
            if file.is_symlink():
                raise RejectError(str(file), "expected a file, found a symbolic link")
            if name in ("index.json", "oci-layout"):
                digest = digest_of(file.read_bytes())
            elif name != f"blobs/sha256/{file.name}" or not is_digest(digest):
                raise RejectError(
                    str(file),
                    "expected files of the bundle alone, found another",
                    hint="remove it: the signature is of every file in the directory",
                )
            found[name] = digest
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}") from error
    return found


def model_statement(name: str, files: Mapping[str, str]) -> Statement:
    """Return the statement about the files of a directory.

    Args:
        name: name of the model.
        files: digest by name.
    """
    ordered = {each: files[each].removeprefix("sha256:") for each in sorted(files)}
    root = hashlib.sha256(b"".join(map(bytes.fromhex, ordered.values()))).hexdigest()
    return Statement(
        MODEL_PREDICATE,
        (SignedSubject(f"sha256:{root}", name),),
        {
            "resources": [
                {"algorithm": "sha256", "digest": digest, "name": each}
                for each, digest in ordered.items()
            ],
            "serialization": {
                "allow_symlinks": False,
                "hash_type": "sha256",
                "ignore_paths": [],
                "method": "files",
            },
        },
    )


def model_signature(path: Path, signer: Signer) -> bytes:
    """Return the content of `NAME.sig` for a bundle's directory.

    Raises:
        StoreError, RejectError: as of `files_of`.
    """
    statement = model_statement(path.resolve().name, files_of(path))
    return signer.model_bundle(encode_statement(statement))
