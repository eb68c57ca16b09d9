"""Stop strings over text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from prejit.runtime.base import arguments


@final
class StopStrings:
    """Gives out text up to the first stop string in it, never a part of one.

    The first is the one that ends first, since a stream must decide then; of those that end at the same
    character, the longest. All of this is independent of how the text is cut into pieces.

    Text that may be the start of a stop string is held back until the next character tells: at most one
    character less than the longest of them. A push costs in proportion to its own length (Knuth, Morris and
    Pratt, "Fast pattern matching in strings", 1977), however much text came before.

    Attributes:
        found: the stop string that came, or None so far.
    """

    def __init__(self, stops: str | Sequence[str]) -> None:
        """Takes the stop strings; one alone may be given as it is.

        Raises:
            UsageError: one of them is empty or no string.
        """
        self.found: str | None = None
        self._stops = tuple(dict.fromkeys(arguments.strings("stop", stops)))
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, piece: str) -> str:
        """Takes the next piece of text.

        Returns:
            What cannot be part of a stop string any more. Once `found` is set, nothing.
        """
        if self.found is not None or not self._stops:
            return "" if self._stops else piece
        for place, character in enumerate(piece):
            self._advance(character)
            if self.found is not None:
                text = self._held + piece[: place + 1]
                self._held = ""
                return text[: -len(self.found)]
        text = self._held + piece
        settled = len(text) - max(self._matched)
        self._held = text[settled:]
        return text[:settled]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> None:
        for index, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            self._matched[index] = matched
            if matched == len(stop) and (self.found is None or len(stop) > len(self.found)):
                self.found = stop


def _borders(text: str) -> list[int]:
    """For each prefix of a text, the length of its longest proper suffix that is a prefix as well."""
    borders = [0] * len(text)
    matched = 0
    for place in range(1, len(text)):
        while matched and text[place] != text[matched]:
            matched = borders[matched - 1]
        matched += text[place] == text[matched]
        borders[place] = matched
    return borders
