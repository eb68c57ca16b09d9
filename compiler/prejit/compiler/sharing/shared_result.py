"""A result as a shared store holds it: an ActionResult of Bazel's remote cache with a statement about it.

    ActionResult = {"outputFiles": [{"path", "digest": {"hash", "sizeBytes"}}], "stdoutRaw": base64}

The output files are the contents that the result needs: a server such as bazel-remote keeps or drops them
together with the result. What counts is the in-toto statement in `stdoutRaw`, alone or in a DSSE envelope
with its signature. Its subject is the digest of the key, and its predicate has the key, the result, and the
digests of its contents. So a signed result cannot pass for that of another key, and nobody can exchange its
contents.

A `Tier` is a shared store as a build uses it. `send_content` and `fetch_content` move contents.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prejit.compiler.base.statement_writing import encode_envelope, encode_statement
from prejit.compiler.sharing.remote import Remote
from prejit.compiler.signing.signers import PrivateKey
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.base.files import is_digest
from prejit.runtime.trust.public_keys import PublicKey
from prejit.runtime.trust.reasons import RefusedError
from prejit.runtime.trust.signed_statements import (
    SignedSubject,
    Statement,
    envelope_of,
    field,
    pae,
    read_object,
    read_statement,
)

PREDICATE = "urn:prejit:result:v1"
"""The predicate of a result."""
MAX_BYTES = 4 << 20
"""Maximum size of a result without its contents. A statement may have 1 MiB."""


class UnusableError(Exception):
    """A result of a shared store cannot be used. The text says why."""


class _GoneError(Exception):
    """A shared store lacks contents."""


@dataclass(frozen=True, slots=True)
class SharedResult:
    """A result under its key: JSON, and the size of each of its contents by digest."""

    key: Key
    result: Mapping[str, Any]
    blobs: Mapping[str, int]


@dataclass(frozen=True)
class Tier:
    """A shared store, and what a build does with it.

    Attributes:
        remote: where its files are.
        namespace: separates the results of those who may write it from others in the same remote store.
        believed: keys; one of them must have signed a result. Empty: anyone may have written it.
        writes: whether results that are made here go there.
        signer: signs them; None: nobody does.
    """

    remote: Remote
    namespace: str = ""
    believed: tuple[PublicKey, ...] = ()
    writes: bool = True
    signer: PrivateKey | None = None

    @property
    def label(self) -> str:
        """Name of the remote store and namespace, for people."""
        return f"{self.remote.name} ({self.namespace})" if self.namespace else self.remote.name

    def path_of(self, key: Key) -> str:
        """Return the name of the file with a key's result."""
        return f"ac/{key.digits_in(self.namespace)}"

    def read(self, key: Key) -> SharedResult | None:
        """Return the result of a key; None: the store has none. Errors as `decode`."""
        content = self.remote.read(self.path_of(key), MAX_BYTES)
        return None if content is None else decode(content, key, self.believed)

    def write(self, key: Key, result: Mapping[str, Any], blobs: Mapping[str, int]) -> None:
        """Write the result of a key. Its contents must be there: whoever finds it must find them."""
        content = encode(SharedResult(key, result, blobs), self.signer)
        self.remote.write(self.path_of(key), content)


def content_path(digest: str) -> str:
    """Return the name of the file with contents."""
    return f"cas/{digest.removeprefix('sha256:')}"


def send_content(
    remote: Remote, store: DirectoryStore, digest: str, *, replace: bool = False
) -> tuple[int, bool] | None:
    """Write contents of this machine's store to a remote store that lacks them.

    Returns:
        Their size, and whether they were written; None: this machine's store lacks them.
    """
    if (file := store.open_blob(digest)) is None:
        return None
    with file:
        path, size = content_path(digest), os.fstat(file.fileno()).st_size
        writes = replace or not remote.has(path)
        if writes:
            remote.write(path, file)
    return size, writes


