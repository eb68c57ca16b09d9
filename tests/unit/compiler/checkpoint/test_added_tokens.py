"""Added tokens have the properties that transformers takes from tokenizer_config.json."""

import itertools
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from prejit.compiler.checkpoint.added_tokens import with_configured_tokens

DEMO = Path(__file__).resolve().parents[4] / "manifests" / "demo-model" / "tokenizer.json"
NAMES = ("<A>", "<b>", "ab")  # the last is no word of the vocabulary but an added token
TEXTS = ("a string x <A> y", " <b>  <b>c", "def<A>(", "aab ab x", "<A>\n\nhi")
KEYS = ("single_word", "lstrip", "rstrip", "normalized", "special")


LONE = b"""{"added_tokens": [{"id": 0, "content": "<A>", "special": false}],
"model": {"vocab": {"\\ud800": 1}}}"""


def described(place, *true):
    return {"content": NAMES[place], **dict.fromkeys(KEYS, False), **dict.fromkeys(true, True)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"added_tokens_decoder": {"4096": described(0, "rstrip"), "4097": described(1, "lstrip")}},
        {"added_tokens_decoder": {"4097": described(1, "special"), "4098": described(2)}},
        {"added_tokens_decoder": {"4096": {"content": "<A>"}}, "eos_token": "<A>"},
        {"eos_token": "<A>", "bos_token": "ab"},
        {"added_tokens_decoder": {"300": {**described(0), "content": "ing"}}},  # of the vocabulary
        {"pad_token": "none of its tokens", "added_tokens_decoder": {"1": 3}},
        {"pad_token": "def", "none": "a name alone makes no added token"},
    ],
)
def test_tokens_and_texts_are_those_of_transformers(settings, tmp_path):
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer.from_file(str(DEMO))
    for place, (name, special) in enumerate(zip(NAMES, (False, True, False), strict=True)):
        made.add_tokens([AddedToken(name, special=special, single_word=place == 2)])
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    content = with_configured_tokens(file, file.read_bytes())
    if not settings or "none" in json.dumps(settings):
        assert content == file.read_bytes()
        return
    found = Tokenizer.from_buffer(content)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text, special in itertools.product(TEXTS, (True, False)):
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        assert found.encode(text, add_special_tokens=special).ids == ids, text
        assert found.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b'{"added_tokens": [3]}', b'{"added_tokens": [', LONE]
)
def test_what_is_no_tokenizer_is_left_to_its_check(content, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<A>"}')
    assert with_configured_tokens(tmp_path / "tokenizer.json", content) == content
