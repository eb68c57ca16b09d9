"""Masks of grammars: the tokens that they allow are those that a list of all texts allows."""

import itertools
import random

import numpy as np
import pytest
from tests.threads import in_threads

from prejit.runtime.errors import UsageError
from prejit.server.grammar.grammars import token_table


def product(*parts):
    return {"".join(each) for each in itertools.product(*parts)}


LETTERS = ("ab", "a", "bc", "é")
LANGUAGES = {
    "regex": (
        lambda g: g.regex("(ab|a|bc|é){1,3}x?"),
        set().union(*(product(*[LETTERS] * count, ("", "x")) for count in (1, 2, 3))),
    ),
    "enum": (
        lambda g: g.json_schema({"enum": ["ab", "abc", "abé", 1, 12, -1, True, None]}),
        {'"ab"', '"abc"', '"abé"', "1", "12", "-1", "true", "null"},
    ),
    "lark": (
        lambda g: g.lark('start: "a" b? (C | "[1")\nb: "b" | "bc"\nC: /[0-1]{2}/'),
        product(("a",), ("", "b", "bc"), ("00", "01", "10", "11", "[1")),
    ),
    "integers": (
        lambda g: g.json_schema({"type": "integer", "minimum": -3, "maximum": 120}),
        {str(number) for number in range(-3, 121)} | {"-0"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_mask_allows_what_a_list_of_all_texts_allows(bundle, grammars, name):
    make, texts = LANGUAGES[name]
    vocab_size = bundle.decoder.decoder.vocab_size
    table = token_table(bundle.tokenizer.library, vocab_size)
    (eos,) = bundle.decoder.decoder.eos_token_ids
    encoded = [text.encode() for text in texts]
    chosen = random.Random(0)
    for _ in range(25):
        mask, token_ids, text = make(grammars), [], b""
        while True:
            allowed = mask(token_ids)
            expected = np.zeros(vocab_size, np.bool_)
            for token_id, token in enumerate(table):
                if token:
                    expected[token_id] = any(one.startswith(text + token) for one in encoded)
            expected[eos] = text in encoded
            assert allowed.dtype == np.bool_
            wrong = np.flatnonzero(allowed != expected)
            assert not len(wrong), (text, [(int(i), table[i], bool(allowed[i])) for i in wrong])
            token_id = chosen.choice(np.flatnonzero(allowed).tolist())
            if token_id == eos:
                assert mask.accepts(token_ids)
                assert mask.accepts([*token_ids, eos])
                break
            token_ids.append(token_id)
            text += table[token_id] or b""


def test_tokens_outside_the_grammar_and_stop_tokens_with_a_text(bundle, grammars):
    (a,) = bundle.tokenizer.encode("a")
    mask = grammars.regex("a+b?", stop_token_ids=[a])
    assert not mask([]).take(a)  # it would end an empty text
    (b,) = bundle.tokenizer.encode("b")
    [*eos] = bundle.decoder.decoder.eos_token_ids
    for stops, tokens, allowed in (
        ([a], [], [b]),
        ([a], [b], [a]),
        (None, [b], eos),
        ((), [b], []),
    ):
        options = {} if stops is None else {"stop_token_ids": stops}
        assert np.flatnonzero(grammars.regex("b", **options)(tokens)).tolist() == allowed
    mask = grammars.regex("ab")
    bad = bundle.tokenizer.encode("ax")
    with pytest.raises(UsageError, match="expected one that allows more after"):
        mask(bad)
    assert not mask.accepts(bad)
    assert mask.accepts(bundle.tokenizer.encode("ab"))
    assert mask([]).any()


def test_threads_that_share_a_mask_do_not_disturb_each_other(bundle, grammars):
    texts = [bundle.tokenizer.encode(text) for text in ("aaaa", "aabb", "abab", "bbaa")]
    shared = grammars.regex("[ab]{5}")

    def follow(number):
        for _ in range(50):
            assert shared(texts[number]).any()
            assert not shared.accepts(texts[number])

    in_threads(len(texts), follow)
