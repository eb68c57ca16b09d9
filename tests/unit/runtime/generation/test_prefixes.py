"""Prompts that were computed before are found again, and take no more memory than they may."""

import pytest
from tests.decoders import VOCABULARY

from prejit.runtime.generation.kv_cache import KVCache, cache_bytes
from prejit.runtime.generation.prefixes import CompactPrefix, PrefixCache
from prejit.runtime.generation.rows import CachedText
from prejit.runtime.generation.shared_prefix import Prefix

from .batches import filled, values

MINE = ("me", "")


@pytest.fixture
def whole_caches(monkeypatch):
    """Prefixes are kept as on an accelerator."""
    monkeypatch.setattr("prejit.runtime.generation.prefixes.can_compact", lambda _: False)


def prefix(bundle, first, context=24):
    tokens = [(first + place) % VOCABULARY for place in range(20)]
    return Prefix(tokens, KVCache(bundle.decoder, 1, context))


def found_tokens(kept, prompt):
    found = kept.find(prompt, 24, MINE)
    return None if found is None else found.token_ids


@pytest.mark.usefixtures("whole_caches")
def test_a_prefix_that_grew_counts_and_the_oldest_go(bundle):
    first, second, third = (prefix(bundle, number) for number in range(3))
    kept = PrefixCache(bundle.decoder, 3 * first.size_bytes)
    for each in (first, second, third):
        kept.keep(each, MINE)
    assert kept.size_bytes == 3 * first.size_bytes
    assert kept.find([*second.token_ids, 1], 24, MINE) is second  # used last now
    second.at(72)  # it takes four times as much, more than all may
    kept.trim()
    assert kept.size_bytes == 0
    for each in (first, third):
        kept.keep(each, MINE)
    assert kept.size_bytes == first.size_bytes + third.size_bytes
    kept.clear()
    assert kept.size_bytes == 0
    kept = PrefixCache(bundle.decoder, 1 << 20)
    kept.keep(second, MINE)  # a whole cache of a longer context
    assert kept.find([*second.token_ids, 1], 24, MINE) is second
    long = prefix(bundle, 7, context=72)
    kept.keep(long, MINE)
    assert kept.find([*long.token_ids, 1], 24, MINE) is None
    assert kept.find([*long.token_ids, 1], 72, MINE) is long


@pytest.mark.parametrize("is_compact", [True, False])
def test_a_small_model_keeps_some_and_the_best_is_found(bundle, monkeypatch, is_compact, request):
    if not is_compact:
        request.getfixturevalue("whole_caches")
    monkeypatch.setattr("prejit.runtime.generation.prefixes._MOST_PREFIXES", 3)
    kept = PrefixCache(bundle.decoder, 1 << 20)
    texts = [prefix(bundle, number).token_ids for number in range(5)]
    for number in range(5):
        kept.keep(prefix(bundle, number), MINE)
    found = [found_tokens(kept, [*text, 1]) for text in texts]
    assert found == [None, None, *texts[2:]]
    kept = PrefixCache(bundle.decoder, 1 << 30)
    common = [number % VOCABULARY for number in range(5, 23)]
    shorter, longer, other = ([*common, *rest] for rest in ([1], [2, 3, 4], [9, 9]))
    for tokens in (longer, shorter, other):
        kept.keep(Prefix(tokens, KVCache(bundle.decoder, 1, 24)), MINE)
    assert found_tokens(kept, [*common, 2, 3, 7]) == tuple(longer)
    assert found_tokens(kept, [*common, 9, 9, 5]) == tuple(other)
    assert kept.find(common[:10], 24, MINE) is None
    assert kept.find([0, *common], 24, MINE) is None


@pytest.mark.parametrize(("context", "places"), [(24, 20), (72, 20), (24, 24)])
def test_a_prefix_takes_the_memory_of_its_tokens_and_comes_back_as_it_was(bundle, context, places):
    source = filled(bundle, 2, 72)
    expected = [array[1:2, :, :places] for array in values(source)]
    tokens = [number % VOCABULARY for number in range(20 if places == 20 else 40)]
    kept = CompactPrefix(bundle.decoder, tokens, source, 1)
    assert kept.size_bytes == cache_bytes(bundle.decoder.cache, 1, len(tokens))
    del source
    back = kept.at(context)
    assert (back.batch, back.context) == (1, context)
    for array, rows in zip(values(back), expected, strict=True):
        assert (array[:, :, :places] == rows).all()
        assert not array[:, :, places:].any()


def test_prefixes_never_take_more_than_they_may(bundle):
    source = filled(bundle, 1, 24)
    size = cache_bytes(bundle.decoder.cache, 1, 20)
    kept = PrefixCache(bundle.decoder, 2 * size)
    texts = [prefix(bundle, number).token_ids for number in range(3)]
    for text in texts:
        kept.keep_row(CachedText(text, MINE), source, 0)
    assert kept.size_bytes == 2 * size
    assert [found_tokens(kept, [*text, 1]) for text in texts] == [None, *texts[1:]]
    kept.keep_row(CachedText([9] * 24, MINE), source, 0)  # takes the place of both
    assert kept.size_bytes == cache_bytes(bundle.decoder.cache, 1, 24)
    small = PrefixCache(bundle.decoder, size - 1)
    small.keep_row(CachedText(texts[0], MINE), source, 0)
    assert small.size_bytes == 0
