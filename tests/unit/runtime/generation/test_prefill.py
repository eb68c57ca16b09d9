"""Prompts in chunks and together, and batches of other sizes: no text depends on them."""

import math
import os
from functools import cache
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prejit.runtime import Sampling, load
from prejit.runtime.errors import UsageError
from prejit.runtime.generation import continuous_batch, decode, kv_cache
from prejit.runtime.generation.continuous_batch import Batch
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.prefill import Entering
from prejit.runtime.generation.prefixes import PrefixCache

from .batches import TEXT, Found, finish, ids, request, step


@pytest.mark.parametrize(
    ("stall_seconds", "decodes"), [(100.0, []), (0.0, [("decode", 1), ("decode", 2)])]
)
def test_first_tokens_come_one_by_one_and_stalls_end(bundle, monkeypatch, stall_seconds, decodes):
    """Not when the prompts behind it are computed too; a decode step comes between them after a while."""
    name = "prejit.runtime.generation.continuous_batch._LONGEST_STALL_SECONDS"
    monkeypatch.setattr(name, stall_seconds)
    monkeypatch.setattr(decode, "CALL_SECONDS", 0.0)  # steps of one token
    bundle.prepare()
    batch, order = Batch(bundle.decoder, 3, prefill_tokens=3), []
    for number in range(3):
        batch.begin(request(TEXT[number : number + 3], 9))
    while batch.entering:
        tokens = batch.step(prefill_tokens=1000)
        is_decode = any(token.usage.passes for token in tokens)
        order.append(("decode" if is_decode else "first", len(tokens)))
    assert order[:: 2 if decodes else 1] == [("first", 1)] * 3
    assert not decodes or order[1::2] == decodes


@pytest.fixture
def order(bundle, monkeypatch):
    """The programs that run, on a device that takes a second for a chunk, in which the host goes on."""
    seconds, waiting, found = 0.0, 0.0, []
    run, read = DecoderPrograms.run, Entering.read

    def wait():
        nonlocal seconds, waiting
        seconds, waiting = seconds + waiting, 0.0

    def slow_run(self, program, *arguments):
        nonlocal waiting
        waiting += program.kind == "prefill"
        found.append(program.name)
        if program.kind == "decode":
            wait()
        return run(self, program, *arguments)

    def slow_read(*arguments):
        wait()
        read(*arguments)

    bundle.prepare()
    clock = SimpleNamespace(perf_counter=lambda: seconds)
    monkeypatch.setattr(continuous_batch, "time", clock)
    monkeypatch.setattr(continuous_batch, "_LONGEST_STALL_SECONDS", 2.5)
    monkeypatch.setattr(decode, "CALL_SECONDS", 0.0)  # steps of one token
    monkeypatch.setattr(DecoderPrograms, "run", slow_run)
    monkeypatch.setattr(Entering, "read", slow_read)
    return found


def test_a_chunk_takes_its_time_though_the_host_waits_for_it_in_a_decode_step(bundle, order):
    """In 2.5 seconds two chunks of ten positions are computed."""
    batch = Batch(bundle.decoder, 3, prefill_tokens=10)
    batch.insert(request(TEXT[:3], 40))
    for start, budget in ((10, 10), (40, 1000)):
        order.clear()
        batch.begin(request(TEXT[start : start + 30], 2))
        while batch.entering:
            batch.step(prefill_tokens=budget)
    assert [name.partition("/")[0] for name in order] == ["prefill", "decode", "prefill", "prefill"]


@pytest.mark.parametrize(("stall_seconds", "size"), [(2.5, 3), (3.5, 10)])
def test_chunks_are_shorter_where_usual_ones_take_long(
    bundle, order, monkeypatch, stall_seconds, size
):
    """A prompt of three positions has shown that one takes a third of a second."""
    monkeypatch.setattr(continuous_batch, "_LONGEST_STALL_SECONDS", stall_seconds)
    monkeypatch.setattr(continuous_batch, "_CPU_TOKENS", 10)
    monkeypatch.setattr(continuous_batch, "_CPU_LEAST_TOKENS", 3)
    batch = Batch(bundle.decoder, 3)
    batch.insert(request(TEXT[:3], 40))
    batch.step()  # its first token
    batch.step()
    order.clear()
    batch.begin(request(TEXT[10:40], 2))
    batch.step(prefill_tokens=1000)
    assert order[0].split("-")[1] == f"t{size}"


