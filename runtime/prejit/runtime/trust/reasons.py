"""Why a signature does not count, or why a bundle is not trusted."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["integrity", "authenticity", "expiry", "revocation"]
"""What a reason is about, in notation's words: a signature that is damaged or is of something else; none by a
trusted key; one that is out of date; one that was revoked. The level of a rule enforces some of them."""


class Reason(NamedTuple):
    """One reason.

    Attributes:
        case: stable name, such as `unsigned`, for programs and tests.
        kind: what it is about.
        text: what was expected and what was found.
    """

    case: str
    kind: Kind
    text: str

    @property
    def hint(self) -> str:
        """The next step for who runs the bundle."""
        if (hint := _HINTS.get(self.case)) is not None:
            return hint
        return _BAD_CHANNEL if self.case.startswith("channel-") else _BAD_SIGNATURE


_OTHER_SIGNER = (
    "get the bundle from who may sign it; if you trust this signer, add its key or identity to the rule, or "
    "sign the bundle with a key of the rule (prejit sign)"
)
_SIGN_AGAIN = (
    "sign the bundle again (prejit sign) with a key that is valid, and name that key in the rule"
)
_DESCRIPTIONS = (
    "sign the bundle again with a key of the rule (prejit sign also signs provenance and SBOM); where these "
    "are signed and say something else, change the rule or build the bundle again"
)
_NOT_CURRENT = (
    "get the bundle of the channel's current release; or release this one with `prejit channel release`, and "
    "give this machine that file"
)
_LATE_CHANNEL = (
    "get the channel's newest file. If there is none, its owner releases again (`prejit channel release`). "
    "Look at this machine's clock, too"
)
_BAD_CHANNEL = (
    "get the channel's file again from its owner: this one is not a release that the rule accepts"
)
_BAD_SIGNATURE = (
    "a signature that is attached to the bundle is damaged or not for prejit: get the bundle again, or have "
    "it signed again (prejit sign)"
)
_REVOKED = "do not run this bundle: the policy revokes it, whoever signs it. Get a newer one"
_HINTS = {
    "no-rule": "add a [[rules]] whose `names` fit the bundle's name to the policy; no signature helps",
    "unsigned": "sign the bundle with a key of the rule (prejit sign), or get a signed one",
    "threshold": "have the holders of the other keys of the rule sign the bundle, too (prejit sign)",
    "unknown-key": _OTHER_SIGNER,
    "unknown-identity": _OTHER_SIGNER,
    "other-subject": "the signature is for another build: get the bundle that it was made for, or have this "
    "one signed (prejit sign)",
    "key-expired": _SIGN_AGAIN,
    "key-revoked": _SIGN_AGAIN,
    "bundle-revoked": _REVOKED,
    "digest-revoked": _REVOKED,
    "provenance": _DESCRIPTIONS,
    "sbom": _DESCRIPTIONS,
    "channel-missing": "put the channel's file where the policy's `file` says, or correct the path",
    "channel-bundle": _NOT_CURRENT,
    "channel-other": _NOT_CURRENT,
    "channel-expired": _LATE_CHANNEL,
    "channel-keys-expired": _LATE_CHANNEL,
    "channel-rollback": "get the channel's newest file: this machine has accepted a later one",
    "channel-minimum": "get the channel's newest file: the policy wants a later release than this one",
}
"""Hints by case."""


class RefusedError(Exception):
    """Something that is attached to a bundle does not count. It never leaves this room."""

    def __init__(self, case: str, text: str, kind: Kind = "integrity") -> None:
        super().__init__(text)
        self.reason = Reason(case, kind, text)
