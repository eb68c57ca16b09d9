"""The way of contents between a build and the nodes that compile for it: by a shared store.

Contents are checked by their digest on both ends. Only the build writes results, because it alone has the
key that signs them.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from prejit.compiler.sharing.remote import Remote, RemoteError
from prejit.compiler.sharing.sharing_settings import STORE, read_stores
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.errors import StoreError, UsageError


def address_of(shared: str | None) -> str | None:
    """Return the address of the shared store that a build writes, for its nodes; None: it has no store.

    Args:
        shared: what the build was given: a URL, a directory, a TOML file, or None for `PREJIT_STORE`.

    Raises:
        UsageError: the stores of a TOML file are only read.
    """
    found = shared or os.environ.get(STORE, "")
    if not found:
        return None
    if found.endswith(".toml"):
        tables = tomllib.loads(Path(found).read_text("utf-8"))["store"]
        written = next((each["url"] for each in tables if each.get("write")), None)
        if written is None:
            raise UsageError(
                f"{found}: expected a store with write = true for a cluster, found none",
                hint="nodes send executables through the store: let this build write it",
            )
        found = written
    return found if "://" in found else str(Path(found).expanduser().absolute())


def open_exchange(address: str) -> Remote:
    """Return the shared store at an address."""
    return read_stores(address).tiers[0].remote


def send(remote: Remote, store: DirectoryStore, digest: str) -> None:
    """Write contents to the shared store, unless it has them.

    Raises:
        StoreError: it does not answer, or the contents are missing here.
    """
    path = _path(digest)
    try:
        if remote.has(path):
            return
        if (file := store.open_blob(digest)) is None:
            raise StoreError(f"{store.root}: expected blob {digest} in the build cache, found none")
        with file:
            remote.write(path, file)
    except RemoteError as error:
        raise _failed(error) from error


def bring(remote: Remote, store: DirectoryStore, digest: str) -> None:
    """Read contents from the shared store, unless they are here.

    Raises:
        StoreError: it does not answer, lacks the contents, or has others.
    """
    if store.blob_path(digest) is not None:
        return
    try:
        with store.blob_writer() as blob:
            if not remote.download(_path(digest), blob.write):
                raise StoreError(f"{remote.name}: expected {digest}, found none")
            if blob.digest != digest:
                raise StoreError(
                    f"{remote.name}: {digest}: expected this digest, found {blob.digest}"
                )
    except RemoteError as error:
        raise _failed(error) from error


def _path(digest: str) -> str:
    return f"cas/{digest.removeprefix('sha256:')}"


def _failed(error: RemoteError) -> StoreError:
    return StoreError(
        str(error), hint="a cluster needs a shared store that the build and all nodes reach"
    )
