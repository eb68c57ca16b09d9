"""Text of tokens as they come: whole characters, the same text as decoding all at once, at a flat cost."""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Library

from prejit.runtime.errors import ContextError, RejectError, UsageError
from prejit.runtime.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[4] / "manifests" / "demo-model" / "tokenizer.json"
TEXT = st.text(st.sampled_from("aé…😀你好 \n�") | st.sampled_from(list("def x(y):")), max_size=40)


@cache
def byte_level():
    return Tokenizer(DEMO.read_bytes(), str(DEMO))


@cache
def sentencepiece():
    """In the manner of Llama 2: a space before the text, words with their space, bytes for the rest."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocab += [*"abcdefxy():\n", "ab", "▁a", "▁▁", "de", "def", "▁def"]
    merges = [("a", "b"), ("▁", "a"), ("▁", "▁"), ("d", "e"), ("de", "f"), ("▁", "def")]
    ids = {token: place for place, token in enumerate(vocab)}
    model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = Library(model)
    made.add_special_tokens([AddedToken(each, normalized=False) for each in vocab[:3]])
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", "$A $B:1", [("<s>", 1)])
    parts = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    made.enable_truncation(6)
    made.enable_padding(length=6, pad_token="<unk>")
    return Tokenizer(made.to_str().encode(), "tokenizer.json")


TOKENIZERS = pytest.mark.parametrize("made", [byte_level, sentencepiece])


def streamed(stream, tokens):
    return "".join(map(stream.push, tokens)) + stream.finish()


def readings(tokenizer, prompt, piece):
    """The whole text by a piece that follows a prompt: what the prompt leaves unfinished comes whole."""
    before = [tokenizer.decode(prompt[: len(prompt) - begun]) for begun in range(4)]
    return [text + piece for text in (*before, before[0].rstrip("\ufffd"))]


@TOKENIZERS
@given(text=TEXT)
@example("\ufffdéé:")  # a prompt may end in a character begun that follows U+FFFD itself
@example("é\ufffdé")
@example("\ufffd\ufffd😀é")
@example("\ufffd😀\ufffdé")
def test_pieces_are_the_text(made, text):
    tokenizer = made()
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        piece = streamed(tokenizer.stream(ids[:cut]), ids[cut:])
        assert tokenizer.decode(ids) in readings(tokenizer, ids[:cut], piece), cut


@given(
    prompt=st.lists(st.integers(0, 4095), max_size=20),
    new=st.lists(st.integers(0, 4095), max_size=60),
)
def test_tokens_of_bytes_give_the_text_of_all_at_once(prompt, new):
    tokenizer = byte_level()
    piece = streamed(tokenizer.stream(prompt), new)
    assert tokenizer.decode(prompt + new) in readings(tokenizer, prompt, piece)


@given(st.lists(st.integers(0, 276), max_size=60))
def test_bytes_that_are_no_text_end_no_stream(tokens):
    """`tokenizers.decoders.DecodeStream` raises on some."""
    tokenizer = sentencepiece()
    text = streamed(tokenizer.stream([1]), tokens)
    if "\ufffd" not in tokenizer.decode(tokens):
        assert text == tokenizer.decode([1, *tokens])


def test_special_tokens_truncation_and_padding_do_not_change_prompts_or_text():
    """sentence-transformers publishes tokenizer.json with both."""
    tokenizer = sentencepiece()
    assert tokenizer.encode("<s>ab")[:2] == [1, 1]
    assert tokenizer.encode("<s>ab", add_special_tokens=False).count(1) == 1
    many = tokenizer.encode_batch(["<s>ab", ""], add_special_tokens=False)
    assert many == [tokenizer.encode(x, add_special_tokens=False) for x in ("<s>ab", "")]
    text = "abdef" * 20
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("")) < 6
    assert tokenizer.encode_batch([text, "a"]) == [tokenizer.encode(text), tokenizer.encode("a")]
    assert tokenizer.encode_batch(text) == [tokenizer.encode(text)]  # and not of each letter
    word = tokenizer.encode("def")[1:]
    assert streamed(tokenizer.stream([1]), word) == "def"
    assert streamed(tokenizer.stream(tokenizer.encode("a")), word) == " def"
    # Special tokens make no text: the word before them still counts.
    assert streamed(tokenizer.stream([*tokenizer.encode("a"), *[1] * 40]), word) == " def"
    for extra in range(4):
        prompt, new = tokenizer.encode("a" * extra + "😀" * 10), tokenizer.encode("😀")[-4:]
        for cut in range(4):  # the prompt may end within one as well
            begun, rest = [*prompt, *new[:cut]], new[cut:]
            assert streamed(tokenizer.stream(begun), rest) == "😀"
    a, b = tokenizer.encode("ab")[-1], 10_000_000
    assert streamed(tokenizer.stream([1]), [a, 2, b, 1, a, *[b] * 40, a]) == "ababab"


def test_texts_that_cannot_be_encoded_are_errors_also_where_the_library_panics():
    for encode in (byte_level().encode, lambda text: byte_level().encode_batch(["a", text])):
        with pytest.raises(UsageError, match=r"lone surrogate '\\ud800' at character 1"):
            encode("a\ud800")
    tokenizer = Tokenizer(crafted(WORDS, pre_tokenizer=SLOW), "somewhere")
    with pytest.raises(ContextError, match=r"at most 4 tokens .*, found a text of 4097 characters"):
        tokenizer.encode("a" * 4097, max_tokens=4)
    assert len(byte_level().encode("ab" * 2048, max_tokens=4)) > 4, "near the bound: tokens decide"
    # A panic is a BaseException that is no Exception: a server that does not expect it ends.
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UsageError, match=r"tokenizer can encode, found .* it fails on: Onig"):
            encode("a" * 40)
    assert tokenizer.encode("a") == [0], "a panic must not spoil what follows"
    lacking = Tokenizer(crafted({**WORDS, "vocab": {"a": 0}}), "somewhere")
    with pytest.raises(UsageError, match=r"the tokenizer can encode, .*Missing \[UNK\]"):
        lacking.encode("b")
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    for content, why in ((crafted(WORDS, normalizer=charsmap), ": Precompiled"), (b"{}", "")):
        with pytest.raises(RejectError, match=rf"somewhere: expected a tokenizer\.json{why}"):
            Tokenizer(content, "somewhere")


def crafted(model, **parts):
    empty = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    tree = {"version": "1.0", "added_tokens": [], **dict.fromkeys(empty), **parts, "model": model}
    return json.dumps(tree).encode()


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
SLOW = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
"""Onig gives up on 40 `a`s: it has tried as many ways to match them as it may."""


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**70])
def test_ids_that_the_library_does_not_take_are_usage_errors(token_id):
    for made in (byte_level, sentencepiece):
        for decode in (made().decode, made().stream):
            with pytest.raises(UsageError, match=rf"the tokenizer can decode, found \[{token_id}"):
                decode([token_id])
