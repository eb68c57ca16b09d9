"""Channels: which bundle is the current one, so that an old one with a valid signature does not come back.

    {"mediaType": "application/vnd.prejit.channel.v1+json",
     "keys": [DSSE envelope, ...],     each names the keys of the next version, oldest first; may be empty
     "release": DSSE envelope}         names the current bundle

The rules are those of The Update Framework (TUF 1.0, 5.3 and 5.4):

- A version only rises. Equal versions have equal content. `channel_state` keeps what was accepted last. To go
  back to an older bundle, publish a release of a higher version that names the older digest.
- Version n + 1 of the keys is signed by a threshold of the keys of version n, and by a threshold of its own.
- A release names the version of the keys that sign it, and releases are compared by both versions. So whoever
  stole keys cannot block the channel with a huge version: after a rotation, versions may start again.
- Releases and keys have a moment at which they expire.

Two things are kept: per policy what it accepted last, and per key the newest that it signed (`KeyMark`). The
first says which keys count now. The second only refuses, so all policies share it: one under another name,
or one that was edited, does not go back either.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import PolicyError
from prejit.runtime.trust.public_keys import PublicKey, read_key
from prejit.runtime.trust.reasons import Reason, RefusedError
from prejit.runtime.trust.signed_statements import (
    KEYS_PREDICATE,
    RELEASE_PREDICATE,
    Envelope,
    envelope_of,
    field,
    read_object,
    read_statement,
)

CHANNEL_MEDIA_TYPE = "application/vnd.prejit.channel.v1+json"
MAX_CHANNEL_BYTES = 4 << 20
"""Maximum size of a channel's file."""
MAX_ROTATIONS = 256
"""Maximum number of versions of the keys in one file."""
MAX_KEYS = 16
"""Maximum number of keys of one version."""
MAX_VERSION = (1 << 53) - 1
"""Maximum of a version, which every reader of JSON keeps exactly."""


class KeySet(NamedTuple):
    """The keys of a channel, each once: `threshold` of them must sign.

    `version` rises by one with each rotation; from `expires` (seconds since the epoch; None: never) they
    count no more.
    """

    version: int
    keys: tuple[PublicKey, ...]
    threshold: int
    expires: float | None = None

    @property
    def id(self) -> str:
        """A text that no other keys have."""
        return " ".join((str(self.version), str(self.threshold), *sorted(k.id for k in self.keys)))


class Release(NamedTuple):
    """The current bundle of a channel: `digests` of its index and of the manifest of each target.

    `version` rises with each release; from `expires` (seconds since the epoch) it is no longer known to be
    current.
    """

    version: int
    bundle: str
    digests: frozenset[str]
    expires: float


class Accepted(NamedTuple):
    """The newest keys and release of a channel that a machine has accepted and keeps.

    `version` 0: no release yet. `release_keys_version`: the version of the keys that signed it;
    `release_digest`: of its statement. `began`: id of the policy's keys that the rotations began with.
    """

    keys: KeySet
    version: int = 0
    release_keys_version: int = 0
    release_digest: str = ""
    began: str = ""


class KeyMark(NamedTuple):
    """The newest statements of a channel that one key signed, among those which a machine has accepted.

    0 as a version: it signed none. Digests are those of the statements.
    """

    keys_version: int = 0
    keys_digest: str = ""
    release_keys_version: int = 0
    version: int = 0
    release_digest: str = ""


class Verified(NamedTuple):
    """A statement of a channel's file whose signatures were verified, with the ids of their keys.

    `keys_version`: the version of the keys that it is; of a release, the version that signs it. `version`:
    that of the release; None: it is a version of the keys.
    """

    digest: str
    signers: frozenset[str]
    keys_version: int
    version: int | None = None


class Outcome(NamedTuple):
    """A file of a channel that was accepted.

    Attributes:
        release: the current release.
        accepted: to be kept before the release is used.
        expired: why it may be out of date; None: it is not.
        verified: the versions of the keys that are new, and the release, which is the last.
        trusted: ids of all keys that the rotations began with or led to.
    """

    release: Release
    accepted: Accepted
    expired: Reason | None
    verified: tuple[Verified, ...]
    trusted: frozenset[str]


