"""A tiny BERT with random weights whose words are letters, for tests of encoders. No JAX."""

import zlib
from string import ascii_lowercase

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordPiece

from .parity.encoder_cases import Case


def bert_config(**changes):
    """Return the config.json of a tiny BERT, with changes."""
    config = {
        **{"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu"},
        **{"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1},
        **{"num_attention_heads": 3, "vocab_size": 30, "max_position_embeddings": 64},
        **{"type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0},
    }
    return config | changes


def write_encoder(directory, *, pieces=False, changes=None, **modules):
    """Write the checkpoint and its tokenizer, which is returned.

    Args:
        directory: for the model.
        pieces: whether words may have several letters, each a token.
        changes: of its config.json.
        **modules: those of sentence-transformers around it, as fields of a `Case`.
    """
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *ascii_lowercase]
    names += [f"##{letter}" for letter in ascii_lowercase * pieces]
    config = bert_config(**{"vocab_size": len(names), **(changes or {})})
    Case("tiny", config, 7, **modules).write(directory)
    made = Tokenizer(WordPiece({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(directory / "tokenizer.json"))
    return made


def write_scorer(directory, labels=1):
    """Write a cross-encoder of letters: a BERT with the head of BertForSequenceClassification."""
    changes = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(label): f"label {label}" for label in range(labels)},
    }
    write_encoder(directory, changes=changes, published="bert.")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, shape in {"bert.pooler.dense": (12, 12), "classifier": (labels, 12)}.items():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        tensors[f"{name}.weight"] = random.standard_normal(shape, dtype=np.float32)
        tensors[f"{name}.bias"] = random.standard_normal(shape[:1], dtype=np.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    said = '{"tokenizer_class": "BertTokenizer", "model_max_length": 16}'
    (directory / "tokenizer_config.json").write_text(said)
