"""Drafts of the tokens that may follow, looked up in the text so far: no second model.

Where a text repeats itself (code that is edited, documents that are quoted), what followed the last few
tokens the last time is a good guess. Saxena 2023, "Prompt Lookup Decoding"; transformers,
PromptLookupCandidateGenerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

_LENGTHS = (3, 2)
"""Of the runs of tokens that are looked up, the best first."""


@final
class PromptLookup:
    """An index of a text that grows. The cost of a token does not depend on how many there are."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Indexes a prompt."""
        self._ids: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens to the text."""
        for token in token_ids:
            place = len(self._ids)  # of the token that follows what is there now
            for length in _LENGTHS:
                if place >= length:
                    self._following[tuple(self._ids[place - length :])] = place
            self._ids.append(token)

    def draft(self, count: int) -> list[int]:
        """At most so many tokens that followed the last time that the text stood as it ends now.

        A text that repeats with a short period is guessed to go on so.
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
