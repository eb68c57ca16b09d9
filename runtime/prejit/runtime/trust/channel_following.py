"""Follow a channel: read its file, compare it with what was accepted last, and keep what is accepted."""

from __future__ import annotations

import logging

from prejit.runtime.trust.channel import (
    MAX_CHANNEL_BYTES,
    Accepted,
    KeySet,
    Outcome,
    accept,
    check_mark,
    marked,
)
from prejit.runtime.trust.channel_state import ChannelState
from prejit.runtime.trust.policy import ChannelRule, Policy
from prejit.runtime.trust.reasons import Reason, RefusedError

_log = logging.getLogger(__name__)


def current_release(policy: Policy, channel: ChannelRule, now: float) -> Outcome | Reason:
    """Return the current release of a channel, or why there is none. Keep that it was accepted.

    Args:
        policy: the policy.
        channel: the channel.
        now: seconds since the epoch.

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
