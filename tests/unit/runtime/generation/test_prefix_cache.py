"""A count over thousands of kept prompts in each step would make an engine slower with every request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.decoders import VOCABULARY

from prejit.runtime import Bundle, load
from prejit.runtime.generation.kv_cache import KVCache, Prefix
from prejit.runtime.generation.prefix_cache import PrefixCache


@pytest.fixture(scope="module")
def bundle(make_decoder: Callable[..., Path]) -> Bundle:
    found = make_decoder("gpt2", batch=(1, 2), prompt=(3, 10), context=(24, 72), quick=True)
    return load(found, on_mismatch="error")


def prefix(bundle: Bundle, first: int, context: int = 24) -> Prefix:
    tokens = [(first + place) % VOCABULARY for place in range(20)]
    return Prefix(tokens, KVCache(bundle.decoder, 1, context))


def test_the_size_is_read_without_asking_every_prefix(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = PrefixCache(bundle.decoder, 1 << 20)
    all_of_them = [prefix(bundle, number) for number in range(5)]
    for each in all_of_them:
        kept.keep(each)
    expected = sum(each.size_bytes for each in all_of_them)
    asked: list[None] = []
    monkeypatch.setattr(Prefix, "size_bytes", property(lambda _: asked.append(None)))
    assert kept.size_bytes == expected > 0
    assert not asked


def test_a_prefix_that_grew_counts_and_the_oldest_go(bundle: Bundle) -> None:
    first, second, third = (prefix(bundle, number) for number in range(3))
    kept = PrefixCache(bundle.decoder, 3 * first.size_bytes)
    for each in (first, second, third):
        kept.keep(each)
    assert kept.size_bytes == 3 * first.size_bytes
    assert kept.find([*second.token_ids, 1], 24) is second  # used last now
    second.at(72)  # it takes four times as much, more than all may
    kept.trim()
    assert kept.size_bytes == 0
    for each in (first, third):
        kept.keep(each)
    assert kept.size_bytes == first.size_bytes + third.size_bytes
    kept.clear()
    assert kept.size_bytes == 0


def test_a_small_model_does_not_keep_prefixes_without_end(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prejit.runtime.generation.prefix_cache._MOST_PREFIXES", 3)
    kept = PrefixCache(bundle.decoder, 1 << 20)
    all_of_them = [prefix(bundle, number) for number in range(5)]
    for each in all_of_them:
        kept.keep(each)
    found = [kept.find([*each.token_ids, 1], 24) for each in all_of_them]
    assert found == [None, None, *all_of_them[2:]]
    assert kept.size_bytes == sum(each.size_bytes for each in all_of_them[2:])


def test_a_prefix_of_a_longer_cache_is_not_found(bundle: Bundle) -> None:
    kept = PrefixCache(bundle.decoder, 1 << 20)
    long = prefix(bundle, 7, context=72)
    kept.keep(long)
    assert kept.find([*long.token_ids, 1], 24) is None
    assert kept.find([*long.token_ids, 1], 72) is long


def test_the_prefix_that_saves_most_is_found(bundle: Bundle) -> None:
    kept = PrefixCache(bundle.decoder, 1 << 30)
    common = [number % VOCABULARY for number in range(5, 23)]
    shorter, longer, other = ([*common, *rest] for rest in ([1], [2, 3, 4], [9, 9]))
    made = {}
    for tokens in (longer, shorter, other):
        made[len(tokens)] = Prefix(tokens, KVCache(bundle.decoder, 1, 24))
        kept.keep(made[len(tokens)])
    assert kept.find([*common, 2, 3, 7], 24) is made[21]
    assert kept.find([*common, 9, 9, 5], 24) is made[20]
    assert kept.find(common[:10], 24) is None
    assert kept.find([0, *common], 24) is None
