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


class RefusedError(Exception):
    """Something that is attached to a bundle does not count. It never leaves this room."""

    def __init__(self, case: str, text: str, kind: Kind = "integrity") -> None:
        super().__init__(text)
        self.reason = Reason(case, kind, text)