def test_as_many_positions_are_computed_as_there_are_slots(make_decoder, monkeypatch):
    """A step computes all slots. So prompts fill them even where each takes more time than there is."""
    monkeypatch.setattr(continuous_batch, "_LONGEST_STALL_SECONDS", 0.0)
    monkeypatch.setattr(continuous_batch, "_PREPARING_SECONDS", math.inf)
    monkeypatch.setattr(continuous_batch, "_CPU_LEAST_TOKENS", 3)
    made = make_decoder("gpt2", batch=(1, 8), prompt=(3,), context=(24,), draft_tokens=0)
    with load(made, on_mismatch="error") as bundle:
        bundle.prepare()
        batch = Batch(bundle.decoder, 8)
        batch.insert(request(TEXT[:3], 20))
        batch.step()  # its first token
        batch.step()
        for _ in range(3):
            batch.begin(request(TEXT[:3], 2))
        while batch.step(prefill_tokens=1000)[0].usage.passes == 0:
            pass
        assert batch.entering == 1  # two prompts of three positions, then a step of eight slots


def test_prompts_are_computed_together(wide_dir, monkeypatch):
    wide = load(wide_dir, on_mismatch="error")
    wide.prepare()
    monkeypatch.setattr(decode, "CALL_SECONDS", 0.0)
    batch = Batch(wide.decoder, 4, together=2)
    for asked, call in {
        (7, 1, 100): (1, 7),
        (7, 3, 100): (2, 10),  # a batch of two is the largest that they fill
        (7, 4, 100): (4, 10),  # all slots are free: computed in place
        (7, 4, 39): (2, 10),
        (7, 4, 19): (1, 7),
        (11, 4, 100): (1, 11),  # no program takes it in one call
    }.items():
        assert batch.call_for(*asked) == call, asked
    assert Batch(wide.decoder, 4).call_for(7, 3, 100) == (1, 7)
    all_slots = Batch(wide.decoder, 4, together=2)
    all_slots.begin(*(request(TEXT[n : n + 8], 2) for n in range(4)))
    programs = [list(token.usage.programs) for token in all_slots.step()]
    assert programs == [["prefill/b4-t10-c24"]] * 4
    [first] = batch.insert(request([1, 2, 3], 20))
    asked = [request(TEXT[n : n + 8], 6, sampling=Sampling(temperature=0.5 * n)) for n in (0, 1)]
    slots = batch.begin(*asked)
    found = Found()
    for _ in range(3):  # the first token of the one, those of the two, and a decode step
        step(batch, found)
    assert [len(found[slot]) for slot in (first, *slots)] == [2, 2, 2]
    assert next(iter(found[slots[1]][0].usage.programs)) == "prefill/b2-t10-c24"
    finish(batch, found)
    for slot, one in zip(slots, asked, strict=True):
        alone = Batch(wide.decoder, 1)
        alone.insert(one)
        assert ids(found[slot]) == ids(finish(alone)[0])
    # They fill the smallest batch, however few positions are asked for; one alone would leave a row empty.
    monkeypatch.setattr(wide.decoder, "batches", [2, 4])
    batch = Batch(wide.decoder, 4)
    assert (batch.call_for(7, 1, 1), batch.call_for(7, 3, 1)) == ((1, 10), (2, 10))
    batch.begin(*(request(TEXT[n : n + 7], 2) for n in range(2)))
    programs = {name for token in batch.step() for name in token.usage.programs}
    assert programs == {"prefill/b2-t10-c24"}


def test_slots_are_as_many_as_a_bucket_has_and_move_only_when_they_may(bundle):
    def refused(message, call, *arguments):
        with pytest.raises(UsageError, match=message):
            call(*arguments)

    batch = bundle.batch(2)
    assert batch.slots == 3, "rounded up to a bucket"
    slots = batch.insert(*[request(TEXT[: 3 + place], 1) for place in range(3)])
    assert (batch.free, batch.insert()) == (0, ())
    message = "at most 0 requests, as many as slots are free; found 1"
    refused(message, batch.insert, request([1]))
    for slot in (-1, 3):
        refused(f"slot: expected 0 to 2, found {slot}", batch.evict, slot)
    batch.evict(slots[0])  # its token was not given out
    assert {token.slot for token in batch.step()} == {*slots[1:]}
    assert (batch.step(), batch.free) == ([], 3)
    batch.insert(request([1], 9), request([2], 9))
    batch.step()
    refused("found 2 live slots", batch.resize, 1)
    batch.begin(request([3], 9))
    refused("no prompt on its way", batch.resize, 3)
    batch.close()
    assert batch.resize(1) == {}
    refused("at most 3 rows at once, found 4", bundle.batch, 4)
    refused("slots: expected 1 or more, found 0", bundle.batch, 0)


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["insert", "begin"]), st.integers(0, 11)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("evict"), st.integers(0, 2)),
        st.tuples(st.just("resize"), st.sampled_from([1, 3])),
        st.tuples(st.just("keep"), st.just(0)),
    ),
    min_size=4,
    max_size=25,
)


