"""Drafts of the next tokens: looked up in the text so far, and whether those of any kind pay.

If a text repeats itself (edited code, quoted documents), the tokens that followed the last few tokens before
are a good guess. Saxena 2023, "Prompt Lookup Decoding"; transformers, PromptLookupCandidateGenerator.

Drafts have a credit of decode steps that they may lose. A verify call adds the tokens that it gives, and
takes its time and that of the draft. Each decode step adds a little, so that drafts are tried again.
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


FIRST_CREDIT = 8.0
"""How many decode steps the first drafts may lose."""
_MOST_CREDIT = 32.0
"""How many decode steps drafts may lose after any success, such as where a text changes."""
_LEAST_CREDIT = -128.0
"""No call takes more than this away: the machine may have slept meanwhile."""
_SHARE = 1 / 64
"""The part of decode steps that drafts may lose on and on."""
_KEPT = 5
"""A program's time is the median of so many calls: now and then the machine does something else."""
_LEAST = 2
"""A step is known after so many calls."""
_ROUNDS = 4, 64
"""A step is measured again after so many verify calls, at first and at most: twice as many each time."""


@final
class DraftPace:
    """The credit of drafts of one kind, and the measured times of programs.

    Attributes:
        credit: in decode steps; drafts pause while it is not above 0.
    """

    def __init__(self) -> None:
        """Begin with the first credit."""
        self.credit = FIRST_CREDIT
        self._times: dict[str, list[float]] = {}
        self._rounds, self._most_rounds = 0, _ROUNDS[0]

    def allows(self, decode: str) -> bool:
        """Return whether a draft may be verified in place of a step of this program."""
        is_known = len(self._times.get(decode, ())) >= _LEAST
        return is_known and self.credit > 0 and self._rounds < self._most_rounds

    def decoded(self, decode: str, steps: int, seconds: float) -> None:
        """Learn from a decode call."""
        self._measured(decode, seconds / steps)
        self.credit = min(_MOST_CREDIT, self.credit + steps * _SHARE)
        if self._rounds >= self._most_rounds:
            self._most_rounds = min(2 * self._most_rounds, _ROUNDS[1])
        self._rounds = 0

    def verified(
        self, decode: str, verify: str, tokens: float, seconds: float, *, once: bool = False
    ) -> None:
        """Learn from a call in place of steps of `decode`, which gave so many tokens a row.

        `once`: the draft model has read more of the text, so that the time says nothing of other calls.
        """
        step = self._measured(decode)
        if not once:
            seconds = self._measured(verify, seconds)
        self._rounds += 1
        if step and seconds:
            self.credit = min(
                _MOST_CREDIT, max(_LEAST_CREDIT, self.credit + tokens - seconds / step)
            )

    def _measured(self, program: str, *seconds: float) -> float:
        """Return the time of a program, with another measurement; 0: it is not known.

        The first call of a program does not count: it may have loaded it.
        """
        if (times := self._times.get(program)) is None:
            self._times[program] = []
            return 0.0
        times += seconds
        del times[:-_KEPT]
        return sorted(times)[(len(times) - 1) // 2] if times else 0.0
