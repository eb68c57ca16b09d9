"""Stop strings: what is given out does not depend on how the text was cut, and no part of one leaks."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prejit.runtime.errors import UsageError
from prejit.runtime.text.stop_strings import StopStrings

LETTERS = "ab\n🙂"  # few, so that stop strings come, overlap and repeat


def cut(text, stops):
    """The text before the match that ends first, by looking at every place."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text(LETTERS, max_size=60),
    st.lists(st.text(LETTERS, min_size=1, max_size=6), max_size=4),
    st.lists(st.integers(1, 7), min_size=1),
)
@example("aab", ["aab", "ab", "b"], [1])  # one ends another
@example("aaab", ["aab"], [1])  # a match begins inside a false start
@example("abab", ["abc", "b"], [2])  # one lies inside another
def test_text_is_cut_at_the_first_match(text, stops, sizes):
    stream = StopStrings(stops)
    longest = max(map(len, stops), default=1)
    given_out, place, turns = "", 0, itertools.cycle(sizes)
    while place < len(text) and stream.found is None:
        piece = text[place : place + next(turns)]
        given_out += stream.push(piece)
        place += len(piece)
        is_short = place - len(given_out) < longest
        assert stream.found or is_short, "held back more than could be a stop string"
    given_out += stream.finish()
    assert (given_out, stream.found) == cut(text, stops)
    assert stream.found is None or stream.push("more") == stream.finish() == ""
    if len(stops) == 1:  # one stop string is no list of its letters
        alone = StopStrings(stops[0])
        assert (alone.push(text) + alone.finish(), alone.found) == cut(text, stops)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "", [3], [None]])
def test_an_empty_stop_string_is_refused(stops):
    with pytest.raises(UsageError, match="stop: expected strings of at least one character"):
        StopStrings(stops)
