"""A bundle encodes as transformers does, whatever tokenizer_config.json says of BOS and EOS."""

import itertools
import json

import pytest

from prejit.runtime.text.tokenizer import Tokenizer

from ..checkpoint.test_tokenizer_check import begun_with, crafted

WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdef"]
TEXTS = ("", "a", "abc fed", "<s>ab", " é ")
CLASSES = (None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2TokenizerFast")
SAID = (None, True, False)


def tokenizer_json(*, begun):
    """A tokenizer in the manner of Llama 2, whose post-processor puts a BOS before texts, or none."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": place, "content": WORDS[place], "special": True, **flags} for place in range(3)]
    normalizers = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    model = {
        **{"type": "BPE", "vocab": {word: place for place, word in enumerate(WORDS)}, "merges": []},
        **{"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
    }
    parts = {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "post_processor": begun_with("<s>", 1) if begun else None,
    }
    return crafted(model, **parts).decode()


def ends(ids):
    """How many BOS ids begin a text and how many EOS ids end it."""
    begin = sum(1 for _ in itertools.takewhile(lambda each: each == 1, ids))
    return begin, sum(1 for _ in itertools.takewhile(lambda each: each == 2, reversed(ids)))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("named", CLASSES)
def test_the_ids_are_those_of_transformers(tmp_path, named, begun):
    import transformers

    content = tokenizer_json(begun=begun)
    (tmp_path / "tokenizer.json").write_text(content)
    ours = Tokenizer(content.encode(), "tokenizer.json")
    differing = []
    for bos, eos in itertools.product(SAID, SAID):
        said = {
            "tokenizer_class": named,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": bos,
            "add_eos_token": eos,
        }
        said = {name: value for name, value in said.items() if value is not None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        for text in TEXTS:
            found, expected = ours.encode(text), theirs(text)["input_ids"]
            # Of a class that is named, transformers takes the spaces from its code, not from the file.
            if found != expected if named in CLASSES[:2] else ends(found) != ends(expected):
                differing.append((bos, eos, text, found, expected))
    assert not differing
