"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from prejit.runtime.base import arguments


@final
class StopStrings:
    """Passes text on up to the first stop string, and never a part of one.

    The first stop string is the one that ends first, because a stream has to decide there; if several end at
    the same character, it is the longest. The result does not depend on how the text is cut into pieces.

    Text that may begin a stop string is held back until more text decides. It is shorter than the longest
    stop string. The cost of a push depends on its own length only, not on the text before (Knuth, Morris and
    Pratt, "Fast pattern matching in strings", 1977).

    Attributes:
        found: the stop string that was found, or None.
    """

    def __init__(self, stops: str | Sequence[str]) -> None:
        """Prepare the search for one string or several.

        Raises:
            UsageError: one of them is empty or not a string.
        """
        self.found: str | None = None
        self._stops = tuple(dict.fromkeys(arguments.strings("stop", stops)))
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to search for."""
        return bool(self._stops)

    def push(self, piece: str) -> str:
        """Add the next piece of text.

        Returns:
            The text that cannot be part of a stop string any more; nothing once `found` is set.
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
        """Return the text that was held back. Call it when no more text comes."""
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
    """Return, for each prefix of a text, the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(text)
    matched = 0
    for place in range(1, len(text)):
        while matched and text[place] != text[matched]:
            matched = borders[matched - 1]
        matched += text[place] == text[matched]
        borders[place] = matched
    return borders
