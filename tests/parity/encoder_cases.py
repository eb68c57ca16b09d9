"""Small random encoders, the same wherever they are made: BERT, RoBERTa, DistilBERT, and modules around them.

No JAX, no torch.
"""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .cases import linear, noise, norm, pick, write_checkpoint

ROWS, TOKENS = 4, 11
"""Of a case's batch. The first row is full, the others are shorter."""

REFERENCE = Path(__file__).parent / "encoder_reference.npz"

COUNT = 12
"""Cases of each kind."""


POOLING = (
    *("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens"),
    "lasttoken",
)
ACTIVATIONS = ("linear.Identity", "activation.Tanh", "activation.ReLU", "activation.GELU")


@dataclass(frozen=True)
class Case:
    """A configuration with a seed for its weights and tokens.

    Attributes:
        published: what tensors have before their names: `bert.`, or nothing.
        head: whether a pooler and a masked-LM head, which nobody wants, are in the file.
        pooling: modes, of POOLING; empty: no modules.json.
        dense: (inputs, outputs, bias, activation) of each dense layer.
    """

    name: str
    config: dict[str, Any]
    seed: int
    published: str = ""
    head: bool = False
    pooling: tuple[str, ...] = ()
    dense: tuple[tuple[int, int, bool, str], ...] = field(default=())
    normalize: bool = False
    longest = TOKENS
    norms_begin_at = 1.0

    @property
    def tokens(self):
        """Int32 [ROWS, longest]; behind a row's length the padding token."""
        random = np.random.default_rng([self.seed, 0])
        shape = (ROWS, self.longest)
        tokens = random.integers(3, self.config["vocab_size"], shape, dtype=np.int32)
        if self.config["model_type"] == "roberta":
            tokens[0, 4] = self.config["pad_token_id"]  # one in the midst takes no position
        tokens[np.arange(self.longest) >= self.lengths[:, None]] = self.config["pad_token_id"]
        return tokens

    @property
    def lengths(self):
        """Int32 [ROWS]."""
        random = np.random.default_rng([self.seed, 1])
        return np.array([self.longest, 1, *random.integers(2, self.longest, ROWS - 2)], np.int32)

    def write(self, directory):
        """Writes the checkpoint as torch's save_pretrained or sentence-transformers' save would."""
        is_small = self.config["model_type"] == "distilbert"
        shapes = (_distilbert_shapes if is_small else _bert_shapes)(self.config)
        tensors = {self.published + name: self.values(name, s) for name, s in shapes.items()}
        of_head = _head_shapes(self.config, self.published).items() if self.head else ()
        tensors |= {name: self.values(name, shape) for name, shape in of_head}
        write_checkpoint(directory, self.config, tensors)
        if self.pooling:
            self._write_modules(directory)

    def _write_modules(self, directory):
        kinds = ["Transformer", "Pooling", *["Dense"] * len(self.dense)]
        kinds += ["Normalize"] * self.normalize
        modules = [
            {"idx": place, "name": str(place), "path": f"{place}_{kind}" if place else ""}
            | {"type": f"sentence_transformers.models.{kind}"}
            for place, kind in enumerate(kinds)
        ]
        (directory / "modules.json").write_text(json.dumps(modules))
        pooling = {f"pooling_mode_{mode}": mode in self.pooling for mode in POOLING}
        pooling |= {"word_embedding_dimension": self.width, "include_prompt": True}
        (directory / "1_Pooling").mkdir(exist_ok=True)
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        for place, (inputs, outputs, bias, activation) in enumerate(self.dense):
            at = directory / f"{place + 2}_Dense"
            at.mkdir(exist_ok=True)
            dense = {"in_features": inputs, "out_features": outputs, "bias": bias}
            dense["activation_function"] = f"torch.nn.modules.{activation}"
            (at / "config.json").write_text(json.dumps(dense))
            tensors = {"linear.weight": self.values(f"{place}.weight", (outputs, inputs))}
            if bias:
                tensors["linear.bias"] = self.values(f"{place}.bias", (outputs,))
            save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
        said = {"max_seq_length": 16, "do_lower_case": False}
        (directory / "sentence_bert_config.json").write_text(json.dumps(said))

    @property
    def width(self):
        """Of hidden states."""
        return int(self.config.get("hidden_size", self.config.get("dim")))

    def values(self, name, shape):
        """Values of a published tensor, large enough that each part of the model shows in the result."""
        values = noise(self.seed, name, shape)
        if len(shape) == 2:
            return values * np.float32(0.4)
        is_norm = "norm" in name.lower() and name.endswith("weight")
        return values * np.float32(0.2) + np.float32(is_norm and self.norms_begin_at)


