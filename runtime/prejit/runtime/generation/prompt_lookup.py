"""Drafts of the next tokens, looked up in the text so far: speculation without a second model.

If a text repeats itself (edited code, quoted documents), the tokens that followed the last few tokens before
are a good guess. Saxena 2023, "Prompt Lookup Decoding"; transformers, PromptLookupCandidateGenerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

_LENGTHS = (3, 2)
"""The lookup compares runs of this many tokens, longer runs first."""


@final
class PromptLookup:
    """An index of a growing text. Adding a token and drafting cost the same at any length of the text."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Index a prompt."""
        self._ids: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the text."""
        for token in token_ids:
            place = len(self._ids)  # where this token goes: after the run that ends here
            for length in _LENGTHS:
                if place >= length:
                    self._following[tuple(self._ids[place - length :])] = place
            self._ids.append(token)

    def draft(self, count: int) -> list[int]:
        """Return at most this many tokens, those that followed when the text last ended as it ends now.

        If the text repeats with a short period, the draft continues that period.
        """
        size = len(self._ids)
        for length in _LENGTHS:
            place = (
                self._following.get(tuple(self._ids[size - length :])) if size > length else None
            )
            if place is not None:
                period = size - place
                return [self._ids[place + offset % period] for offset in range(count)]
        return []
