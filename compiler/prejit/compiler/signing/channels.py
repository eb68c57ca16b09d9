"""Channels, on the side of whoever publishes: release a bundle, rotate the keys, add a signature.

`release`, `rotate` and `add_signature` return the new channel; the functions below them change its file.
`runtime.trust.channel` has the rules that readers apply.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from prejit.compiler.base.statement_writing import encode_envelope, encode_statement
from prejit.compiler.signing.signers import PrivateKey
from prejit.runtime.base.files import store_errors
from prejit.runtime.base.wording import nearest_file
from prejit.runtime.base.written_files import locking, write_file
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.format.audit import audit
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import BUNDLE_NAME, REF_NAME
from prejit.runtime.format.root import Root
from prejit.runtime.generation.options import check_generation
from prejit.runtime.trust.channel import CHANNEL_MEDIA_TYPE, MAX_CHANNEL_BYTES, signers
from prejit.runtime.trust.public_keys import MAX_KEY_BYTES, PublicKey, read_key
from prejit.runtime.trust.reasons import RefusedError
from prejit.runtime.trust.signed_statements import (
    KEYS_PREDICATE,
    RELEASE_PREDICATE,
    Envelope,
    SignedSubject,
    Statement,
    envelope_of,
    read_statement,
)


@dataclass(frozen=True)
class ChannelFile:
    """A channel's file, as its publisher reads it: signatures are not verified."""

    rotations: tuple[Envelope, ...] = ()
    release: Envelope | None = None

    @property
    def keys_version(self) -> int:
        """The version of its keys; 0: those of the policies."""
        if not self.rotations:
            return 0
        last = read_statement(self.rotations[-1].payload, KEYS_PREDICATE)
        return int(last.predicate["version"])

    @property
    def name(self) -> str | None:
        """The channel's name; None: it has no release yet."""
        if self.release is None:
            return None
        return str(read_statement(self.release.payload, RELEASE_PREDICATE).predicate["channel"])

    @property
    def version(self) -> int:
        """The version of its release; 0: there is none yet."""
        if self.release is None:
            return 0
        predicate = read_statement(self.release.payload, RELEASE_PREDICATE).predicate
        return int(predicate["version"])

    def encode(self) -> bytes:
        """Return the file's content."""
        assert self.release is not None
        return encode_channel(self.rotations, self.release)


def read_channel(content: bytes, where: str) -> ChannelFile:
    """Return a channel's file.

    Raises:
        UsageError: it is none.
    """
    try:
        found: Any = json.loads(content)
        read = ChannelFile(
            tuple(envelope_of(each) for each in found["keys"]), envelope_of(found["release"])
        )
        _ = read.name, read.version, read.keys_version
        return read
    except (ValueError, RecursionError, LookupError, TypeError, RefusedError) as error:
        raise UsageError(f"{where}: expected the file of a channel: {error}") from error


def release(
    file: ChannelFile,
    name: str,
    bundle: str,
    subjects: Sequence[SignedSubject],
    keys: Sequence[PrivateKey],
    expires: datetime,
) -> ChannelFile:
    """Return a channel whose current bundle is another, or the same with a later expiry.

    Args:
        file: the channel before.
        name: its name.
        bundle: the bundle's name.
        subjects: the digest of its index, and of the manifest of each target.
        keys: the private keys that sign.
        expires: until when it is the current one at the latest, in UTC.

    Raises:
        UsageError: servers would refuse the release: the channel has another name or other keys.
    """
    _check_publisher(file, name, keys)
    payload = release_statement(
        name,
        bundle,
        tuple(subjects),
        version=file.version + 1,
        keys_version=file.keys_version,
        expires=expires,
    )
    return replace(file, release=_signed(payload, keys))


def rotate(
    file: ChannelFile,
    name: str,
    new: Sequence[PublicKey],
    threshold: int,
    keys: Sequence[PrivateKey],
    expires: datetime,
) -> ChannelFile:
    """Return a channel with other keys, whose release is signed again by those that stay or are new.

    Args:
        file: the channel before; it has a release.
        name: its name.
        new: the public keys of the next version.
        threshold: how many of them must sign.
        keys: the private keys that sign: of the old version as many as its threshold, and of the new one.
        expires: until when the keys count, in UTC.

    Raises:
        UsageError: the channel has no release or another name, or keys are missing among the private ones.
    """
    if file.release is None:
        raise UsageError("expected a channel with a release, found none", hint="release first")
    _check_publisher(file, name, keys)
    payload = keys_statement(
        name, tuple(new), version=file.keys_version + 1, threshold=threshold, expires=expires
    )
    staying = [key for key in keys if key.public.id in {each.id for each in new}]
    if not staying:
        raise UsageError(
            "expected a private key of the new ones, which signs the release again, found none",
            hint="give both: --key OLD.pem --key NEW.pem",
        )
    rotated = ChannelFile((*file.rotations, _signed(payload, keys)), file.release)
    current = read_statement(file.release.payload, RELEASE_PREDICATE)
    until = datetime.strptime(str(current.predicate["expires"]), "%Y-%m-%dT%H:%M:%SZ")
    bundle = str(current.predicate["bundle"])
    return release(rotated, name, bundle, current.subjects, staying, until)


