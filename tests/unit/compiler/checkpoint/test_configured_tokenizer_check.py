"""A tokenizer that would fail where the bundle runs fails the build, with the file and the reason."""

import json
from pathlib import Path

import pytest

from prejit.compiler.checkpoint import configured_tokenizer
from prejit.compiler.checkpoint.configured_tokenizer import check_tokenizer
from prejit.runtime.errors import CheckpointError

DEMO = Path(__file__).resolve().parents[4] / "manifests" / "demo-model" / "tokenizer.json"
WORDS = {"a": 0, "[UNK]": 1, "[CLS]": 2}


def crafted(model=None, **parts):
    """A tokenizer.json with this model and nothing else but the given parts."""
    empty = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    tree = {"version": "1.0", "added_tokens": [], **dict.fromkeys(empty), **parts}
    return json.dumps({**tree, "model": model or word_level()}).encode()


def word_level(**changes):
    return {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]", **changes}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def begun_with(token, token_id):
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, sequence],
        "pair": [sequence, sequence],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
NO_JSON, BEYOND = r"expected a tokenizer\.json: ", "expected token ids of 0 to 4, "
UNIGRAM = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}
BROKEN = [
    (b"", f"{NO_JSON}.*EOF"),
    (bytes(range(256)), NO_JSON),
    (crafted(normalizer=PRECOMPILED), f"{NO_JSON}.*Precompiled"),  # it panics when it is read
    (crafted(word_level(vocab={"a": 0})), r"encoding an English text: .*Missing \[UNK\] token"),
    (crafted(UNIGRAM), r"encoding an English text: .*unk_id"),
    (crafted(pre_tokenizer=split("(a+)+b")), r"40 times the letter a: .*Onig: .*retry-limit"),
    (crafted(word_level(vocab={**WORDS, "b": 7})), f"{BEYOND}which the model has; found 7\n"),
    (crafted(post_processor=begun_with("[BOS]", 9)), f"{BEYOND}.*; found 9 while encoding an em"),
    (
        crafted({"type": "BPE", "vocab": {"é": 0}, "merges": []}),
        "expected at least one token, found none while encoding an English text",
    ),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_a_tokenizer_that_would_fail_a_server_fails_the_build(content, message):
    check_tokenizer(DEMO, DEMO.read_bytes(), 4096)
    with pytest.raises(CheckpointError, match=message) as caught:
        check_tokenizer(Path("dir/tokenizer.json"), content, 5)
    assert str(caught.value).startswith("dir/tokenizer.json: ")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_takes_all_memory_or_time_fails(monkeypatch):
    monkeypatch.setattr(configured_tokenizer, "_CHECK_MEMORY_BYTES", 1 << 30)
    grow = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 400}
    content = crafted(normalizer={"type": "Sequence", "normalizers": [grow] * 4})
    with pytest.raises(CheckpointError, match="a crash with signal 6 while encoding an English"):
        check_tokenizer(Path("tokenizer.json"), content, 5)
    monkeypatch.setattr(configured_tokenizer, "_CHECK_CPU_SECONDS", 1)
    # So many ways to match that trying them takes long, but not so many that Onig gives up.
    slow = {"type": "Replace", "pattern": {"Regex": "(a{1,6}){1,8}b"}, "content": ""}
    content = crafted(normalizer={"type": "Sequence", "normalizers": [slow] * 20})
    with pytest.raises(CheckpointError, match="no end after 1 s while encoding 40 times"):
        check_tokenizer(Path("tokenizer.json"), content, 5)
