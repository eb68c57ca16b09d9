"""The bytes of tokens: together they are the text that the tokenizer's own decoder makes."""

import json

import pytest
from tests.lettered import PADDED, SPECIAL, tokenizer_json
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from prejit.runtime.errors import UsageError
from prejit.runtime.text.tokenizer import Tokenizer
from prejit.runtime.text.vocabulary import TokenBytes
from prejit.server.grammar.grammars import token_table

ANCHOR = "x"
LLAMA_2 = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def llama_2():
    words = ["▁", "▁a", "a▁", "é", "你", "▁▁", ANCHOR]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: place for place, token in enumerate(tokens)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    return {**_base(), "decoder": {"type": "Sequence", "decoders": LLAMA_2}, "model": model}


def metaspace():
    pieces = [["<unk>", 0.0], ["▁", -1.0], ["▁a", -2.0], ["é", -3.0], [ANCHOR, -3.0]]
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    model = {"type": "Unigram", "unk_id": 0, "vocab": pieces}
    return {**_base(), "decoder": decoder, "model": model}


def _base():
    absent = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))
    return {"version": "1.0", "added_tokens": [], **absent}


@pytest.mark.parametrize("made", [tokenizer_json, llama_2, metaspace])
def test_bytes_of_a_token_are_what_it_adds_to_a_text(made):
    described = made()
    tokenizer = Tokenizer(json.dumps(described).encode(), "tokenizer.json")
    size = tokenizer.library.get_vocab_size(with_added_tokens=False)
    table = token_table(tokenizer.library, size)
    anchor = max(i for i, token in enumerate(table) if token == ANCHOR.encode())
    checked = 0
    for token_id, token in enumerate(table):
        if token is None:
            continue
        # Twice the anchor, because some decoders strip or lead a space at the ends of a text.
        added = tokenizer.decode([anchor, token_id, anchor])[1:-1]
        try:
            expected = token.decode()
        except UnicodeDecodeError:
            assert "\ufffd" in added
            continue
        assert added == expected
        checked += 1
    assert checked > 3


def test_special_tokens_and_padding_have_no_bytes_and_others_do():
    tokenizer = Tokenizer(json.dumps(tokenizer_json()).encode(), "tokenizer.json")
    size = tokenizer.library.get_vocab_size(with_added_tokens=False)
    table = token_table(tokenizer.library, size + len(SPECIAL) + PADDED)
    assert table[size:] == [None] * (len(SPECIAL) + PADDED)
    assert None not in table[:size]
    assert token_table(tokenizer.library, 10) == table[:10]  # a model with fewer logits
    assert tokenizer.special_id("</s>") == size + 1
    assert tokenizer.special_id("ab") is None
    assert tokenizer.special_id("no token") is None
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Library(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    found = TokenBytes(made)
    for text in ("Hello, world\n", "größer 😀", "\0\x7f\u00a0"):
        assert b"".join(found[each] for each in made.encode(text).ids) == text.encode()
    assert found[made.token_to_id("<|end|>")] == b"<|end|>"
    assert found[made.get_vocab_size() + 7] == b"", "padding of a vocabulary"
    made = Library(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    found = TokenBytes(made)
    assert [found[1], found[2]] == [b"play", b"##ing"]


WORD_PIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}
CTC = {"type": "CTC", "pad_token": "p", "word_delimiter_token": "|", "cleanup": True}


@pytest.mark.parametrize("decoder", [WORD_PIECE, {"type": "Sequence", "decoders": [CTC]}])
def test_a_tokenizer_whose_tokens_depend_on_others_is_refused(decoder):
    described = json.dumps({**metaspace(), "decoder": decoder})
    tokenizer = Tokenizer(described.encode(), "model/tokenizer.json")
    found = '.*"(WordPiece|CTC)"'
    with pytest.raises(UsageError, match=f"decoder of the tokenizer: expected ByteLevel{found}"):
        token_table(tokenizer.library, 4)