def _check_publisher(file: ChannelFile, name: str, keys: Sequence[PrivateKey]) -> None:
    """Check that servers which follow a channel accept what these keys sign under a name.

    Keys of version 0 are in the policies of the servers. Here those of the last release stand for them.
    """
    if file.release is None:
        return
    if name != file.name:
        raise UsageError(
            f"--name: expected {file.name!r}, the channel of this file, found {name!r}; nothing was changed",
            hint="give that name, or another file for another channel",
        )
    if file.rotations:
        listed = read_statement(file.rotations[-1].payload, KEYS_PREDICATE).predicate["keys"]
        known = {read_key(pem.encode(), "a key of the channel").id for pem in listed}
        expected = f"a key of version {file.keys_version} of its keys"
    else:
        known = signers(file.release, [key.public for key in keys])
        expected = f"a key that signed version {file.version}"
    if not known & {key.id for key in keys}:
        found = " and ".join(key.id[:12] for key in keys)
        raise UsageError(
            f"--key: channel {name!r} expects {expected}, found {found}; nothing was changed, because "
            "servers would refuse the channel",
            hint="sign with such a key; to change keys: prejit channel rotate FILE --name NAME "
            "--public NEW.pub.pem --key OLD.pem --key NEW.pem",
        )


def is_listed(file: ChannelFile, key: PrivateKey) -> bool:
    """Return whether a key belongs to the two newest versions of the keys, as far as the file has them."""
    listed = (
        pem
        for each in file.rotations[-2:]
        for pem in read_statement(each.payload, KEYS_PREDICATE).predicate["keys"]
    )
    return key.public.id in {read_key(pem.encode(), "a key of the channel").id for pem in listed}


def add_signature(file: ChannelFile, key: PrivateKey) -> ChannelFile:
    """Return a channel whose release and newest keys this key signs too.

    So several people can reach a threshold, each with a key of their own. Keys of version 0 are in the
    policies of the servers alone, and sign the keys of version 1 too: up to that version any key is taken.

    Raises:
        UsageError: the key belongs neither to the channel's newest keys nor to those before.
    """
    assert file.release is not None
    if file.keys_version > 1 and not is_listed(file, key):
        raise UsageError(
            f"--key: channel {file.name!r} expects a key of version {file.keys_version} of its keys, or of "
            "the one before, found another; nothing was changed, because servers do not count its signature",
            hint="sign with such a key; `prejit channel rotate` gives the channel other keys",
        )
    rotations = file.rotations
    if rotations:
        rotations = (*rotations[:-1], _added(rotations[-1], key))
    return ChannelFile(rotations, _added(file.release, key))


def _added(envelope: Envelope, key: PrivateKey) -> Envelope:
    if signers(envelope, [key.public]):
        return envelope
    return envelope._replace(signatures=(*envelope.signatures, key.sign(envelope.payload)))


def _signed(payload: bytes, keys: Sequence[PrivateKey]) -> Envelope:
    return Envelope(payload, tuple(key.sign(payload) for key in keys))


def release_bundle(
    file: Path, bundle: Path, name: str, keys: Sequence[PrivateKey], days: int
) -> int:
    """Make a bundle the current one of a channel. Return the version of the release.

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
    """Change a channel's file while no other process does. Return the channel."""

    def content() -> bytes | None:
        is_new = may_begin and not file.exists()
        return None if is_new else _bytes(file, MAX_CHANNEL_BYTES)

    with store_errors(file, "open its directory"):
        directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
    targets = [
        SignedSubject(at.digest, (at.annotations or {}).get(REF_NAME, ""))
        for at in root.bundle.manifests
    ]
    whole = SignedSubject(root.digest)
    subjects = [whole, *(each for each in targets if each.digest != root.digest)]
    return root.bundle.annotations[BUNDLE_NAME], subjects


def _after(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def release_statement(
    name: str,
    bundle: str,
    subjects: tuple[SignedSubject, ...],
    *,
    version: int,
    keys_version: int,
    expires: datetime,
) -> bytes:
    """Return the payload of a release of a bundle: its `subjects` are its index and its targets' manifests.

    `version` is higher than that of every release before; the keys of `keys_version` will sign it.
    """
    predicate = {
        "channel": name,
        "bundle": bundle,
        "version": version,
        "keys": keys_version,
        "expires": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return encode_statement(Statement(RELEASE_PREDICATE, subjects, predicate))


def keys_statement(
    name: str, keys: tuple[PublicKey, ...], *, version: int, threshold: int, expires: datetime
) -> bytes:
    """Return the payload of a rotation: the keys of a version. Arguments as of `release_statement`."""
    predicate = {
        "channel": name,
        "version": version,
        "threshold": threshold,
        "keys": [key.pem for key in keys],
        "expires": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    subjects = tuple(SignedSubject(f"sha256:{key.id}") for key in keys)
    return encode_statement(Statement(KEYS_PREDICATE, subjects, predicate))


def encode_channel(rotations: Iterable[Envelope], release: Envelope) -> bytes:
    """Return the file of a channel."""
    found = {
        "mediaType": CHANNEL_MEDIA_TYPE,
        "keys": [encode_envelope(each) for each in rotations],
        "release": encode_envelope(release),
    }
    return json.dumps(found, sort_keys=True, separators=(",", ":")).encode("ascii")
