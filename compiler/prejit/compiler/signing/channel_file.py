"""The file of a channel on disk: read it, change it, write it whole, one process after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from prejit.compiler.signing.channels import (
    ChannelFile,
    add_signature,
    read_channel,
    release,
    rotate,
)
from prejit.compiler.signing.private_key import PrivateKey
from prejit.runtime.base.locks import locking
from prejit.runtime.base.nearest_name import nearest_file
from prejit.runtime.base.written_files import write_file
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.format.audit import audit
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import BUNDLE_NAME, REF_NAME
from prejit.runtime.format.root import Root
from prejit.runtime.generation.options import check_generation
from prejit.runtime.trust.channel import MAX_CHANNEL_BYTES
from prejit.runtime.trust.public_keys import MAX_KEY_BYTES, read_key
from prejit.runtime.trust.statement import SignedSubject


def release_bundle(
    file: Path, bundle: Path, name: str, keys: Sequence[PrivateKey], days: int
) -> int:
    """Make a bundle the current one of a channel. Return the version of the release.

    Args:
        file: the channel's file, which is made if it is missing.
        bundle: directory of the bundle.
        name: the channel's name.
        keys: the private keys that sign.
        days: how long this is known to be the current bundle.

    Raises:
        RejectError: the bundle is damaged.
        StoreError: a file cannot be read or written.
        UsageError: the file is no channel's, or that of one with another name or other keys.
    """
    if file.exists():  # the verification of a large bundle takes its time
        _read(file)
    audited = audit(bundle, check_generation).digest
    title, subjects = read_whole(bundle, _subjects)
    if subjects[0].digest != audited:
        raise StoreError(
            f"{bundle}: expected {audited}, which was verified, found {subjects[0].digest}",
            hint="a build has replaced the bundle meanwhile: release again",
        )
    return _change(
        file,
        lambda before: release(before, name, title, subjects, keys, _after(days)),
        may_begin=True,
    ).version


def other_files(file: Path, name: str) -> list[Path]:
    """Return the other files of a channel in the directory of one."""
    found = []
    for other in sorted(file.parent.glob(f"*{file.suffix}")):
        with suppress(StoreError, UsageError):
            if other != file and _read(other).name == name:
                found.append(other)
    return found


def rotate_keys(
    file: Path,
    name: str,
    publics: Sequence[Path],
    threshold: int,
    keys: Sequence[PrivateKey],
    days: int,
) -> int:
    """Give a channel other keys. Return their version.

    Args:
        file: the channel's file.
        name: the channel's name.
        publics: files of the public keys.
        threshold: how many of them must sign.
        keys: the private keys that sign: old and new ones.
        days: how long the keys count.

    Raises:
        StoreError, UsageError, PolicyError: a file cannot be read, or is wrong.
    """
    new = [read_key(_bytes(path, MAX_KEY_BYTES), str(path)) for path in publics]
    if threshold > len(new):
        raise UsageError(f"--threshold: expected at most {len(new)}, found {threshold}")
    return _change(
        file, lambda before: rotate(before, name, new, threshold, keys, _after(days))
    ).keys_version


def sign_channel(file: Path, key: PrivateKey) -> ChannelFile:
    """Sign the release and the newest keys of a channel with another key. Return the channel.

    Raises:
        StoreError, UsageError: the file cannot be read or written, is no channel's, or not one of this key.
    """
    return _change(file, lambda before: add_signature(before, key))


def _change(
    file: Path, change: Callable[[ChannelFile], ChannelFile], *, may_begin: bool = False
) -> ChannelFile:
    """Change a channel's file while no other process does. Return the channel.

    Args:
        file: the channel's file.
        change: returns the channel afterwards.
        may_begin: whether the file may be missing.

    Raises:
        StoreError, UsageError: the file cannot be read or written, or is no channel's.
    """

    def content() -> bytes | None:
        is_new = may_begin and not file.exists()
        return None if is_new else _bytes(file, MAX_CHANNEL_BYTES)

    try:
        directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"{file}: cannot open its directory: {error.strerror}") from error
    with locking(directory):
        found = content()
        after = change(ChannelFile() if found is None else read_channel(found, str(file)))
        if content() != found:  # a file system without locks
            raise StoreError(
                f"{file}: another process has changed it meanwhile; nothing was written",
                hint="run the command again",
            )
        write_file(file, after.encode())
    return after


def _read(file: Path) -> ChannelFile:
    return read_channel(_bytes(file, MAX_CHANNEL_BYTES), str(file))


def _bytes(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        near = nearest_file(path) if isinstance(error, FileNotFoundError) else None
        hint = None if near is None else f"did you mean {near}?"
        raise StoreError(f"{path}: cannot read: {error.strerror}", hint=hint) from error


def _subjects(layout: Layout, root: Root) -> tuple[str, list[SignedSubject]]:
    """Return a bundle's name, and the digests of its index and of its targets' manifests."""
    targets = [
        SignedSubject(at.digest, (at.annotations or {}).get(REF_NAME, ""))
        for at in root.bundle.manifests
    ]
    whole = SignedSubject(root.digest)
    subjects = [whole, *(each for each in targets if each.digest != root.digest)]
    return root.bundle.annotations[BUNDLE_NAME], subjects


def _after(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)
