"""Drafts are what followed the last time: they pause where they lose time, and come back where they gain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.runtime.generation import drafting
from prejit.runtime.generation.drafting import DraftPace, PromptLookup

pytestmark = pytest.mark.measured_drafts
STEP = 0.01


def simulated(tokens, costs, steps=4000, pace=None):
    """The time of so many tokens in steps, where a draft gives `tokens` and costs `costs` steps; the pace."""
    pace = DraftPace() if pace is None else pace
    done = spent = 0.0
    while done < steps:
        if pace.allows("decode"):
            pace.verified("decode", "verify", tokens, costs * STEP)
            done, spent = done + tokens, spent + costs
        else:
            pace.decoded("decode", 1, STEP)
            done, spent = done + 1, spent + 1
    return spent / done, pace


def test_drafts_that_are_never_right_cost_a_few_per_cent_and_those_that_pay_are_verified():
    for costs in (1.2, 2.0, 4.0, 9.0):
        assert simulated(1, costs)[0] < 1.025, costs
    for tokens, costs in ((4, 2), (3, 2.5), (2, 1.5)):
        assert simulated(tokens, costs)[0] == pytest.approx(costs / tokens, rel=0.08)


def test_drafts_come_back_when_a_text_changes():
    _, pace = simulated(1, 4)
    assert pace.credit <= drafting._MOST_CREDIT
    assert simulated(4, 2, pace=pace)[0] < 0.75


def test_nothing_is_drafted_before_a_step_is_known_and_the_first_call_does_not_count():
    pace = DraftPace()
    assert not pace.allows("decode")
    pace.decoded("decode", 1, 100 * STEP)  # it loads the program
    pace.decoded("decode", 2, 2 * STEP)
    assert not pace.allows("decode")
    pace.decoded("decode", 4, 4 * STEP)
    assert pace.allows("decode")
    pace.verified("decode", "verify", 1, 100 * STEP)
    assert pace.credit >= drafting.FIRST_CREDIT
    assert not pace.allows("other")


def test_a_call_that_the_machine_interrupts_changes_nothing():
    pace = simulated(4, 2)[1]
    before = pace.credit
    pace.verified("decode", "verify", 4, 1000 * STEP)
    assert pace.credit >= before - 1
    pace.verified("decode", "verify", 4, 1000 * STEP, once=True)
    assert pace.credit == drafting._LEAST_CREDIT


def test_a_step_is_measured_again_and_again():
    """A machine that was busy when it began must not verify drafts for ever that do not pay."""
    pace = DraftPace()
    for _ in range(3):
        pace.decoded("decode", 1, 5 * STEP)
    assert simulated(2, 4, steps=6000, pace=pace)[0] < 1.1


tokens = st.lists(st.integers(0, 3), max_size=40)


def looked_up(text, count):
    """The tokens behind the last earlier place of the longest ending, found by searching the whole text."""
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