def accept(
    content: bytes,
    name: str,
    last: Accepted,
    now: float,
    *,
    minimum_version: int = 0,
    revoked: frozenset[str] = frozenset(),
) -> Outcome:
    """Verify a channel's file against what was accepted last: on the first time only the policy's keys.

    `now` is in seconds since the epoch; `revoked` has the ids of keys that do not count.

    Raises:
        RefusedError: it is damaged, is not signed by enough keys, or is older than what was accepted last.
    """
    what = f"channel {name!r}"
    found = read_object(content, MAX_CHANNEL_BYTES, "channel-json", what)
    if found.get("mediaType") != CHANNEL_MEDIA_TYPE:
        raise RefusedError("channel-type", f"{what}: expected {CHANNEL_MEDIA_TYPE}")
    rotations = field(found, "keys", list, "channel-keys", what)
    if len(rotations) > MAX_ROTATIONS:
        raise RefusedError(
            "channel-keys", f"{what}: expected at most {MAX_ROTATIONS} versions of its keys"
        )
    keys, verified, trusted = last.keys, list[Verified](), {key.id for key in last.keys.keys}
    for each in rotations:
        rotation = envelope_of(each)
        before, keys = keys, _rotated(keys, rotation, name, revoked)
        if keys is not before:
            trusted |= {key.id for key in keys.keys}
            signed = signers(rotation, (*before.keys, *keys.keys)) - revoked
            verified.append(Verified(digest_of(rotation.payload), frozenset(signed), keys.version))
    expired: Reason | None = None
    if keys.expires is not None and now >= keys.expires:
        expired = Reason(
            "channel-keys-expired", "expiry", f"{what}: its keys expired at {_shown(keys.expires)}"
        )
    envelope = envelope_of(found.get("release"))
    signed = _check_signed(envelope, keys, revoked, what, "its release")
    release, keys_version = _release(envelope, name)
    if keys_version != keys.version:
        raise RefusedError(
            "channel-release-keys",
            f"{what}: expected a release of version {keys.version} of its keys, found one of {keys_version}",
        )
    digest = digest_of(envelope.payload)
    verified.append(Verified(digest, frozenset(signed), keys_version, release.version))
    _check_order(verified[-1], last, what)
    if release.version < minimum_version:
        raise RefusedError(
            "channel-minimum",
            f"{what}: expected version {minimum_version} or later, found {release.version}",
            "authenticity",
        )
    if expired is None and now >= release.expires:
        expired = Reason(
            "channel-expired",
            "expiry",
            f"{what}: release {release.version} expired at {_shown(release.expires)}",
        )
    accepted = Accepted(keys, release.version, keys_version, digest, last.began)
    return Outcome(release, accepted, expired, tuple(verified), frozenset(trusted))


def _check_order(release: Verified, last: Accepted | KeyMark, what: str) -> None:
    """Check that a release is not older than one that was accepted, nor another of the same version."""
    order = release.keys_version, release.version
    before = last.release_keys_version, last.version
    if order < before:
        raise RefusedError(
            "channel-rollback",
            f"{what}: expected version {last.version} or later, which this machine has accepted, found "
            f"{release.version}",
            "authenticity",
        )
    if order == before and last.release_digest and release.digest != last.release_digest:
        raise RefusedError(
            "channel-two-releases",
            f"{what}: expected the release that this machine has accepted as version {release.version}, "
            "found another of the same version",
            "authenticity",
        )


def check_mark(outcome: Outcome, mark: KeyMark, name: str) -> None:
    """Check that a file is not older than the newest that one of its keys has signed, under any policy.

    Raises:
        RefusedError: it is.
    """
    what = f"channel {name!r}"
    *rotations, release = outcome.verified
    if release.keys_version < mark.keys_version:
        raise RefusedError(
            "channel-rollback",
            f"{what}: expected version {mark.keys_version} of its keys or later, which this machine has "
            f"accepted, found {release.keys_version}",
            "authenticity",
        )
    for each in rotations:
        if each.keys_version == mark.keys_version and each.digest != mark.keys_digest:
            raise RefusedError(
                "channel-two-keys",
                f"{what}: expected the keys that this machine has accepted as version {each.keys_version}, "
                "found others of the same version",
                "authenticity",
            )
    _check_order(release, mark, what)


def marked(mark: KeyMark, signed: Verified) -> KeyMark:
    """Return the mark of a key after it signed a statement, which `check_mark` has allowed."""
    if signed.version is not None:
        return mark._replace(
            release_keys_version=signed.keys_version,
            version=signed.version,
            release_digest=signed.digest,
        )
    if signed.keys_version <= mark.keys_version:
        return mark
    return mark._replace(keys_version=signed.keys_version, keys_digest=signed.digest)