@settings(max_examples=int(os.environ.get("PREJIT_BATCH_EXAMPLES", "25")), deadline=None)
@given(actions=_ACTIONS, prefixes=st.booleans(), piece_bytes=st.sampled_from([1, 64 << 20]))
def test_texts_do_not_depend_on_others(bundle, expected, actions, prefixes, piece_bytes):
    """Requests come whole or in chunks, leave early, and move between batches, in any order."""
    with mock.patch.object(kv_cache, "_PIECE_BYTES", piece_bytes):
        ended = _in_any_order(bundle, actions, prefixes)
    for number, tokens in ended:
        assert ids(tokens) == expected(number)


def _in_any_order(bundle, actions, prefixes):
    """Return the number and the tokens of each request that ended."""
    bundle.prepare()
    kept = PrefixCache(bundle.decoder, 1 << 20) if prefixes else None
    batch = Batch(bundle.decoder, 1, prefill_tokens=3, prefixes=kept)
    running = {}
    ended = []

    def step():
        for token in batch.step():
            running[token.slot][1].append(token)
            if token.finish_reason is not None:
                ended.append(running.pop(token.slot))

    for name, number in [*actions, ("step", 40)]:
        if name in ("insert", "begin") and batch.free:
            asked = numbered(number)
            [slot] = batch.begin(asked) if name == "begin" else batch.insert(asked)
            running[slot] = number, []
        elif name == "evict":
            batch.evict(number % batch.slots)
            running.pop(number % batch.slots, None)
        elif name == "resize":
            step()  # no token waits any more
            fits = batch.entering == 0 and len(running) <= number
            fits = fits and any(batch.is_ready_for(number) for _ in bundle.decoder.cache)
            moved = batch.resize(number) if fits else {}
            if moved:
                running = {moved[slot]: one for slot, one in running.items()}
        elif name == "keep":
            batch.keep()
        elif name == "step":
            for _ in range(number):
                step()
    while running:
        step()
    assert batch.free == batch.slots
    return ended


def numbered(number):
    """One of twelve requests; some begin alike, some sample, some have penalties or logprobs."""
    prompt = [*TEXT[:20], number] if number % 3 == 0 else TEXT[number : number * 4 + 1]
    temperature, penalty = (0.0 if number % 2 else 0.8), (0.7 if number % 4 == 1 else 0.0)
    sampling = Sampling(temperature=temperature, seed=number, frequency_penalty=penalty)
    return request(prompt, 2 + number, sampling=sampling, logprobs=None if number % 5 else 1)


@pytest.fixture(scope="module")
def expected(bundle):
    """The tokens of each numbered request in a batch of its own."""

    @cache
    def find(number):
        batch = Batch(bundle.decoder, 1)
        batch.insert(numbered(number))
        return ids(finish(batch)[0])

    return find


def test_a_prompt_is_cut_where_that_pads_less(wide_dir, monkeypatch):
    wide = load(wide_dir, on_mismatch="error")

    def first():
        batch = Batch(wide.decoder, 1)
        batch.insert(request(TEXT[:4], 6))
        found = finish(batch)[0]
        return ids(found), next(iter(found[0].usage.programs))

    whole, program = first()
    assert program == "prefill/b1-t10-c24"
    monkeypatch.setattr("prejit.runtime.generation.decoder_programs._LEAST_CHUNK", 3)
    sizes = {t: wide.decoder.chunk_for(1, 24, t).bucket["prompt"] for t in (2, 3, 4, 7, 10, 12)}
    assert sizes == {2: 3, 3: 3, 4: 3, 7: 10, 10: 10, 12: 10}  # 4 in two of 3, but not 7 in three
    assert first() == (whole, "prefill/b1-t3-c24")
    monkeypatch.setattr(wide.decoder.device, "platform", "cuda")
    assert wide.decoder.chunk_for(1, 24, 4).bucket["prompt"] == 10