def fetch_content(
    remote: Remote, store: DirectoryStore, digest: str, size: int | None = None
) -> bool:
    """Read contents of a remote store into this machine's; return whether they are there.

    Raises:
        UnusableError: they are damaged, or do not have the expected size in bytes. They are not kept.
    """
    with suppress(_GoneError), store.blob_writer() as blob:

        def take(piece: memoryview) -> None:
            if size is not None and blob.size + piece.nbytes > size:
                raise UnusableError(f"{digest}: expected {size} bytes, found more")
            blob.write(piece)

        if not remote.download(content_path(digest), take):
            raise _GoneError
        if blob.digest != digest:
            raise UnusableError(f"{digest}: expected this digest, found {blob.digest}")
        return True
    return False


def encode(entry: SharedResult, signer: PrivateKey | None) -> bytes:
    """Return a result as an ActionResult in JSON. Without a signer nobody signs it."""
    predicate = {
        "kind": entry.key.kind,
        "ingredients": [list(pair) for pair in entry.key.ingredients],
        "result": dict(entry.result),
        "blobs": dict(entry.blobs),
    }
    subject = SignedSubject(entry.key.digest, entry.key.name)
    statement = encode_statement(Statement(PREDICATE, (subject,), predicate))
    if signer is not None:
        statement = json.dumps(encode_envelope(signer.envelope(statement))).encode("ascii")
    outputs = [
        {"path": digits, "digest": {"hash": digits, "sizeBytes": str(size)}}
        for digits, size in ((d.removeprefix("sha256:"), s) for d, s in entry.blobs.items())
    ]
    found = {"outputFiles": outputs, "stdoutRaw": base64.b64encode(statement).decode("ascii")}
    return json.dumps(found, sort_keys=True).encode("ascii")


def decode(content: bytes, key: Key, believed: Sequence[PublicKey]) -> SharedResult:
    """Return the result of a key from the bytes of a shared store.

    Args:
        content: an ActionResult in JSON.
        key: what was asked for.
        believed: one of these keys must have signed it; none: anyone may have written it.

    Raises:
        UnusableError: it is damaged, belongs to another key, or nobody of those signed it.
    """
    try:
        statement = read_statement(_statement_of(content, believed), PREDICATE)
        predicate = dict(statement.predicate)
        kind = field(predicate, "kind", str, "kind", "result")
        listed = field(predicate, "ingredients", list, "ingredients", "result")
        result = field(predicate, "result", dict, "result", "result")
        blobs = field(predicate, "blobs", dict, "blobs", "result")
    except RefusedError as error:
        raise UnusableError(str(error)) from error
    if statement.about(key.digest) is None:
        raise UnusableError(
            f"expected the result of {key.digest}, found that of {statement.subjects[0].digest}"
        )
    if (kind, listed) != (key.kind, [list(pair) for pair in key.ingredients]):
        raise UnusableError(f"expected the ingredients of {key.digest}, found others")
    if not all(is_digest(d) and type(s) is int and s >= 0 for d, s in blobs.items()):
        raise UnusableError("expected digests of contents with their sizes")
    return SharedResult(key, result, blobs)


def _statement_of(content: bytes, believed: Sequence[PublicKey]) -> bytes:
    """Return the statement of an ActionResult, once its signature is verified where one is asked for."""
    what = "ActionResult"
    found = read_object(content, MAX_BYTES, "result-json", what)
    try:
        inner = base64.b64decode(field(found, "stdoutRaw", str, "result-text", what), validate=True)
    except binascii.Error as error:
        raise UnusableError(f"{what}: stdoutRaw: expected base64") from error
    signed = read_object(inner, MAX_BYTES, "statement-json", what)
    envelope = envelope_of(signed) if "payloadType" in signed else None
    if believed:
        if envelope is None:
            raise UnusableError("expected a signature, found none")
        message = pae(envelope.payload)
        if not any(key.verifies(each, message) for key in believed for each in envelope.signatures):
            raise UnusableError("expected the signature of a key that this build believes")
    return inner if envelope is None else envelope.payload
