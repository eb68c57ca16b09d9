"""A small random decoder with a tokenizer and a chat template, and a bundle of it, for tests of text."""

import json

import pytest

from prejit.runtime.text.vocabulary import byte_alphabet

from .decoders import build, gpt2_config
from .parity.cases import Case

WORDS = (
    *("ab", "abc", "bc", '{"', '":', '",', '"}', '": "', "true", "false", "null", "12", " 1", "  "),
    *("é", "[1", "]]", "\n ", "name", "<tool_call>\n{", "call>"),
)
"""Tokens of several bytes: some end or begin in the middle of a part of JSON, or of a character."""
SPECIAL = ("<s>", "</s>", "[CALL]")
PADDED = 5  # logits for which the tokenizer has no token
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_json():
    """A byte-level BPE: the bytes, WORDS, halves of characters, and SPECIAL tokens at the end."""
    spelled = {byte: character for character, byte in byte_alphabet().items()}
    words = [word.encode() for word in WORDS] + [b"\xc3", b"a\xc3", b"\xa9"]
    texts = ["".join(spelled[byte] for byte in word) for word in words]
    tokens = list(dict.fromkeys([*sorted(byte_alphabet()), *texts]))
    added = [
        {
            **{"id": len(tokens) + place, "content": content, "special": True},
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for place, content in enumerate(SPECIAL)
    ]
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False}
    of_bytes |= {"trim_offsets": True, "use_regex": True}
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": added},
        **{"normalizer": None, "pre_tokenizer": of_bytes, "post_processor": None},
        "decoder": of_bytes,
        "model": {
            "type": "BPE",
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": [["a", "b"], ["ab", "c"], ["1", "2"]],
        },
    }


def write_lettered(directory, *, template=True, **sizes):
    """A checkpoint of the model, with its tokenizer and chat template; `sizes` are fields of its config."""
    tokenizer = tokenizer_json()
    count = len(tokenizer["model"]["vocab"]) + len(SPECIAL)
    eos = count - len(SPECIAL) + SPECIAL.index("</s>")
    given = {"vocab_size": count + PADDED, "n_positions": 512, "eos_token_id": eos}
    Case("gpt2", gpt2_config(**{**given, **sizes}), seed=1).write(directory)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    described = {"bos_token": "<s>", "eos_token": "</s>"}
    if template:
        described["chat_template"] = TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory


@pytest.fixture(scope="session")
def lettered_dir(build_cache, warm, once):
    """A bundle of that model: contexts up to 512, batches of 1 and 3."""
    buckets = {"batch": (1, 3), "prompt": (64,), "context": (64, 512)}

    def make(at):
        build(warm, write_lettered(at / "model"), at, build_cache, **buckets)

    return once("lettered", make) / "decoder"