_FAMILIES = ("bert", "roberta", "distilbert")


def cases():
    plain = [_plain(family, number) for family in _FAMILIES for number in range(COUNT)]
    return (*plain, *map(_sentences, range(COUNT)))


def _plain(family, number):
    random = np.random.default_rng([zlib.crc32(family.encode()), number])
    heads, size = pick(random, [1, 2, 3, 5]), pick(random, [2, 3, 4, 8])
    sizes = [heads * size, pick(random, [11, 24, 32]), pick(random, [1, 2, 3])]
    config = {
        "model_type": family,
        "vocab_size": pick(random, [31, 64, 83]),
        "max_position_embeddings": pick(random, [16, 21, 32]),
        "pad_token_id": int(family == "roberta"),
    }
    if family == "distilbert":
        config |= {
            "architectures": ["DistilBertModel"],
            "activation": ("gelu", "relu")[number % 2],
            **dict(zip(("dim", "hidden_dim", "n_layers"), sizes, strict=True)),
            "n_heads": heads,
        }
    else:
        names = ("hidden_size", "intermediate_size", "num_hidden_layers")
        config |= {
            "architectures": ["BertModel" if family == "bert" else "RobertaModel"],
            "hidden_act": ("gelu", "gelu_new", "relu", "silu")[number % 4],
            **dict(zip(names, sizes, strict=True)),
            "num_attention_heads": heads,
            "type_vocab_size": 2 if family == "bert" else 1,
            "layer_norm_eps": pick(random, [1e-12, 1e-5]),
        }
    head, seed = number % 3 == 1, 1000 * (1 + _FAMILIES.index(family)) + number
    return Case(f"{family}-{number:02}", config, seed, f"{family}." if head else "", head)


def _sentences(number):
    family = _FAMILIES[number % 3]
    base = _plain(family, number + 20)
    pooling = POOLING[number % 3 :: 2] if number >= 9 else (POOLING[number % len(POOLING)],)
    width, dense = base.width * len(pooling), ()
    if number % 2:
        dense = ((width, 7, number % 4 == 1, ACTIVATIONS[number // 2 % len(ACTIVATIONS)]),)
    if number == 11:
        dense = (*dense, (7, 5, True, "activation.Tanh"))
    modules = {"pooling": pooling, "dense": dense, "normalize": number % 3 != 1}
    return Case(f"sentence-{number:02}-{family}", base.config, 5000 + number, **modules)


def _bert_shapes(config):
    parts = ("self.query", "self.key", "self.value", "output.dense")
    names = ("intermediate.dense", "output.dense", "attention.output.LayerNorm", "output.LayerNorm")
    sizes = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    types = (config["type_vocab_size"], config["hidden_size"])
    return _shapes(config, "encoder", *sizes, parts, *names) | {
        "embeddings.token_type_embeddings.weight": types
    }


def _distilbert_shapes(config):
    parts = ("q_lin", "k_lin", "v_lin", "out_lin")
    names = ("ffn.lin1", "ffn.lin2", "sa_layer_norm", "output_layer_norm")
    sizes = (config[key] for key in ("dim", "hidden_dim", "n_layers"))
    return _shapes(config, "transformer", *sizes, parts, *names)


def _shapes(config, stack, width, inner, layers, parts, up, down, *norms):
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        **norm("embeddings.LayerNorm", width),
    }
    for layer in range(layers):
        at = f"{stack}.layer.{layer}"
        for name in parts:
            shapes |= linear(f"{at}.attention.{name}", width, width)
        shapes |= linear(f"{at}.{up}", width, inner) | linear(f"{at}.{down}", inner, width)
        for name in norms:
            shapes |= norm(f"{at}.{name}", width)
    return shapes


def _head_shapes(config, prefix):
    """A pooler and a masked-LM head by their published names."""
    width = config.get("hidden_size", config.get("dim"))
    assert isinstance(width, int)
    family = config["model_type"]
    if family == "distilbert":
        return linear("vocab_transform", width, width) | norm("vocab_layer_norm", width)
    head = "cls.predictions.transform.dense" if family == "bert" else "lm_head.dense"
    return linear(f"{prefix}pooler.dense", width, width) | linear(head, width, width)
