"""Follow a channel: read its file, compare it with what was accepted last, and keep what is accepted.

One file per policy and channel has what that policy accepted, and the keys that count now. One file per
channel and key has the newest that this key signed, under any policy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from prejit.runtime.base.files import user_directory
from prejit.runtime.base.written_files import lock_file, write_file
from prejit.runtime.errors import PolicyError, StoreError
from prejit.runtime.machine.kept_files import is_own
from prejit.runtime.trust.channel import (
    MAX_CHANNEL_BYTES,
    Accepted,
    KeyMark,
    KeySet,
    Outcome,
    accept,
    check_mark,
    marked,
)
from prejit.runtime.trust.policy import ChannelRule, Policy
from prejit.runtime.trust.public_keys import read_key
from prejit.runtime.trust.reasons import Reason, RefusedError
from prejit.runtime.trust.signed_statements import field, read_object

_log = logging.getLogger(__name__)


def current_release(policy: Policy, channel: ChannelRule, now: float) -> Outcome | Reason:
    """Return the current release of a channel, or why there is none. Keep that it was accepted.

    Raises:
        PolicyError: what was accepted cannot be read or kept.
    """
    try:
        with open(channel.file, "rb") as file:
            content = file.read(MAX_CHANNEL_BYTES + 1)
    except OSError as error:
        return Reason(
            "channel-missing",
            "authenticity",
            f"channel {channel.name!r}: cannot read {channel.file}: {error.strerror}",
        )
    state = ChannelState(policy.path, channel.name)
    with state.locked():
        kept = state.read()
        last = _newest(kept, channel, now)
        try:
            outcome = accept(
                content,
                channel.name,
                last,
                now,
                minimum_version=channel.minimum_version,
                revoked=policy.revoked_keys,
            )
            ids = outcome.trusted | {each.id for each in channel.keys}
            marks = {each: state.mark(each) for each in ids}
            for mark in marks.values():
                check_mark(outcome, mark, channel.name)
        except RefusedError as error:
            case, kind, text = error.reason
            # An envelope or a statement here is the channel's, not one that is attached to the bundle.
            case = case if case.startswith("channel-") else f"channel-{case}"
            return Reason(case, kind, f"{channel.file}: {text}")
        # The marks come first: once the rotations are kept, they are not verified again.
        for key, before in marks.items():
            after = before
            for each in outcome.verified:
                after = marked(after, each) if key in each.signers else after
            if after != before:
                state.write_mark(key, after)
        if outcome.accepted != kept:
            state.write(outcome.accepted)
    _log.info("channel %s: version %d is current", channel.name, outcome.release.version)
    return outcome


def _newest(kept: Accepted | None, channel: ChannelRule, now: float) -> Accepted:
    """Return what was accepted last, with the keys that count now.

    These are the policy's own, unless rotations that began with them led to newer ones.
    """
    keys = tuple(each.key for each in channel.keys if each.expires is None or now < each.expires)
    own = KeySet(channel.keys_version, keys, channel.threshold)
    began = own._replace(keys=tuple(each.key for each in channel.keys)).id
    if kept is None:
        return Accepted(own, began=began)
    if kept.began == began and kept.keys.version > own.version:
        return kept
    return kept._replace(keys=own, began=began)


_MAX_BYTES = 1 << 20


def state_root() -> Path:
    """Return the directory of states: `$XDG_STATE_HOME/prejit/trust`, else `~/.local/state/prejit/trust`."""
    return user_directory("XDG_STATE_HOME", "~/.local/state") / "trust"


@final
class ChannelState:
    """The state of one channel of one policy: a file that only this user may write.

    Unlike a cache it must be there: without it a rollback is not noticed. So what cannot be kept is an error.
    """

    def __init__(self, policy: str, channel: str) -> None:
        """Choose the file, by the path of the policy and the name of the channel."""
        self._channel = channel
        self.path = _file("policy", os.path.abspath(policy), channel)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the channel's lock for a block, so that two starts do not accept two releases at once.

        Raises:
            PolicyError: the directory cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = lock_file(_file("channel", self._channel).with_suffix(".lock"))
        except OSError as error:
            raise _unkept(self.path, str(error.strerror)) from error
        try:
            yield
        finally:
            os.close(descriptor)

    def read(self) -> Accepted | None:
        """Return what was accepted last; None: nothing yet.

        Raises:
            PolicyError: the file cannot be read or is damaged, or others may write to it.
        """
        return None if (content := _content(self.path)) is None else _read(content, self.path)

    def mark(self, key: str) -> KeyMark:
        """Return the newest that a key, by its id, signed of the channel. Errors as of `read`."""
        path = self._mark_file(key)
        if (content := _content(path)) is None:
            return KeyMark()
        kinds = {name: type(value) for name, value in KeyMark()._asdict().items()}
        found = _fields(content, path, **kinds)
        return KeyMark(**{name: found[name] for name in kinds})

    def write(self, accepted: Accepted) -> None:
        """Keep what was accepted. Raise PolicyError where it cannot be written."""
        found = {
            "keys": [key.pem for key in accepted.keys.keys],
            "keys_version": accepted.keys.version,
            "threshold": accepted.keys.threshold,
            "expires": accepted.keys.expires,
            "version": accepted.version,
            "release_keys_version": accepted.release_keys_version,
            "release": accepted.release_digest,
            "began": accepted.began,
        }
        _write(self.path, found)

    def write_mark(self, key: str, mark: KeyMark) -> None:
        """Keep the newest that a key, by its id, signed of the channel. Errors as of `write`."""
        _write(self._mark_file(key), mark._asdict())

    def _mark_file(self, key: str) -> Path:
        return _file("key", self._channel, key)


def _file(*of: str) -> Path:
    """Return the file of the state of something."""
    return state_root() / (hashlib.sha256("\0".join(of).encode()).hexdigest() + ".json")


def _content(path: Path) -> bytes | None:
    """Return the content of a file that only this user may write; None: there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(path, flags), "rb") as file:
            if not is_own(os.fstat(file.fileno())):
                raise _damaged(path, "others may write to it")
            return file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unkept(path, str(error.strerror)) from error