def signers(envelope: Envelope, keys: Iterable[PublicKey]) -> set[str]:
    """Return the ids of the keys that signed an envelope. A key that signed twice is there once."""
    return {key.id for key in keys if envelope.is_signed_by(key)}


def _check_signed(
    envelope: Envelope, keys: KeySet, revoked: frozenset[str], what: str, which: str
) -> set[str]:
    """Return the ids of the keys that signed an envelope, which are enough."""
    found = signers(envelope, keys.keys) - revoked
    if len(found) < keys.threshold:
        raise RefusedError(
            "channel-signature",
            f"{what}: expected {which} signed by {keys.threshold} of the {len(keys.keys)} keys of version "
            f"{keys.version}, found {len(found)}",
            "authenticity",
        )
    return found


def _rotated(current: KeySet, envelope: Envelope, name: str, revoked: frozenset[str]) -> KeySet:
    """Return the keys after a rotation; the current ones if they are as new."""
    what = f"channel {name!r}"
    predicate = read_statement(envelope.payload, KEYS_PREDICATE).predicate
    version = _version(predicate, "version", what)
    if version <= current.version:
        return current  # accepted already, or older than those of the policy
    if version != current.version + 1:
        raise RefusedError(
            "channel-keys-version",
            f"{what}: expected version {current.version + 1} of its keys, found {version}",
        )
    # The old keys come first: before they say so, nothing of the statement is to be read.
    _check_signed(envelope, current, revoked, what, f"version {version} of its keys")
    keys = _key_set(predicate, name, version)
    _check_signed(envelope, keys, revoked, what, f"version {version} of its keys")
    return keys


def _key_set(predicate: Any, name: str, version: int) -> KeySet:
    what = f"channel {name!r}: version {version} of its keys"
    _check_name(predicate, name, what)
    listed = field(predicate, "keys", list, "channel-keys", what)
    if not 1 <= len(listed) <= MAX_KEYS or not all(type(each) is str for each in listed):
        raise RefusedError("channel-keys", f"{what}: expected 1 to {MAX_KEYS} keys in PEM")
    try:
        keys = tuple(read_key(each.encode("utf-8"), what) for each in listed)
    except PolicyError as error:
        raise RefusedError("channel-keys", str(error)) from error
    threshold = field(predicate, "threshold", int, "channel-keys", what)
    if len({key.id for key in keys}) != len(keys) or not 1 <= threshold <= len(keys):
        raise RefusedError(
            "channel-keys", f"{what}: expected each key once and a threshold of 1 to their number"
        )
    return KeySet(version, keys, threshold, _moment(predicate, what))


def _release(envelope: Envelope, name: str) -> tuple[Release, int]:
    """Return a release and the version of the keys that it names."""
    what = f"channel {name!r}: release"
    statement = read_statement(envelope.payload, RELEASE_PREDICATE)
    predicate: Any = statement.predicate
    _check_name(predicate, name, what)
    release = Release(
        _version(predicate, "version", what),
        field(predicate, "bundle", str, "channel-release", what),
        frozenset(each.digest for each in statement.subjects),
        _moment(predicate, what),
    )
    return release, _version(predicate, "keys", what)


def _check_name(predicate: Any, name: str, what: str) -> None:
    found = field(predicate, "channel", str, "channel-name", what)
    if found != name:
        raise RefusedError(
            "channel-name", f"{what}: expected one of channel {name!r}, found {found!r:.80}"
        )


def _version(predicate: Any, key: str, what: str) -> int:
    version = field(predicate, key, int, "channel-version", what)
    if not 0 <= version <= MAX_VERSION:
        raise RefusedError("channel-version", f"{what}: expected 0 to {MAX_VERSION}")
    return version


def _moment(predicate: Any, what: str) -> float:
    text = field(predicate, "expires", str, "channel-expires", what)
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise RefusedError(
            "channel-expires",
            f"{what}: expires: expected a time such as 2027-06-30T12:00:00Z, found {text!r:.80}",
        ) from error


def _shown(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def why_not_current(release: Release, bundle: str, index: str, manifest: str) -> Reason | None:
    """Return why a bundle is not the current one of a channel; None: it is.

    `index` is the digest of its index, `manifest` that of the manifest of the target that would run.
    """
    if release.bundle != bundle:
        return Reason(
            "channel-bundle",
            "authenticity",
            f"expected the bundle {release.bundle!r:.80} of the channel, found {bundle!r:.80}",
        )
    if index in release.digests or manifest in release.digests:
        return None
    return Reason(
        "channel-other",
        "authenticity",
        f"expected the bundle of release {release.version} of the channel, found {index}",
    )
