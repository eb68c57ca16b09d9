"""Drafts are what followed the last time, and cost the same however long the text is."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from prejit.runtime.generation.prompt_lookup import PromptLookup

tokens = st.lists(st.integers(0, 3), max_size=40)


def looked_up(text: list[int], count: int) -> list[int]:
    """What the module promises, by searching the whole text."""
    for length in (3, 2):
        for place in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[place - length : place] == text[-length:]:
                grown = list(text)
                while len(grown) < len(text) + count:
                    grown.append(grown[place + len(grown) - len(text)])
                return grown[len(text) :]
    return []


@given(text=tokens, cut=st.integers(0, 40), count=st.integers(0, 9))
def test_a_draft_is_what_followed_the_last_time(text: list[int], cut: int, count: int) -> None:
    lookup = PromptLookup(text[:cut])
    lookup.extend(text[cut:])
    assert lookup.draft(count) == looked_up(text, count)


def test_a_draft_of_a_long_text_costs_what_one_of_a_short_text_does() -> None:
    def seconds(size: int) -> float:
        lookup = PromptLookup([token % 1000 for token in range(size)])
        best = float("inf")
        for _ in range(20):
            started = time.thread_time()
            for token in range(100):
                lookup.extend([token])
                lookup.draft(8)
            best = min(best, time.thread_time() - started)
        return best

    assert seconds(200_000) < 5 * seconds(2_000)