def _write(path: Path, found: Mapping[str, object]) -> None:
    try:
        write_file(path, json.dumps(found, sort_keys=True).encode("ascii"), mode=0o600)
    except StoreError as error:
        raise _unkept(path, str(error)) from error


def _unkept(path: Path, reason: str) -> PolicyError:
    return PolicyError(
        f"{path}: cannot keep which release was accepted: {reason}",
        hint="set XDG_STATE_HOME to a directory that this user can write and that outlives the process",
    )


def _damaged(path: Path, reason: str) -> PolicyError:
    return PolicyError(
        f"{path}: expected the state of a channel: {reason}",
        hint="find out who changed it, then delete it; the next start accepts any release that is signed",
    )


def _fields(content: bytes, path: Path, **kinds: type) -> dict[str, Any]:
    """Return the values of a state, of these types. Raise PolicyError where the content is damaged."""
    try:
        found = read_object(content, _MAX_BYTES, "state", str(path))
        for name, kind in kinds.items():
            field(found, name, kind, "state", str(path))
    except RefusedError as error:
        raise _damaged(path, str(error)) from error
    return found


def _read(content: bytes, path: Path) -> Accepted:
    """Return what was accepted. Errors as of `_fields`."""
    numbers = ("keys_version", "threshold", "version", "release_keys_version")
    found = _fields(content, path, keys=list, release=str, began=str, **dict.fromkeys(numbers, int))
    try:
        keys = tuple(read_key(str(pem).encode("utf-8"), str(path)) for pem in found["keys"])
    except (PolicyError, UnicodeEncodeError) as error:
        raise _damaged(path, str(error)) from error
    expires, threshold = found.get("expires"), found["threshold"]
    if not isinstance(expires, int | float | None) or isinstance(expires, bool):
        raise _damaged(path, f"{path}: expires: expected a number or null")
    if not 1 <= threshold <= len(keys):
        raise _damaged(path, f"{path}: threshold: expected 1 to the number of keys")
    return Accepted(
        KeySet(found["keys_version"], keys, threshold, expires),
        *(found[name] for name in ("version", "release_keys_version", "release", "began")),
    )
