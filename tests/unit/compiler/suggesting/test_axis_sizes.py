"""Whether the chosen sizes of an axis are the best there are."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.compiler.suggesting.chosen_buckets import (
    MAX_CANDIDATES,
    best_sizes,
    candidates,
    folded,
    padded,
)

WEIGHTS = st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=8)


def padding(weights: dict[int, int], sizes: tuple[int, ...]) -> int:
    return sum((padded(value, sizes) - value) * weight for value, weight in weights.items())


@settings(max_examples=examples(60, 400))
@given(WEIGHTS, st.integers(1, 5), st.sampled_from([1, 3, 8]), st.data())
def test_no_other_sizes_pad_less_for_any_number_of_them(
    weights: dict[int, int], most: int, multiple: int, data: st.DataObject
) -> None:
    every = [*range(multiple, max(weights) + multiple, multiple)]
    # What must be chosen: the largest, which holds all, and sometimes others.
    kept = {every[-1], *data.draw(st.sets(st.sampled_from(every), max_size=2))}
    among = candidates(weights, multiple, kept)
    found = best_sizes(weights, among, most, kept)
    for number in range(len(kept), min(most, len(every)) + 1):
        tried = [
            padding(weights, each)
            for count in range(1, number + 1)
            for each in combinations(every, count)
            if kept <= {*each}
        ]
        # Fewer candidates than sizes asked for: all of them are chosen.
        best = found.get(number, found[max(found)])
        assert best.padding == padding(weights, best.chosen) == min(tried)
        assert kept <= {*best.chosen}


@settings(max_examples=examples(60, 400))
@given(WEIGHTS)
def test_another_size_never_pads_more(weights: dict[int, int]) -> None:
    found = best_sizes(weights, candidates(weights, 1), 8)
    paddings = [found[number].padding for number in sorted(found)]
    assert paddings == sorted(paddings, reverse=True)
    assert len(found[max(found)].chosen) == max(found)


@settings(max_examples=examples(60, 400))
@given(WEIGHTS, st.integers(1, 40))
def test_values_beyond_the_largest_size_are_computed_in_full_pieces_and_a_rest(
    weights: dict[int, int], largest: int
) -> None:
    rest = folded(weights, largest)
    sizes = best_sizes(rest, candidates(rest, 1, {largest}), 3, {largest})
    for each in sizes.values():
        assert each.padding == padding(weights, each.chosen)


@pytest.mark.parametrize("count", [MAX_CANDIDATES, 40 * MAX_CANDIDATES])
def test_candidates_stay_few_and_hold_every_value(count: int) -> None:
    found = candidates(range(1, count + 1), 1)
    assert len(found) <= MAX_CANDIDATES
    assert found[-1] >= count
