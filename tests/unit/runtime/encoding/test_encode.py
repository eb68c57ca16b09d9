"""Which buckets sentences are put into, in which order buckets are loaded, and how a sentence is cut off."""

import functools
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Tokenizers
from tokenizers import models, pre_tokenizers, processors

from prejit.runtime.encoding.buckets import Bucket, evened, fitting, loading_order, partition
from prejit.runtime.encoding.sentences import check_ids, shorten, tokenize_pairs
from prejit.runtime.errors import ContextError, TruncationWarning, UsageError
from prejit.runtime.text.tokenizer import Tokenizer

BUCKETS = st.lists(
    st.builds(Bucket, st.integers(1, 5), st.integers(1, 9), st.integers(1, 60)),
    min_size=1,
    max_size=5,
    unique_by=lambda bucket: (bucket.batch, bucket.length),
)


def cheapest(lengths, buckets):
    """The cost of the best set of runs: every bucket, with every choice of the sentences that it takes."""

    @functools.cache
    def cost(left):
        if not left:
            return 0
        # Some run must take the first; it may take any of the others that fit with it.
        found = []
        for bucket in buckets:
            if bucket.length < left[0]:
                continue
            others = [i for i in range(1, len(left)) if left[i] <= bucket.length]
            for size in range(bucket.batch):
                for chosen in itertools.combinations(others, size):
                    rest = tuple(left[i] for i in range(1, len(left)) if i not in chosen)
                    found.append(bucket.cost + cost(rest))
        return min(found)

    return cost(tuple(lengths))


@given(BUCKETS, st.lists(st.integers(1, 9), max_size=6))
@example([Bucket(1, 4, 10), Bucket(4, 4, 15), Bucket(4, 9, 16)], [9, 3, 3, 3, 2])
def test_no_set_of_runs_costs_less(buckets, lengths):
    longest = max(bucket.length for bucket in buckets)
    lengths = sorted((min(length, longest) for length in lengths), reverse=True)
    runs = partition(lengths, fitting(buckets))
    assert sum(bucket.cost for bucket, *_ in runs) == cheapest(lengths, buckets)
    covered = [place for _, first, end in runs for place in range(first, end)]
    assert covered == list(range(len(lengths)))
    for bucket, first, end in runs:
        assert 0 < end - first <= bucket.batch
        assert lengths[first] <= bucket.length


def test_a_larger_batch_is_taken_where_it_costs_about_as_much():
    measured = [Bucket(1, 32, 100), Bucket(2, 32, 230), Bucket(8, 32, 890), Bucket(16, 32, 2400)]
    buckets = evened([*measured, Bucket(1, 64, 190), Bucket(1, 256, 900, 8)])
    assert [b.cost for b in buckets if b.length == 32] == [100, 200, 800, 2400]
    assert {b.cost for b in buckets if b.length > 32} == {190, 900}
    chosen = fitting(buckets)
    runs = [(str(bucket), end - first) for bucket, first, end in partition([32] * 27, chosen)]
    assert runs == [("8x32", 8)] * 3 + [("2x32", 2), ("1x32", 1)]


PACKED = st.builds(Bucket, st.just(1), st.integers(16, 40), st.integers(1, 60), st.integers(1, 6))


@given(st.lists(PACKED, min_size=1, max_size=3), BUCKETS, st.lists(st.integers(1, 9), max_size=30))
def test_packed_runs_hold_their_sentences_and_pay(packed, buckets, lengths):
    lengths = sorted(lengths, reverse=True)
    longest = Bucket(1, 9, 60)
    runs = partition(lengths, fitting([*packed, *buckets, longest]))
    covered = [place for _, first, end in runs for place in range(first, end)]
    assert covered == list(range(len(lengths)))
    for bucket, first, end in runs:
        assert 0 < end - first <= bucket.most
        if bucket.sentences:
            assert sum(lengths[first:end]) <= bucket.length
            rest = lengths[end : end + 1]
            is_full = end - first == bucket.sentences
            assert is_full or not rest or sum(lengths[first:end]) + rest[0] > bucket.length
        else:
            assert lengths[first] <= bucket.length
    padded = partition(lengths, fitting([*buckets, longest]))
    assert sum(each.cost for each, *_ in runs) <= sum(each.cost for each, *_ in padded)
    assert runs == partition(lengths, fitting([*packed, *buckets, longest]))


def _ordered_plainly(buckets):
    unserved, order = list(buckets), list[Bucket]()

    def serves(bucket, other):
        needed = other.batch * other.length if bucket.sentences else other.length
        holds = bucket.most >= other.most and bucket.length >= needed
        return holds and bucket.cost <= 2 * other.cost

    while unserved:
        best = max(buckets, key=lambda b: (sum(serves(b, other) for other in unserved), -b.cost))
        order.append(best)
        unserved = [other for other in unserved if not serves(best, other)]
    rest = [bucket for bucket in buckets if bucket not in order]
    return [*sorted(order, key=lambda b: b.cost), *sorted(rest, key=lambda b: b.cost)]


@given(
    st.lists(PACKED, max_size=2, unique_by=lambda bucket: bucket.length).flatmap(
        lambda packed: BUCKETS.map(lambda buckets: packed + buckets)
    )
)
@example([Bucket(1, 4, 0), Bucket(2, 4, 0), Bucket(1, 2, 2**70), Bucket(9, 9, 10**400)])
def test_the_order_is_the_one_that_is_defined(buckets):
    assert loading_order(buckets) == _ordered_plainly(buckets)


def test_a_sentence_that_is_too_long_is_cut_or_an_error():
    made = Tokenizers(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = Tokenizer(made.to_str().encode(), "tokenizer.json")
    sentences = [tokenizer.encode("a b " * 4), tokenizer.encode("b"), [3, 4, 3, 4, 3, 4]]
    with pytest.warns(TruncationWarning, match="2 of 3 sentences are longer than 5") as told:
        assert shorten(sentences, 5, lambda: tokenizer, "truncate", "it says") == 2
    assert len(told) == 1, "one warning for all"
    assert sentences == [[1, 3, 4, 3, 2], [1, 4, 2], [3, 4, 3, 4, 3]]
    assert shorten(sentences, 5, lambda: None, "truncate", "it says") == 0, "without a warning"
    with pytest.warns(TruncationWarning):  # a limit of the ending alone still leaves a sentence
        shorten(sentences, 1, lambda: tokenizer, "truncate", "it says")
    assert sentences == [[1], [1], [3]]
    sentences = [[1], [1, 2, 3]]
    with pytest.raises(ContextError, match=r"at most 2 tokens.*number 1 with 3"):
        shorten(sentences, 2, lambda: None, "error", "it says")
    assert sentences == [[1], [1, 2, 3]]


def test_a_pair_or_a_sentence_without_a_token_or_with_none_that_exists_is_refused():
    library = Tokenizers(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(library.to_str().encode(), "tokenizer.json")
    text = SimpleNamespace(need_tokenizer=lambda: tokenizer)
    none = dict.fromkeys(("segments", "template", "instruction", "unread"))
    config = SimpleNamespace(scores="identity", vocab_size=2, **none)
    encoder = SimpleNamespace(encoder=config, max_tokens=8)
    assert tokenize_pairs(encoder, text, "", ["a"], "error").ids == [[0]]
    with pytest.raises(UsageError, match="expected at least one token in sentence 1, found none"):
        tokenize_pairs(encoder, text, "", ["a", " "], "error")
    for ids in ([], [5], [-1], [0, 1, 99]):
        with pytest.raises(UsageError, match="sentence 1"):
            check_ids([[0], ids], 5)
