"""Whether suggested buckets fit the budget, keep what is served today, and pad least."""

import math
from collections import Counter
from itertools import chain, combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.compiler.manifest.chosen_buckets import (
    best_sizes,
    candidates,
    decoder_buckets,
    encoder_buckets,
    padded,
    suggest_decoder,
    suggest_encoder,
)
from prejit.compiler.manifest.manifest import Encode, Generate, Manifest, Model
from prejit.compiler.manifest.reading import check_manifest
from prejit.compiler.manifest.request_log import LoggedEncoding, LoggedGeneration, LoggedRequests
from prejit.compiler.manifest.specs import program_specs
from prejit.runtime.errors import UsageError

MODEL = Model(str(Path(__file__).parents[4] / "manifests" / "demo-model"))
COUNTS = (st.integers(0, 300), st.integers(0, 60), st.integers(0, 20), st.integers(1, 6))
GENERATIONS = st.lists(st.builds(LoggedGeneration, *COUNTS), min_size=1, max_size=12)


def decoder_log(generations):
    return LoggedRequests(Counter(generations), {}, {})


def overhead(buckets):
    return math.prod(axis.computed / axis.needed for axis in buckets.axes if axis.needed)


@settings(max_examples=examples(20, 200), deadline=None)
@given(GENERATIONS, st.integers(12, 60))
def test_more_programs_pad_a_decoder_less(generations, budget):
    log = decoder_log(generations)
    less, more = suggest_decoder(log, budget), suggest_decoder(log, budget + 7)
    assert less.programs <= budget
    assert overhead(more) <= overhead(less) * (1 + 1e-9)
    assert less.beyond == 0
    assert isinstance(less.table, Generate)
    manifest = Manifest("b", model=MODEL, generate=less.table, targets=("cpu-host",))
    check_manifest(manifest)  # it could be pasted
    assert len(program_specs(manifest)) == less.programs


def test_the_longest_prompt_context_sentence_and_batch_of_today_are_still_served():
    log = decoder_log([LoggedGeneration(20, 10, batch=2)] * 50)
    today = Generate(batch=(1, 8), prompt=(16, 64), context=(128, 1024), draft_tokens=4)
    found = suggest_decoder(log, 40, today)
    table = found.table
    assert (table.batch[0], table.batch[-1]) == (1, 8)
    assert (table.prompt[-1], table.context[-1], table.draft_tokens) == (64, 1024, 4)
    assert (24 in table.prompt, 2 in table.batch) == (True, True)
    assert overhead(found) < overhead(decoder_buckets(log, today))
    log = LoggedRequests({}, {LoggedEncoding(20): 9}, {})
    sizes = suggest_encoder(log, 12, Encode(((1, 16), (32, 256)))).table
    assert {(32, 256), (1, 24)} <= {*sizes.shapes}


def test_requests_beyond_the_context_are_counted_and_too_small_a_budget_is_an_error():
    log = decoder_log([LoggedGeneration(500, 100), LoggedGeneration(10, 10)])
    today = Generate(batch=(1,), prompt=(16,), context=(128,))
    assert decoder_buckets(log, today).beyond == 1
    assert suggest_decoder(log, 12, today).beyond == 1
    with pytest.raises(UsageError, match="one size of each axis, found 1"):
        suggest_decoder(decoder_log([LoggedGeneration(8, 8)]), 1)
    with pytest.raises(UsageError, match="at least 3 programs"):
        suggest_encoder(LoggedRequests({}, {LoggedEncoding(8): 1}, {}), 2)


def test_padding_is_what_steps_chunks_and_rows_compute_at_the_times_of_a_log():
    # 20 tokens in chunks of 16: 16 + 8; steps at lengths 21 and 22 in a context of 32.
    log = decoder_log([LoggedGeneration(20, 2, batch=1)])
    table = Generate(batch=(2,), prompt=(8, 16), context=(16, 32))
    prompt, context, batch = decoder_buckets(log, table).axes
    assert (prompt.needed, prompt.computed) == (20, 24)
    assert (context.needed, context.computed) == (43, 64)
    assert batch.padding == pytest.approx(0.5)
    log = LoggedRequests({}, {LoggedEncoding(10, 3): 2}, {})
    (axis,) = encoder_buckets(log, Encode(((1, 64), (4, 16)))).axes
    assert (axis.needed, axis.computed) == (60, 128)
    log = LoggedRequests({LoggedGeneration(8, 8): 1}, {}, {1: 1.0, 3: 9.0, 4: 0.1})
    found = suggest_decoder(log, 9)
    assert isinstance(found.table, Generate)
    assert found.table.batch == (1, 4)
    assert decoder_buckets(log, found.table).axes[2].needed == pytest.approx(28.4)


WEIGHTS = st.dictionaries(st.integers(1, 18), st.integers(1, 9), min_size=1, max_size=8)


def padding(weights, sizes):
    return sum((padded(value, sizes) - value) * weight for value, weight in weights.items())


@settings(max_examples=examples(60, 400))
@given(WEIGHTS, st.integers(1, 4), st.sampled_from([1, 3, 8]), st.data())
def test_no_other_sizes_pad_less_for_any_number_of_them(weights, most, multiple, data):
    every = [*range(multiple, max(weights) + multiple, multiple)]
    # What must be chosen: the largest, which holds all, and sometimes others.
    kept = {every[-1], *data.draw(st.sets(st.sampled_from(every), max_size=2))}
    among = candidates(weights, multiple, kept)
    found = best_sizes(weights, among, most, kept)
    for number in range(len(kept), min(most, len(every)) + 1):
        chosen = chain(*(combinations(every, count) for count in range(1, number + 1)))
        tried = [padding(weights, each) for each in chosen if kept <= {*each}]
        # Fewer candidates than sizes asked for: all of them are chosen.
        best = found.get(number, found[max(found)])
        assert best.padding == padding(weights, best.chosen) == min(tried)
        assert kept <= {*best.chosen}
