"""A bundle's tokenizer.json gives the tokens that transformers gives, or the build names files and keys."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer

from prejit.compiler.checkpoint.configured_tokenizer import (
    check_encoder_tokenizer,
    check_prefix_space,
    with_configured_tokens,
)
from prejit.runtime.errors import CheckpointError

from .test_configured_tokenizer_check import begun_with, crafted

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


LOWER = {"type": "BertNormalizer", "lowercase": True}
CASED = {"type": "BertNormalizer", "lowercase": False}
BERT = {"tokenizer_class": "BertTokenizer"}
EMBEDS = SimpleNamespace(scores=False, has_segments=True)


def test_what_transformers_does_otherwise_is_told(tmp_path):
    file, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    truncation = {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    second = begun_with("[CLS]", 2)
    second["single"][1]["Sequence"]["type_id"] = 1
    for said, parts, told in (
        ({}, {"truncation": truncation}, 'truncation.direction: expected "Right", found "Left"'),
        (BERT, {"normalizer": CASED}, "normalizer.lowercase: expected true, the do_lower_case of"),
        (
            {**BERT, "do_lower_case": False},
            {"normalizer": LOWER},
            f"lowercase: expected false, the do_lower_case of {settings}, found true",
        ),
        (
            {**BERT, "tokenizer_class": "MPNetTokenizer", "strip_accents": False},
            {"normalizer": LOWER},
            "strip_accents: expected false, the strip_accents of .*, found null",
        ),
        (
            {**BERT, "tokenize_chinese_chars": False},
            {"normalizer": {**LOWER, "handle_chinese_chars": True}},
            "handle_chinese_chars: expected false, the tokenize_chinese_chars of",
        ),
        ({}, {"post_processor": second}, "single: expected type_id 0 .* found 1 of Sequence"),
    ):
        settings.write_text(json.dumps(said))
        with pytest.raises(CheckpointError, match=told) as raised:
            check_encoder_tokenizer(file, crafted(**parts), EMBEDS, 9)
        assert str(raised.value).startswith(f"{file}: ")
    right = {"truncation_side": "right"}  # tokenizer_config.json goes first
    settings.write_text(json.dumps({**BERT, "do_lower_case": False, **right}))
    fine = crafted(normalizer=CASED, truncation=truncation, post_processor=begun_with("[CLS]", 2))
    check_encoder_tokenizer(file, fine, EMBEDS, 9)
    # Where no file names a class, transformers takes the one of the model.
    settings.write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match="lowercase: expected true, the do_lower_case of"):
        check_encoder_tokenizer(file, crafted(normalizer=CASED), EMBEDS, 9)
    settings.write_text(json.dumps({"strip_accents": True}))  # what null means in lower case
    check_encoder_tokenizer(file, crafted(normalizer=LOWER), EMBEDS, 9)
    scores = SimpleNamespace(scores=True, has_segments=True)  # it is given the segments of one text
    check_encoder_tokenizer(file, crafted(post_processor=second), scores, 9)


@pytest.mark.parametrize(
    ("said", "family"), [({"tokenizer_class": "GPT2TokenizerFast"}, "gpt2"), ({}, "roberta")]
)
def test_a_space_is_put_before_texts_where_transformers_puts_one(said, family, tmp_path):
    file, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    for wanted, found in itertools.product((True, False, None), (True, False)):
        splits = {"type": "ByteLevel", "add_prefix_space": found}
        settings.write_text(json.dumps(said | ({"add_prefix_space": wanted} if wanted else {})))
        if bool(wanted) is found:
            check_prefix_space(file, crafted(pre_tokenizer=splits))
            continue
        told = "pre_tokenizer.add_prefix_space: expected .*, the add_prefix_space of .*, found"
        with pytest.raises(CheckpointError, match=told):
            check_prefix_space(file, crafted(pre_tokenizer=splits))
    settings.write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": true}')
    check_prefix_space(file, crafted(pre_tokenizer=splits))


def test_clip_texts_end_with_the_token_that_is_pooled(tmp_path):
    file = tmp_path / "tokenizer.json"
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    ends = {"type": "RobertaProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]}
    template = begun_with("[CLS]", 2)
    template["single"].reverse()
    for processor in (ends, template, {"type": "Sequence", "processors": [template]}):
        check_encoder_tokenizer(file, crafted(post_processor=processor), EMBEDS, 3)
    for processor, size in ((ends, 4), (begun_with("[CLS]", 2), 3), (None, 3)):
        with pytest.raises(CheckpointError, match=f"post_processor: expected {size - 1}, the last"):
            check_encoder_tokenizer(file, crafted(post_processor=processor), EMBEDS, size)
