"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

from prejit.runtime.base import arguments


@final
class StopStrings:
    """Passes text on up to the first stop string, and never a part of one.

    The first stop string is the one that ends first, because a stream has to decide there; if several end at
    the same character, it is the longest. The result does not depend on how the text is cut into pieces.

    Text that may begin a stop string is held back until more text decides. It is shorter than the longest
    stop string. A push depends on its own length and on the held text only, and searches in C: the engine's
    thread does it for every token of every request.

    Attributes:
        found: the stop string that was found, or None.
    """

    def __init__(self, stops: str | Sequence[str]) -> None:
        """Prepare the search for one string or several.

        Raises:
            UsageError: one of them is empty or not a string.
        """
        self.found: str | None = None
        found = dict.fromkeys(arguments.strings("stop", stops))
        self._stops = sorted(found, key=len, reverse=True)
        self._begins = re.compile("|".join(re.escape(letter) for letter in {s[0] for s in found}))
        self._held = ""

    def push(self, piece: str) -> str:
        """Add the next piece of text.

        Returns:
            The text that cannot be part of a stop string any more; nothing once `found` is set.
        """
        if self.found is not None or not self._stops:
            return "" if self._stops else piece
        held, text = len(self._held), self._held + piece
        if not self._begins.search(text):
            return text
        end, self._held = len(text) + 1, ""
        for stop in self._stops:  # the longest first
            # A match that ends in the held text would have been found before.
            at = text.find(stop, max(0, held - len(stop) + 1), end - 1)
            if at >= 0:
                self.found, end = stop, at + len(stop)
        if self.found is not None:
            return text[: end - len(self.found)]
        for begin in self._begins.finditer(text, max(0, len(text) - len(self._stops[0]) + 1)):
            settled = begin.start()
            rest = text[settled:]
            if any(stop.startswith(rest) for stop in self._stops):
                self._held = rest
                return text[:settled]
        return text

    def finish(self) -> str:
        """Return the text that was held back. Call it when no more text comes."""
        held, self._held = self._held, ""
        return held
