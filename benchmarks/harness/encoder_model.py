"""Make an encoder of MiniLM's shape with random weights, in the layout of sentence-transformers.

    python -m benchmarks.harness.encoder_model DIR

    DIR/modules.json, config.json, model.safetensors, 1_Pooling/config.json, tokenizer.json, ...

all-MiniLM-L6-v2's sizes: 6 layers, width 384, 12 heads, 30522 tokens; mean pooling, then length 1. Speed
depends on shapes only. The tokenizer is WordPiece over letters and pairs of them, so that every text has
tokens; most of the vocabulary is never used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from benchmarks.harness.models import begin, finish, write_safetensors

LAYERS, WIDTH, HEADS, INNER, VOCABULARY, POSITIONS, MAX_TOKENS = 6, 384, 12, 1536, 30522, 512, 512
SEED = 7
_SPECIAL = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": VOCABULARY,
}
_MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))


def make(directory: Path) -> None:
    """Make the model unless its directory exists. Another seed or recipe needs another directory."""
    if directory.is_dir():
        return
    partial = begin(directory)
    (partial / "1_Pooling").mkdir()
    weights = {name: _random(place, name, shape) for place, (name, shape) in enumerate(_shapes())}
    write_safetensors(partial / "model.safetensors", weights)
    for name, content in _files().items():
        (partial / name).write_text(json.dumps(content, indent=1))
    tokenizer().save(str(partial / "tokenizer.json"))
    finish(partial, CONFIG)


def _files() -> dict[str, Any]:
    modes = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {
        "modules.json": [
            {
                "idx": place,
                "name": str(place),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
            for place, (path, kind) in enumerate(_MODULES)
        ],
        "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": WIDTH,
            "pooling_mode_mean_tokens": True,
            **{f"pooling_mode_{mode}": False for mode in modes},
        },
    }


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    for table, rows in (("word", VOCABULARY), ("position", POSITIONS), ("token_type", 2)):
        yield f"embeddings.{table}_embeddings.weight", (rows, WIDTH)
    yield from _norm("embeddings.LayerNorm")
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        for name, inputs, outputs in (
            ("attention.self.query", WIDTH, WIDTH),
            ("attention.self.key", WIDTH, WIDTH),
            ("attention.self.value", WIDTH, WIDTH),
            ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", WIDTH, INNER),
            ("output.dense", INNER, WIDTH),
        ):
            yield f"{at}.{name}.weight", (outputs, inputs)
            yield f"{at}.{name}.bias", (outputs,)
        yield from _norm(f"{at}.attention.output.LayerNorm")
        yield from _norm(f"{at}.output.LayerNorm")


def _norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (WIDTH,)
    yield f"{name}.bias", (WIDTH,)


def _random(place: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng([SEED, place]).standard_normal(shape, dtype=np.float32)
    if "LayerNorm.weight" in name:
        return 1 + np.float32(0.1) * values
    return values * np.float32(0.05 if len(shape) == 2 else 0.02)


def tokenizer() -> Tokenizer:
    """Return a WordPiece tokenizer with BERT's special tokens and VOCABULARY entries."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?-'"
    pieces = [letter + more for letter, more in product(letters, ("", *letters))]
    names = iter([*pieces, *(f"##{piece}" for piece in pieces)])
    taken = {place: token for token, place in _SPECIAL.items()}
    vocabulary = {
        taken.get(place) or next(names, f"[unused{place}]"): place for place in range(VOCABULARY)
    }
    made = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(list(_SPECIAL))
    made.post_processor = processors.BertProcessing(
        ("[SEP]", _SPECIAL["[SEP]"]), ("[CLS]", _SPECIAL["[CLS]"])
    )
    return made


if __name__ == "__main__":
    make(Path(sys.argv[1]))
