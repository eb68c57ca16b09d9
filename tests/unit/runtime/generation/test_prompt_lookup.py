"""Drafts are what followed the last time, and cost the same however long the text is."""

from hypothesis import given
from hypothesis import strategies as st

from prejit.runtime.generation.prompt_lookup import PromptLookup

tokens = st.lists(st.integers(0, 3), max_size=40)


def looked_up(text, count):
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
def test_a_draft_is_what_followed_the_last_time(text, cut, count):
    lookup = PromptLookup(text[:cut])
    lookup.extend(text[cut:])
    assert lookup.draft(count) == looked_up(text, count)
