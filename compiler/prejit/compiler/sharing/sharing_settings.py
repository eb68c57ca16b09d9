"""Which shared stores a build has: a URL, or a file that also says who may write and whom to believe.

    namespace = "branches"                  # where results of this build go; default: none
    [[store]]
    url = "https://cache.example/prejit"    # http, https, s3, gs, az, oci, or a directory
    read = ["branches", "release"]          # namespaces to look in, in order; default: the build's own
    write = true                            # whether results of this build go there
    keys = ["release.pub.pem"]              # who must have signed what is read; default: anyone
    sign = "branches.pem"                   # the key that signs what is written

Paths are relative to the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.sharing.remote import Remote
from prejit.compiler.sharing.shared_result import Tier
from prejit.compiler.signing.signers import PrivateKey, read_private_key
from prejit.runtime.base.files import store_errors
from prejit.runtime.errors import PrejitError, UsageError
from prejit.runtime.trust.public_keys import MAX_KEY_BYTES, PublicKey, read_key

STORE = "PREJIT_STORE"
"""The environment variable with the URL of a shared store, or the path of a file that names some."""


@dataclass(frozen=True)
class SharedStores:
    """The shared stores of a build.

    Attributes:
        namespace: where its own results go, here and there.
        tiers: the stores, the first to ask first.
    """

    namespace: str
    tiers: tuple[Tier, ...]


def read_stores(given: str | None) -> SharedStores:
    """Return the shared stores that a URL or file names.

    Args:
        given: the URL of a store, the path of a directory, or the path of a file that ends in `.toml`; None:
            what `PREJIT_STORE` has.

    Raises:
        UsageError: the file has mistakes, or a package is missing.
        PolicyError: a public key is none.
        StoreError: a file cannot be read.
    """
    found = given or os.environ.get(STORE, "")
    if not found:
        return SharedStores("", ())
    try:
        if found.endswith(".toml"):
            return _read_file(Path(found))
        return SharedStores("", (Tier(_remote(found)),))
    except PrejitError as error:
        if not given:
            error.args = (f"{STORE}: {error}",)
        raise


def written_address(given: str | None) -> str | None:
    """Return the address of the shared store that a build writes, for other machines; None: it has no store.

    Raises:
        UsageError: the stores of a TOML file are only read.
    """
    found = given or os.environ.get(STORE, "")
    if found.endswith(".toml"):
        tables = tomllib.loads(Path(found).read_text("utf-8"))["store"]
        written = next((each["url"] for each in tables if each.get("write")), None)
        if written is None:
            raise UsageError(
                f"{found}: expected a store with write = true for a cluster, found none",
                hint="nodes send executables through the store: let this build write it",
            )
        found = written
    if not found:
        return None
    return found if "://" in found else str(Path(found).expanduser().absolute())


def _remote(url: str) -> Remote:
    # Imported here, because both import asyncio, which builds without a shared store need not wait for.
    from prejit.compiler.sharing.objects import Objects
    from prejit.compiler.sharing.oci_registry import RegistryStore

    if url.startswith("oci://"):
        return RegistryStore(url)
    return Objects(url if "://" in url else Path(url).expanduser().absolute().as_uri())


def _read_file(path: Path) -> SharedStores:
    try:
        with store_errors(path, "read it"):
            found = tomllib.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: expected TOML: {error}") from error
    _only(found, {"namespace": str, "store": list}, str(path))
    own = found.get("namespace", "")
    tiers: list[Tier] = []
    for number, table in enumerate(found.get("store", []), 1):
        tiers += _tiers(table, f"{path}: store {number}", path.parent, own)
    if not tiers:
        raise UsageError(f"{path}: expected a table [[store]] with url, found none")
    return SharedStores(own, tuple(tiers))


_FIELDS = {"url": str, "read": list, "write": bool, "keys": list, "sign": str}


def _tiers(table: Any, where: str, directory: Path, own: str) -> Sequence[Tier]:
    """Return one tier for each namespace of a store that is read or written."""
    if not isinstance(table, dict):
        raise UsageError(f"{where}: expected a table, found {table!r:.80}")
    _only(table, _FIELDS, where)
    if "url" not in table:
        raise UsageError(f"{where}: expected url, found none")
    namespaces = _texts(table, "read", where) or [own]
    writes = table.get("write", False)
    believed = tuple(_key(directory / each) for each in _texts(table, "keys", where))
    signer: PrivateKey | None = None
    if "sign" in table:
        if not writes:
            raise UsageError(f"{where}: sign: expected write = true beside it, found none")
        signer = read_private_key(directory / table["sign"])
    if writes and own not in namespaces:
        namespaces = [*namespaces, own]
    try:
        remote = _remote(table["url"])
    except UsageError as error:
        error.args = (f"{where}: url: {error}",)
        raise
    return [
        Tier(remote, name, believed, writes and name == own, signer if name == own else None)
        for name in namespaces
    ]


def _only(table: dict[str, Any], fields: dict[str, type], where: str) -> None:
    for name, value in table.items():
        if name not in fields:
            known = ", ".join(fields)
            raise UsageError(f"{where}: {name}: expected one of {known}")
        if type(value) is not fields[name]:
            kind = fields[name].__name__
            raise UsageError(f"{where}: {name}: expected {kind}, found {value!r:.80}")


def _texts(table: dict[str, Any], name: str, where: str) -> list[str]:
    values: list[Any] = table.get(name, [])
    if not all(isinstance(each, str) for each in values):
        raise UsageError(f"{where}: {name}: expected a list of texts, found {values!r:.80}")
    return values


def _key(path: Path) -> PublicKey:
    with store_errors(path, "read a key"), path.open("rb") as file:
        return read_key(file.read(MAX_KEY_BYTES + 1), str(path))
